"""A trial that is far slower than those beside it in the space: on a CPU its measurement was stalled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice

from sweeper.common.trials import TrialRecord, TrialStatus
from workloads.api.contract import Scalar

NEIGHBOURS = 3  # the nearest ones that a trial is compared with
MIN_NEIGHBOURS = 2
MAX_RATIO = 2.0  # of a parameter's values: farther trials may differ for good reasons
FAR_BELOW = 5.0  # a trial is measured again if all of its neighbours are so many times as fast
LATEST = 1000  # trials that are searched for neighbours, so that the work for a trial stays the same


def describe_stall(record: TrialRecord, records: dict[int, TrialRecord], objective: str, direction: str) -> str:
    """Return how far a complete trial is behind all of its neighbours; empty if it is not far behind.

    Neighbours are complete trials whose numbers are within `MAX_RATIO` of the trial's and whose other parameters are
    equal, the nearest `NEIGHBOURS` of them.
    """
    distances = []
    for other in islice(reversed(records.values()), LATEST):
        is_comparable = other.status is TrialStatus.COMPLETE and other.remeasurement is None
        if is_comparable and other.metrics.get(objective, 0.0) > 0:
            distances.append((_distance(record.params, other.params), other.number, other.metrics[objective]))
    nearest = sorted(entry for entry in distances if math.isfinite(entry[0]))[:NEIGHBOURS]
    value, values = record.metrics.get(objective, 0.0), [entry[2] for entry in nearest]
    if record.status is not TrialStatus.COMPLETE or value <= 0 or len(values) < MIN_NEIGHBOURS:
        return ""
    ratios = [other / value if direction == "maximize" else value / other for other in values]
    if min(ratios) <= FAR_BELOW:
        return ""
    return f"its {len(ratios)} nearest neighbours are {min(ratios):.0f} to {max(ratios):.0f} times as fast"


def _distance(params: Mapping[str, Scalar], others: Mapping[str, Scalar]) -> float:
    """Return the sum of the logarithms of the ratios of numbers, infinite for points that are not neighbours."""
    distance = 0.0
    for name, value in params.items():
        if value == (other := others.get(name)):
            continue
        numbers = [n for n in (value, other) if isinstance(n, int | float) and not isinstance(n, bool)]
        if len(numbers) < 2 or min(numbers) <= 0 or max(numbers) > MAX_RATIO * min(numbers):
            return math.inf
        distance += math.log(max(numbers) / min(numbers))
    return distance
