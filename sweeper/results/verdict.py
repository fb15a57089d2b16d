"""One result compared with another: a ratio with its interval, and whether the second one is slower.

What a sweep measures of its own spread, steps of one trial or rounds of its finals, is spread within one run. The ratio
is stated with it. Another run of the same configuration (another process, another day) differs by more, which no single
run shows: the verdict allows for that too (`sweeper/results/runs.py`).
"""

from __future__ import annotations

from sweeper.common.format import count
from sweeper.metrics.intervals import Interval, ratio_interval
from sweeper.results.ranking import BestResult, MeasuredValue
from sweeper.results.runs import Comparison, Gate, Run, Verdict, compare_runs, run_of_interval


def judge(before: MeasuredValue, after: MeasuredValue, gate: Gate) -> Comparison:
    """Return whether `after` is slower than `before`, each a run of its own."""
    return compare_runs([to_run(before)], [to_run(after)], gate)


def to_run(value: MeasuredValue) -> Run:
    """Return a result as a run."""
    return run_of_interval(value.value, value.low, value.high)


def describe_more_runs(comparison: Comparison) -> str:
    """Return how many more runs a verdict needs; empty with a verdict."""
    if comparison.verdict is not Verdict.CANNOT_BE_TOLD:
        return ""
    parts = [count(comparison.more_new, "more run")] if comparison.more_new else []
    parts += [f"{comparison.more_earlier} more of the earlier work"] if comparison.more_earlier else []
    return f"{' and '.join(parts)} needed"


def measure_ratio(before: MeasuredValue, after: MeasuredValue) -> Interval | None:
    """Return `after` over `before` with the 95% interval of the measured spreads; None without both intervals."""
    if not (before.has_interval and after.has_interval and before.low > 0 and after.low > 0):
        return None
    return ratio_interval(Interval(after.value, after.low, after.high), Interval(before.value, before.low, before.high))


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
