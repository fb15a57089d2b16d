"""Compare two sweeps point by point: the trials of equal parameters, by their relative differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sweeper.common.format import format_number, format_point
from sweeper.metrics.intervals import MIN_STEPS, interval_of_steps
from sweeper.results.ranking import find_speed_metric, read_work, select_complete

SHOWN_PAIRS = 5


@dataclass(frozen=True)
class Pair:
    """One point that both sweeps measured: its parameters and both speeds."""

    params: Mapping[str, str]
    first: float
    second: float

    @property
    def difference(self) -> float:
        """The second speed over the first, less one."""
        return self.second / self.first - 1


def find_pairs(first: pd.DataFrame, second: pd.DataFrame) -> list[Pair]:
    """Return the complete trials of equal work, parameters and devices, the largest differences first."""
    first, second = select_complete(first), select_complete(second)
    metric = find_speed_metric(first) if len(first) else None
    if metric is None or not len(second) or f"metric.{metric}" not in second:
        return []
    speeds = {_key(row): float(row[f"metric.{metric}"]) for row in second.to_dict("records")}
    pairs = []
    for row in first.to_dict("records"):
        before, after = float(row[f"metric.{metric}"]), speeds.get(_key(row), math.nan)
        if before > 0 and after > 0:
            pairs.append(Pair(dict(_params(row)), before, after))
    return sorted(pairs, key=lambda pair: -abs(math.log(pair.second / pair.first)))


def describe_pairs(pairs: list[Pair]) -> list[str]:
    """Return the median difference with its interval, and the points that differ most; empty without a pair."""
    if not pairs:
        return []
    logarithms = np.log([pair.second / pair.first for pair in pairs])
    # The points of a search are in no order of time: shuffled, neighbours in it are not taken for correlation.
    interval = interval_of_steps(np.random.default_rng(0).permutation(np.exp(logarithms)), "median")
    bounds = f"95% {interval.low - 1:+.1%} to {interval.high - 1:+.1%}" if interval else f"fewer than {MIN_STEPS} pairs"
    median = math.exp(float(np.median(logarithms))) - 1
    lines = [f"point by point: {len(pairs)} equal points, the second {median:+.1%} in the median ({bounds})"]
    varying = {name for pair in pairs for name, value in pair.params.items() if pairs[0].params.get(name) != value}
    for pair in pairs[:SHOWN_PAIRS]:
        point = format_point({name: value for name, value in pair.params.items() if name in varying})
        lines.append(
            f"  {pair.difference:+.1%}  {point}: {format_number(pair.first)} against {format_number(pair.second)}"
        )
    return lines


def _key(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(sorted(read_work(row).items())), row.get("tag.device"), row.get("param.sweep.gpus"), _params(row)


def _params(row: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    """Return the trial's parameters, sorted, without the settings of its sweep."""
    names = [str(name) for name in row if str(name).startswith("param.") and not str(name).startswith("param.sweep.")]
    return tuple(sorted((name.removeprefix("param."), row[name]) for name in names if isinstance(row[name], str)))
