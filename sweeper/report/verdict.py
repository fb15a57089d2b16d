"""Whether one result is slower than another: a ratio with its interval, and one of three verdicts.

What a sweep measures of its own spread, steps of one trial or rounds of its finals, is spread within one run. Another
run of the same configuration (another process, another day) differs by more, which no single run shows. So a result
counts as slower only if the difference also exceeds what runs are assumed to differ by, and as not slower if the
measured interval excludes a loss of more than the threshold. Anything else cannot be told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from sweeper.common.intervals import Interval, Z, ratio_interval
from sweeper.report.best import BestResult, MeasuredValue


class Verdict(StrEnum):
    """Whether a sweep is slower than its baseline."""

    NOT_SLOWER = "not slower"
    SLOWER = "slower"
    CANNOT_BE_TOLD = "cannot be told"


EXIT_CODES = {Verdict.NOT_SLOWER: 0, Verdict.SLOWER: 1, Verdict.CANNOT_BE_TOLD: 3}


@dataclass(frozen=True)
class Gate:
    """When a result counts as slower.

    Attributes:
        threshold: the fraction of the speed that may be lost.
        between_runs: the standard deviation of equal runs, as a fraction.
    """

    threshold: float = 0.02
    between_runs: float = 0.02

    def judge(self, before: MeasuredValue, after: MeasuredValue) -> Verdict:
        """Return whether `after` is slower than `before`."""
        ratio = measure_ratio(before, after)
        if ratio is None:
            return Verdict.CANNOT_BE_TOLD
        runs = Z * math.sqrt(2) * self.between_runs
        high = ratio.value * math.exp(math.hypot(math.log(ratio.high / ratio.value), runs))
        if ratio.value < 1 - self.threshold and high < 1:
            return Verdict.SLOWER
        return Verdict.NOT_SLOWER if ratio.low >= 1 - self.threshold else Verdict.CANNOT_BE_TOLD


def measure_ratio(before: MeasuredValue, after: MeasuredValue) -> Interval | None:
    """Return `after` over `before` with the 95% interval of the measured spreads; None without both intervals."""
    if not (before.has_interval and after.has_interval and before.low > 0 and after.low > 0):
        return None
    return ratio_interval(Interval(after.value, after.low, after.high), Interval(before.value, before.low, before.high))


def combine(verdicts: list[Verdict]) -> Verdict | None:
    """Return the verdict of several kinds of work: the worst of them; None of none."""
    order = (Verdict.SLOWER, Verdict.CANNOT_BE_TOLD, Verdict.NOT_SLOWER)
    return next((verdict for verdict in order if verdict in verdicts), None)


def compare_values(value: MeasuredValue, other: MeasuredValue, name: str, other_name: str) -> str:
    """Compare two results of equal work: their ratio with its interval, unless the interval contains 1."""
    ratio = measure_ratio(value, other)
    if ratio is None:
        return f"{name} {value}, {other_name} {other}: cannot be told without both 95% intervals"
    interval = f"(95% {ratio.low - 1:+.1%} to {ratio.high - 1:+.1%})"
    if ratio.low <= 1 <= ratio.high:
        return f"cannot be told apart: {name} {value}, {other_name} {other}, {ratio.value - 1:+.1%} {interval}"
    if ratio.value < 1:
        return f"{name} is {1 / ratio.value:.2f} times as fast as {other_name}: {value} against {other} {interval}"
    return f"{other_name} is {ratio.value:.2f} times as fast as {name}: {other} against {value} {interval}"


def describe_basis(first: BestResult, second: BestResult) -> str:
    """Return which spreads the intervals of two results rest on."""
    bases = [
        f"{result.rounds} rounds of finals" if result.rounds else "the steps of one trial" for result in (first, second)
    ]
    return f"{bases[0]} each" if bases[0] == bases[1] else f"{bases[0]} against {bases[1]}"
