"""Decide whether new runs are slower than earlier runs, and how many more runs a verdict needs.

A run is a whole sweep, executed in its own processes at its own time. The model has random effects: the logarithm of a
run's value is the level of the group (earlier or new runs), plus the run's deviation from that level, plus the error
that the run's interval indicates. The deviations in both groups have the same standard deviation, called the spread
between runs. With fewer than MEASURED_FROM degrees of freedom (the number of runs minus one per group), the spread is
assumed, unless the runs contradict the assumption. With more, the spread is measured, and limits follow Student's t.

A verdict may be computed after every run. If the runs are equal, a single look finds the new runs slower with
probability FALSE_ALARM. Successive looks share runs, so the probability over all looks stays at 1% or less.
`benchmarks/track.py` measures this probability, and how often a loss is found with the requested number of runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

import numpy as np

from sweeper.metrics.intervals import Interval, Z, student_quantile
from workloads.api.errors import UserInputError

FALSE_ALARM = 0.0005  # per look
LAST_MISS = 0.05  # for a look at the planned number of runs
EARLY_MISS = 0.01  # for a look at fewer runs than planned
DETECTED_OVER_THRESHOLD = 1.5
# With 10 degrees of freedom, two thirds of estimates are within 23%, and Student's limit is 4.6 instead of 3.3.
MEASURED_FROM = 10
CONTRADICTED_AT = 0.01  # the significance level at which a measured spread contradicts the assumed spread
MOST_NEW_RUNS = 20  # if a verdict needs more, request earlier runs too, which reduces the total
MOST_RUNS = 500


class Verdict(StrEnum):
    FASTER = "faster"
    NOT_SLOWER = "not slower"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"


EXIT_CODES = {Verdict.FASTER: 0, Verdict.NOT_SLOWER: 0, Verdict.SLOWER: 1, Verdict.INCONCLUSIVE: 3}


@dataclass(frozen=True)
class Run:
    """The logarithm of a run's value, and the variance that the run's interval indicates (NaN if there is none)."""

    logarithm: float
    variance: float = math.nan


@dataclass(frozen=True)
class Gate:
    """The settings that determine when runs count as slower."""

    threshold: float = 0.02  # the tolerated loss, as a fraction of the speed
    # The standard deviation between equal runs, as a fraction, assumed while too few runs exist to measure it.
    between_runs: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise UserInputError(f"threshold={self.threshold:g}: must be above 0 and below 1, such as 0.02")
        if not 0 <= self.between_runs < 1:
            raise UserInputError(f"between_runs={self.between_runs:g}: must be 0 or above and below 1, such as 0.02")

    @property
    def tolerated(self) -> float:
        return -math.log1p(-self.threshold)

    @property
    def detected(self) -> float:
        """The slowdown that is detected with 90% probability, as a logarithm."""
        return DETECTED_OVER_THRESHOLD * self.tolerated


@dataclass(frozen=True)
class Spread:
    """The spread between runs: a standard deviation of the logarithms of their values."""

    value: float
    errors: Sequence[float]  # the mean variance that the runs' intervals indicate, for earlier and for new runs
    degrees_of_freedom: float = math.inf  # for a measured spread; infinite if the spread is assumed

    @property
    def is_assumed(self) -> bool:
        return math.isinf(self.degrees_of_freedom)

    def error_of_difference(self, earlier: int, new: int) -> float:
        """Return the standard error of the difference between the levels of this many earlier and new runs."""
        runs = zip(self.errors, (earlier, new), strict=True)
        return math.sqrt(sum((self.value**2 + error) / count for error, count in runs))

    def quantile(self, tail: float) -> float:
        return student_quantile(1 - tail, self.degrees_of_freedom)

    def decides(self, earlier: int, new: int, gate: Gate) -> bool:
        """Return whether this many runs suffice for a verdict, whatever the runs' values are."""
        error = self.error_of_difference(earlier, new)
        finds = error * self.quantile(FALSE_ALARM) <= gate.tolerated
        return finds and error * self.quantile(LAST_MISS) <= gate.detected - gate.tolerated


@dataclass(frozen=True)
class Comparison:
    verdict: Verdict
    ratio: Interval  # new level over earlier level; the 95% interval includes the spread between runs
    spread: Spread
    more_new: int = 0  # the number of additional new runs that a verdict needs; 0 with a verdict
    more_earlier: int = 0


def run_of_interval(value: float, low: float, high: float, *, less_is_better: bool = False) -> Run:
    """Return a run from a value and its 95% interval (NaN if there is none).

    The interval is treated as that of a normal distribution. The Student's t interval of a few rounds is wider, which
    errs on the safe side. A value that is not positive has no logarithm, so comparisons with the run are inconclusive.
    """
    if not value > 0:
        return Run(math.nan)
    logarithm = -math.log(value) if less_is_better else math.log(value)
    return Run(logarithm, (math.log(high / low) / (2 * Z)) ** 2 if 0 < low <= high else math.nan)


def compare_runs(earlier: Sequence[Run], new: Sequence[Run], gate: Gate) -> Comparison:
    """Compare new runs with earlier runs. There must be at least one earlier run and one new run."""
    logarithms = [np.array([run.logarithm for run in group]) for group in (earlier, new)]
    errors = [float(np.mean([run.variance for run in group])) for group in (earlier, new)]
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in logarithms)
    counts = (len(earlier), len(new))
    # Unknown errors count as zero here because a measured spread includes them.
    known_errors = [0.0 if math.isnan(error) else error for error in errors]
    spread = _estimate_spread(counts, errors, known_errors, squares, gate.between_runs)
    change = float(logarithms[1].mean()) - float(logarithms[0].mean())
    error = spread.error_of_difference(*counts)
    half_width = spread.quantile(0.025) * error
    ratio = Interval(*(math.exp(change + x) for x in (0, -half_width, half_width)))
    # An unknown error decides nothing, because every comparison with NaN is false.
    if abs(change) > gate.tolerated and abs(change) > error * spread.quantile(FALSE_ALARM):
        return Comparison(Verdict.SLOWER if change < 0 else Verdict.FASTER, ratio, spread)
    miss = LAST_MISS if spread.decides(*counts, gate) else EARLY_MISS
    if change >= -gate.tolerated and change - error * spread.quantile(miss) >= -gate.detected:
        return Comparison(Verdict.NOT_SLOWER, ratio, spread)
    more_earlier, more_new = _count_more_runs(counts, replace(spread, errors=known_errors), gate)
    return Comparison(Verdict.INCONCLUSIVE, ratio, spread, more_new, more_earlier)


def find_worst(comparisons: Sequence[Comparison]) -> Comparison | None:
    """Return the comparison that decides the overall verdict (slower, else inconclusive), or None if there are none."""
    order = (Verdict.SLOWER, Verdict.INCONCLUSIVE, Verdict.NOT_SLOWER, Verdict.FASTER)
    return min(comparisons, key=lambda c: (order.index(c.verdict), -c.more_new - c.more_earlier), default=None)


def _estimate_spread(
    counts: tuple[int, int], errors: Sequence[float], known_errors: Sequence[float], squares: float, assumed: float
) -> Spread:
    """Return the spread between runs, measured if there are enough runs or if they contradict the assumed spread.
    `squares` is the sum of squared deviations of the logarithms from their group means."""
    freedom, likely = sum(counts) - 2, math.inf
    if 0 < freedom < MEASURED_FROM:
        from scipy.special import chdtri  # takes 0.2 s to import

        likely = (assumed**2 + max(known_errors)) * float(chdtri(freedom, CONTRADICTED_AT))
    if freedom < MEASURED_FROM and squares <= likely:
        return Spread(assumed, errors)
    inside = sum((count - 1) * error for count, error in zip(counts, known_errors, strict=True))
    return Spread(math.sqrt(max(0.0, (squares - inside) / freedom)), known_errors, freedom)


def _count_more_runs(counts: tuple[int, int], spread: Spread, gate: Gate) -> tuple[int, int]:
    """Return how many more earlier and new runs to make before the next look: as many as a verdict needs with the
    current spread, but while the spread is assumed, at most as many as are needed to measure it. Making only new runs
    is preferred because earlier versions are rarely still installed."""
    earlier, new = counts
    alone = ((0, more) for more in range(1, MOST_NEW_RUNS + 1))
    of_both = ((max(count - earlier, 0), max(count - new, 0)) for count in range(min(counts) + 1, MOST_RUNS))
    for more_earlier, more_new in chain(alone, of_both):
        freedom = spread.degrees_of_freedom + more_earlier + more_new  # infinite if the spread is assumed
        if replace(spread, degrees_of_freedom=freedom).decides(earlier + more_earlier, new + more_new, gate):
            break
    else:
        more_earlier, more_new = MOST_RUNS, MOST_RUNS
    missing = MEASURED_FROM - (earlier + new - 2)
    if spread.is_assumed and more_earlier + more_new > missing:
        more_new = math.ceil(missing * more_new / (more_earlier + more_new))
        more_earlier = missing - more_new
    return more_earlier, more_new
