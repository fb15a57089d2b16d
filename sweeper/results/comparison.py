"""Describe a comparison of results as text, and find the points that two sweeps share.

The steps of a trial and the rounds of the finals show the spread within one run. Runs of the same configuration in
different processes or on different days differ by more, which a single run cannot show. Verdicts and the intervals of
changes account for both (`sweeper/results/runs.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sweeper.common.format import count, format_number, format_point
from sweeper.metrics.criteria import Objective
from sweeper.metrics.intervals import MIN_STEPS, Interval, interval_of_steps, level_of_median
from sweeper.results.ranking import find_objective, read_work, select_complete
from sweeper.results.runs import Comparison, Gate, Verdict, compare_runs, find_worst, run_of_interval
from workloads.api.metrics import get_metric

SHOWN_PAIRS = 5
NOT_COMPARED = "not compared"


@dataclass(frozen=True, kw_only=True)
class ComparedWork:
    """Text that compares the results for one kind of work."""

    work: str
    device: str
    earlier: str = ""
    now: str = ""
    objective: Objective
    result: Comparison | None = None  # None if the work was not compared
    detail: str  # the basis of the verdict, or why there is no verdict
    changed: str = ""  # software versions that differ

    @property
    def outcome(self) -> str:
        if self.result is None:
            return NOT_COMPARED
        return word_verdict(self.result.verdict, self.objective)

    @property
    def change(self) -> str:
        """The relative change of the objective's value, with its 95% interval."""
        if self.result is None:
            return ""
        return find_change(self.result, self.objective).change

    def __str__(self) -> str:
        heading = f"{self.work} on {self.device}: {self.outcome}"
        if self.result is None:
            return f"{heading}: {self.detail}"
        changed = f"\n  changed: {self.changed}" if self.changed else ""
        return f"{heading}, {self.change}\n  {self.now} against {self.earlier}; {self.detail}{changed}"


def word_verdict(verdict: Verdict, objective: Objective) -> str:
    """Return the verdict in words that fit the objective: only a rate is faster or slower."""
    if get_metric(objective.metric).is_rate:
        return str(verdict)
    return str(verdict).replace("faster", "better").replace("slower", "worse")


def find_change(comparison: Comparison, objective: Objective) -> Interval:
    """Return the new value over the earlier one. The comparison's own ratio is above 1 if the new runs are better."""
    ratio = comparison.ratio
    if objective.direction == "maximize":
        return ratio
    return Interval(*(1 / bound for bound in (ratio.value, ratio.high, ratio.low)))


def judge(
    before: Sequence[Interval], after: Sequence[Interval], gate: Gate, *, less_is_better: bool = False
) -> Comparison:
    """Compare the runs `after` with the runs `before`. Each value is that of a run."""
    earlier, new = (
        [run_of_interval(*value.bounds, less_is_better=less_is_better) for value in side] for side in (before, after)
    )
    return compare_runs(earlier, new, gate)


def describe_spread(comparison: Comparison) -> str:
    """Describe the spread between runs and, if there is no verdict, how many more runs are needed for one."""
    spread = comparison.spread
    basis = f"{spread.value:.1%} between runs ({'assumed' if spread.is_assumed else 'measured'})"
    if comparison.verdict is not Verdict.INCONCLUSIVE:
        return basis
    new = count(comparison.more_new, "more run") if comparison.more_new else ""
    earlier = f"{comparison.more_earlier} more of the earlier work" if comparison.more_earlier else ""
    return f"{basis}; {' and '.join(filter(None, [new, earlier]))} needed"


def describe_comparison(works: Sequence[ComparedWork], gate: Gate) -> tuple[str, Verdict | None]:
    """Return the comparison as text that ends with the verdict, and the verdict (None if nothing was compared)."""
    worst = find_worst([work.result for work in works if work.result])
    words = {work.outcome for work in works if worst and work.result and work.result.verdict is worst.verdict}
    verdict = [f"verdict: {' or '.join(sorted(words))}, at a threshold of {gate.threshold:g}"] if worst else []
    return "\n".join([*map(str, works), *verdict]), worst.verdict if worst else None


class Pair(NamedTuple):
    """The parameters of a point that both sweeps measured, and both speeds."""

    params: Mapping[str, str]
    first: float
    second: float

    @property
    def ratio(self) -> float:
        return self.second / self.first


def find_pairs(first: pd.DataFrame, second: pd.DataFrame) -> list[Pair]:
    """Pair complete trials with equal work, parameters and devices. Return the pairs, largest difference first."""
    first, second = select_complete(first), select_complete(second)
    objective = find_objective(first) if len(first) else None
    if objective is None or not len(second) or f"metric.{objective.metric}" not in second:
        return []
    metric = objective.metric
    speeds = {point_key(row): float(row[f"metric.{metric}"]) for row in second.to_dict("records")}
    pairs = []
    for row in first.to_dict("records"):
        before, after = float(row[f"metric.{metric}"]), speeds.get(point_key(row), math.nan)
        if before > 0 and after > 0:
            pairs.append(Pair(dict(_params(row)), before, after))
    return sorted(pairs, key=lambda pair: -abs(math.log(pair.ratio)))


def describe_pairs(pairs: list[Pair]) -> list[str]:
    """Describe the median difference with its interval, and the points that differ most, if there are any pairs."""
    if not pairs:
        return []
    logarithms = np.log([pair.ratio for pair in pairs])
    # Points have no order in time. Shuffle them so that neighbors in the list do not count as correlated.
    interval = interval_of_steps(np.random.default_rng(0).permutation(np.exp(logarithms)), "median")
    bounds = f"fewer than {MIN_STEPS} pairs"
    if interval:
        bounds = f"{level_of_median(len(pairs))} {interval.low - 1:+.1%} to {interval.high - 1:+.1%}"
    median = math.exp(float(np.median(logarithms))) - 1
    lines = [f"point by point: {len(pairs)} equal points, the second {median:+.1%} in the median ({bounds})"]
    varying = {name for pair in pairs for name, value in pair.params.items() if pairs[0].params.get(name) != value}
    for pair in pairs[:SHOWN_PAIRS]:
        point = format_point({name: value for name, value in pair.params.items() if name in varying})
        speeds = f"{format_number(pair.first)} against {format_number(pair.second)}"
        lines.append(f"  {pair.ratio - 1:+.1%}  {point}: {speeds}")
    return lines


def select_common_points(sides: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Return each side's complete trials at the points that both sides measured."""
    complete = [select_complete(side) for side in sides]
    keys = [[point_key(row) for row in side.to_dict("records")] for side in complete]
    common = set(keys[0]).intersection(*keys[1:])
    return [side[[key in common for key in own]] for side, own in zip(complete, keys, strict=True)]


def point_key(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for trials with equal work, parameters and devices."""
    return tuple(sorted(read_work(row).items())), row.get("tag.device"), row.get("param.sweep.gpus"), _params(row)


def _params(row: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    names = [str(name) for name in row if str(name).startswith("param.") and not str(name).startswith("param.sweep.")]
    return tuple(sorted((name.removeprefix("param."), row[name]) for name in names if isinstance(row[name], str)))
