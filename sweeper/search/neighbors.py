"""Find trials that are far slower than similar trials. On a CPU, such slowness means that the measurement stalled."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweeper.common.trials import TrialRecord, TrialStatus

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
NEIGHBOURS = 3  # the number of nearest trials to compare a trial with
MIN_NEIGHBOURS = 2
MAX_RATIO = 2.0  # maximum ratio of a parameter's values; more distant trials may differ for good reasons
FAR_BELOW = 5.0  # a trial is remeasured if all neighbors are more than this many times as fast
SAME_SPEED = 1.5  # valid measurements of the same point differ by at most this factor
LATEST = 1000  # only this many trials are searched for neighbors, which limits the work per trial


class Neighbors:
    """The latest complete trials of a search, with parameters stored as arrays for fast comparison."""

    def __init__(self, records: dict[int, TrialRecord], objective: str) -> None:
        latest = islice(reversed(records.values()), LATEST)
        complete = (other for other in latest if other.status is TrialStatus.COMPLETE and other.remeasurement is None)
        self._others = [other for other in complete if other.metrics.get(objective, 0.0) > 0]
        self.numbers = np.array([other.number for other in self._others], dtype=int)
        self.values = np.array([other.metrics[objective] for other in self._others])
        self._columns: dict[str, tuple[dict[Any, int], IntArray, FloatArray]] = {}
        self._works, self._work_codes = _encode([_key(other.work) for other in self._others])

    def find(self, record: TrialRecord, without: Collection[int]) -> FloatArray:
        """Return the objectives of the nearest trials (see `describe_stall`), leaving out those in `without`."""
        is_same_work = (self._work_codes == self._works.get(_key(record.work), -1)) & bool(record.work)
        distances = np.where(np.isin(self.numbers, list(without)), math.inf, 0.0)
        for name, value in record.params.items():
            if name not in self._columns:
                values = [other.params.get(name) for other in self._others]
                self._columns[name] = *_encode(values), np.array([_logarithm(value) for value in values])
            codes, column, logarithms = self._columns[name]
            apart = np.abs(logarithms - _logarithm(value))  # NaN if a value is not a number
            far = np.where(is_same_work, math.log(MAX_RATIO), math.inf)
            apart = np.where(apart <= math.log(MAX_RATIO) + 1e-12, apart, far)
            distances = distances + np.where(column == codes.get(value, -1), 0.0, apart)
        nearest = np.lexsort((self.values, self.numbers, distances))[:NEIGHBOURS]
        return self.values[nearest[np.isfinite(distances[nearest])]]


def describe_stall(
    record: TrialRecord,
    records: dict[int, TrialRecord],
    objective: str,
    direction: str,
    neighbors: Neighbors | None = None,
) -> str:
    """Describe how far a complete trial is behind all of its neighbors, or return "" if it is not far behind.

    Neighbors are the nearest `NEIGHBOURS` complete trials that either did the same work, or have numeric parameters
    within a factor of `MAX_RATIO` and otherwise equal parameters. The distance is the sum of the log ratios of the
    numbers. Between trials of the same work, any other difference counts like a ratio of `MAX_RATIO`. A trial is not
    behind if its parameters were measured twice at the same speed. To save time when many trials are compared, pass
    `neighbors`, built from `records`."""
    earlier = records.get(record.retry.trial) if record.retry else None
    value = record.metrics.get(objective, 0.0)
    if (earlier and _is_same_speed(record, earlier)) or record.status is not TrialStatus.COMPLETE or value <= 0:
        return ""
    own = {record.number, *([earlier.number] if earlier else [])}
    values = (neighbors or Neighbors(records, objective)).find(record, own)
    ratios = values / value if direction == "maximize" else value / values
    if len(ratios) < MIN_NEIGHBOURS or ratios.min() <= FAR_BELOW:
        return ""
    times = " to ".join(dict.fromkeys(f"{ratio:.0f}" for ratio in (ratios.min(), ratios.max())))
    return f"its {len(ratios)} nearest neighbors are {times} times as fast"


def _key(work: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(work.items()))


def _encode(values: Sequence[Any]) -> tuple[dict[Any, int], IntArray]:
    codes: dict[Any, int] = {}
    return codes, np.array([codes.setdefault(value, len(codes)) for value in values], dtype=int)


def _logarithm(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return math.log(value) if is_number and value > 0 else math.nan


def _is_same_speed(*records: TrialRecord) -> bool:
    steps = [record.measurements[0]["step_times_s"] if record.measurements else () for record in records]
    medians = [statistics.median(times_s) for times_s in steps if times_s]
    return len(medians) == len(steps) and max(medians) <= SAME_SPEED * min(medians)
