"""A trial that is far slower than similar ones: on a CPU its measurement was stalled."""

from __future__ import annotations

import math
import statistics
from itertools import islice

from sweeper.common.trials import TrialRecord, TrialStatus

NEIGHBOURS = 3  # the nearest ones that a trial is compared with
MIN_NEIGHBOURS = 2
MAX_RATIO = 2.0  # of a parameter's values: farther trials may differ for good reasons
FAR_BELOW = 5.0  # a trial is measured again if all of its neighbours are so many times as fast
SAME_SPEED = 1.5  # two measurements of a point differ by less, where both describe the point
LATEST = 1000  # trials that are searched for neighbours, so that the work for a trial stays the same


def describe_stall(record: TrialRecord, records: dict[int, TrialRecord], objective: str, direction: str) -> str:
    """Return how far a complete trial is behind all of its neighbours; empty if it is not far behind.

    Neighbours are complete trials of the same work, and those whose numbers are within `MAX_RATIO` of the trial's and
    whose other parameters are equal: the nearest `NEIGHBOURS` of them. A trial that measured its parameters twice at
    the same speed is not behind.
    """
    earlier = records.get(record.retry.trial) if record.retry else None
    if earlier and _is_same_speed(record, earlier):
        return ""
    own = {record.number, *([earlier.number] if earlier else [])}
    distances = []
    for other in islice(reversed(records.values()), LATEST):
        is_comparable = other.status is TrialStatus.COMPLETE and other.remeasurement is None
        if is_comparable and other.metrics.get(objective, 0.0) > 0 and other.number not in own:
            distances.append((_distance(record, other), other.number, other.metrics[objective]))
    nearest = sorted(entry for entry in distances if math.isfinite(entry[0]))[:NEIGHBOURS]
    value, values = record.metrics.get(objective, 0.0), [entry[2] for entry in nearest]
    if record.status is not TrialStatus.COMPLETE or value <= 0 or len(values) < MIN_NEIGHBOURS:
        return ""
    ratios = [other / value if direction == "maximize" else value / other for other in values]
    if min(ratios) <= FAR_BELOW:
        return ""
    return f"its {len(ratios)} nearest neighbours are {min(ratios):.0f} to {max(ratios):.0f} times as fast"


def _distance(one: TrialRecord, two: TrialRecord) -> float:
    """Return the sum of the logarithms of the ratios of numbers, infinite for points that are not neighbours.

    Of trials of the same work each other difference counts as one of `MAX_RATIO`.
    """
    distance, is_same_work = 0.0, bool(one.work) and one.work == two.work
    for name, value in one.params.items():
        if value == (other := two.params.get(name)):
            continue
        numbers = [n for n in (value, other) if isinstance(n, int | float) and not isinstance(n, bool)]
        if len(numbers) == 2 and min(numbers) > 0 and max(numbers) <= MAX_RATIO * min(numbers):
            distance += math.log(max(numbers) / min(numbers))
        elif is_same_work:
            distance += math.log(MAX_RATIO)
        else:
            return math.inf
    return distance


def _is_same_speed(*records: TrialRecord) -> bool:
    """Return whether the first ranks' median steps in these trials took about as long; false if one has none."""
    steps = [record.measurements[0]["step_times_s"] if record.measurements else () for record in records]
    medians = [statistics.median(times_s) for times_s in steps if times_s]
    return len(medians) == len(steps) and max(medians) <= SAME_SPEED * min(medians)
