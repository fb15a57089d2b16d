"""One result compared with another: a ratio with its interval, and whether the second one is slower.

What a sweep measures of its own spread, steps of one trial or rounds of its finals, is spread within one run. The ratio
is stated with it. Another run of the same configuration (another process, another day) differs by more, which no single
run shows: the verdict allows for that too (`sweeper/results/runs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sweeper.common.format import count, format_number, format_point
from sweeper.metrics.intervals import MIN_STEPS, Interval, interval_of_steps, ratio_interval
from sweeper.results.ranking import BestResult, find_speed_metric, read_work, select_complete
from sweeper.results.runs import Comparison, Gate, Verdict, compare_runs, run_of_interval

SHOWN_PAIRS = 5


def judge(before: Interval, after: Interval, gate: Gate) -> Comparison:
    """Return whether `after` is slower than `before`, each a run of its own."""
    earlier, new = (run_of_interval(*value.bounds) for value in (before, after))
    return compare_runs([earlier], [new], gate)


def describe_more_runs(comparison: Comparison) -> str:
    """Return how many more runs a verdict needs; empty with a verdict."""
    if comparison.verdict is not Verdict.CANNOT_BE_TOLD:
        return ""
    new = count(comparison.more_new, "more run") if comparison.more_new else ""
    earlier = f"{comparison.more_earlier} more of the earlier work" if comparison.more_earlier else ""
    return f"{' and '.join(filter(None, [new, earlier]))} needed"


def measure_ratio(before: Interval, after: Interval) -> Interval | None:
    """Return `after` over `before` with the 95% interval of the measured spreads; None without both intervals."""
    if not (before.has_interval and after.has_interval and before.low > 0 and after.low > 0):
        return None
    return ratio_interval(after, before)


def compare_values(value: Interval, other: Interval, name: str, other_name: str) -> str:
    """Compare two results of equal work: their ratio with its interval, unless the interval contains 1."""
    ratio = measure_ratio(value, other)
    if ratio is None:
        return f"{name} {value}, {other_name} {other}: cannot be told without both 95% intervals"
    interval = ratio.change.partition(" ")[2]
    if ratio.low <= 1 <= ratio.high:
        return f"cannot be told apart: {name} {value}, {other_name} {other}, {ratio.change}"
    if ratio.value < 1:
        return f"{name} is {1 / ratio.value:.2f} times as fast as {other_name}: {value} against {other} {interval}"
    return f"{other_name} is {ratio.value:.2f} times as fast as {name}: {other} against {value} {interval}"


def describe_basis(first: BestResult, second: BestResult) -> str:
    """Return which spreads the intervals of two results rest on."""
    rounds = (first.rounds, second.rounds)
    basis, other = (f"{number} rounds of finals" if number else "the steps of one trial" for number in rounds)
    return f"{basis} each" if basis == other else f"{basis} against {other}"


class Pair(NamedTuple):
    """One point that both sweeps measured: its parameters and both speeds."""

    params: Mapping[str, str]
    first: float
    second: float

    @property
    def ratio(self) -> float:
        return self.second / self.first


def find_pairs(first: pd.DataFrame, second: pd.DataFrame) -> list[Pair]:
    """Return the complete trials of equal work, parameters and devices, the largest differences first."""
    first, second = select_complete(first), select_complete(second)
    metric = find_speed_metric(first) if len(first) else None
    if metric is None or not len(second) or f"metric.{metric}" not in second:
        return []
    speeds = {point_key(row): float(row[f"metric.{metric}"]) for row in second.to_dict("records")}
    pairs = []
    for row in first.to_dict("records"):
        before, after = float(row[f"metric.{metric}"]), speeds.get(point_key(row), math.nan)
        if before > 0 and after > 0:
            pairs.append(Pair(dict(_params(row)), before, after))
    return sorted(pairs, key=lambda pair: -abs(math.log(pair.ratio)))


def describe_pairs(pairs: list[Pair]) -> list[str]:
    """Return the median difference with its interval, and the points that differ most; empty without a pair."""
    if not pairs:
        return []
    logarithms = np.log([pair.ratio for pair in pairs])
    # The points of a search are in no order of time: shuffled, neighbours in it are not taken for correlation.
    interval = interval_of_steps(np.random.default_rng(0).permutation(np.exp(logarithms)), "median")
    bounds = f"95% {interval.low - 1:+.1%} to {interval.high - 1:+.1%}" if interval else f"fewer than {MIN_STEPS} pairs"
    median = math.exp(float(np.median(logarithms))) - 1
    lines = [f"point by point: {len(pairs)} equal points, the second {median:+.1%} in the median ({bounds})"]
    varying = {name for pair in pairs for name, value in pair.params.items() if pairs[0].params.get(name) != value}
    for pair in pairs[:SHOWN_PAIRS]:
        point = format_point({name: value for name, value in pair.params.items() if name in varying})
        speeds = f"{format_number(pair.first)} against {format_number(pair.second)}"
        lines.append(f"  {pair.ratio - 1:+.1%}  {point}: {speeds}")
    return lines


def select_common_points(sides: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Return the complete trials of each side whose points both sides measured."""
    complete = [select_complete(side) for side in sides]
    keys = [[point_key(row) for row in side.to_dict("records")] for side in complete]
    common = set(keys[0]).intersection(*keys[1:])
    return [side[[key in common for key in own]] for side, own in zip(complete, keys, strict=True)]


def point_key(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return what is equal for trials of equal work, parameters and devices."""
    return tuple(sorted(read_work(row).items())), row.get("tag.device"), row.get("param.sweep.gpus"), _params(row)


def _params(row: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    names = [str(name) for name in row if str(name).startswith("param.") and not str(name).startswith("param.sweep.")]
    return tuple(sorted((name.removeprefix("param."), row[name]) for name in names if isinstance(row[name], str)))
