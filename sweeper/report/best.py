"""The best that each device has reached at each kind of work; what does not compare is never in one row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

# What a figure is of. Figures that differ in any of these are of different work, and are neither ranked nor divided.
WORK = {
    "workload": "workload",
    "model": "param.model",
    "sequence length": "param.sequence_length",
    "type": "tag.dtype",
    "statistic": "param.statistic",
    "cache": "param.cache",
}
# What grows with the speed of a trial, with all that begins so: their intervals, and figures of one device.
RATES = ("tokens_per_s", "tflops", "gb_per_s", "bus_gb_s", "score", "mfu", "hfu", "mamf_utilization", "bandwidth_util")
# By which figure work is judged, the first of these that it has.
SPEEDS = {"tokens_per_s": "tokens/s", "tflops": "TFLOP/s", "gb_per_s": "GB/s", "bus_gb_s": "GB/s", "score": "score"}


@dataclass(frozen=True)
class Figure:
    """A measured value with its interval, where there is one."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """Whether it has an interval."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    def over(self, count: int) -> Figure:
        """Of one of so many."""
        return Figure(self.value / count, self.low / count, self.high / count)

    def below(self, other: Figure) -> bool:
        """Whether it is lower beyond what either interval allows; without intervals, lower at all."""
        return self.high < other.low if self.known and other.known else self.value < other.value

    def __str__(self) -> str:
        def short(x: float) -> str:
            return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"

        return short(self.value) + (f" ({short(self.low)} to {short(self.high)})" if self.known else "")


@dataclass(frozen=True)
class BestResult:
    """The best trial of so many devices at one kind of work, and `trials`, the ones that were compared for it.

    rounds: of the finals that its figures are the mean of; 0: they are of the one trial
    """

    work: dict[str, str]
    device: str
    devices: int
    speed: str
    figure: Figure
    trial: pd.Series
    trials: pd.DataFrame
    rounds: int = 0

    @property
    def platform(self) -> str:
        """The devices in words, with their number where there are several."""
        return f"{self.devices} x {self.device}" if self.devices > 1 else self.device

    def metric(self, name: str) -> float:
        return float(self.trial.get(f"metric.{name}", math.nan))


def by_work(found: Sequence[BestResult]) -> dict[str, list[BestResult]]:
    """Those of each kind of work, under its name: what may be seen on one axis."""
    groups: dict[str, list[BestResult]] = {}
    for peak in found:
        unit = [] if peak.speed == "tokens_per_s" else [f"({SPEEDS[peak.speed]})"]
        groups.setdefault(" ".join([*peak.work.values(), *unit]), []).append(peak)
    return groups


def speed_of(trials: pd.DataFrame) -> str | None:
    """The name of the metric that these trials are judged by."""
    return next(
        (name for name in SPEEDS if f"metric.{name}" in trials and trials[f"metric.{name}"].notna().any()), None
    )


def complete(trials: pd.DataFrame) -> pd.DataFrame:
    """Those with a figure that may be ranked."""
    return trials[trials["tag.outcome"] == "complete"] if len(trials) else trials


def work_of(row: Any) -> dict[str, str]:
    """What the trial's figure is of, by name; what is not said of it is not there."""
    found = {name: row.get(column) for name, column in WORK.items()}
    return {name: str(value) for name, value in found.items() if isinstance(value, str) and value}


def figure_of(row: Any, speed: str) -> Figure:
    values = (row.get(f"metric.{speed}{suffix}", math.nan) for suffix in ("", "_ci_low", "_ci_high"))
    return Figure(*(float(value) for value in values))


def best_results(trials: pd.DataFrame) -> list[BestResult]:
    """One for each device, number of devices and kind of work; the fastest first within each kind."""
    rows = complete(trials)
    if not len(rows):
        return []
    kinds: dict[tuple[Any, str, int], list[int]] = {}
    for n, row in enumerate(rows.to_dict("records")):
        device, count = row.get("tag.device"), row.get("param.sweep.gpus")
        key = tuple(work_of(row).items())
        place = str(device) if isinstance(device, str) else "unknown", int(count) if isinstance(count, str) else 1
        kinds.setdefault((key, *place), []).append(n)
    found = []
    for (key, device, count), places in kinds.items():
        group = rows.iloc[places]
        speed = speed_of(group)
        if speed is None:
            continue
        ranked = group[group[f"metric.{speed}"].notna()]
        best, rounds = _best(ranked, speed)
        found.append(BestResult(dict(key), device, count, speed, figure_of(best, speed), best, ranked, rounds))
    return sorted(found, key=lambda peak: (sorted(peak.work.items()), peak.speed, -peak.figure.value))


def _best(ranked: pd.DataFrame, speed: str) -> tuple[pd.Series, int]:
    """The best of these trials; of a sweep with finals the one that won them, with its figures there: the best of many
    single ones was chosen for its luck. And the rounds of those finals, 0 where there were none."""
    score, won = ranked[f"metric.{speed}"].astype(float), pd.Series(False, ranked.index)
    if "final.speed" in ranked:
        won = (ranked["final.speed"] == speed) & (ranked["final.trial"] == ranked["tag.sweeper.trial"])
        decided = ranked["tag.sweeper.study"].isin(ranked.loc[won, "tag.sweeper.study"])
        score = score.mask(decided, ranked["final.value"].where(won, -math.inf))
    place = int(score.to_numpy().argmax())
    best = ranked.iloc[place].copy()
    if not won.iloc[place]:
        return best, 0
    times = best["final.value"] / best[f"metric.{speed}"]
    for column in best.index:  # at equal work all rates of the burst are as many times the trial's
        if column.startswith(tuple(f"metric.{rate}" for rate in RATES)) and "sustained" not in column:
            best[column] *= times
    if "metric.step_time_ms" in best:
        best["metric.step_time_ms"] /= times
    for rate in RATES:
        for bound in ("low", "high"):
            if f"metric.{rate}_ci_{bound}" in best or rate == speed:
                best[f"metric.{rate}_ci_{bound}"] = (
                    best[f"metric.{rate}"] * best[f"final.{bound}"] / best["final.value"]
                )
    return best, int(best["final.rounds"])


def kinds(trials: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The trials of each kind of work, under what tells it from the others. One that did not complete says less of its
    work: it is with every kind that it may have been of."""
    places: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for n, row in enumerate(trials.to_dict("records")):
        places.setdefault(tuple(work_of(row).items()), []).append(n)
    measured = set(complete(trials).index)
    wholes = [dict(work) for work, rows in places.items() if measured & set(trials.index[rows])]
    for whole in wholes:
        own = [n for work, rows in places.items() if _fits(dict(work), whole, wholes) for n in rows]
        told = (value for name, value in whole.items() if len({other.get(name) for other in wholes}) > 1)
        yield " ".join(told), trials.iloc[sorted(own)]


def _fits(work: dict[str, str], whole: dict[str, str], wholes: Sequence[dict[str, str]]) -> bool:
    """Whether it is this work, or is of no known one and says nothing that differs from it."""
    return work == whole or (work not in wholes and all(whole.get(name) == value for name, value in work.items()))


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """In what two kinds of work differ, in words."""
    names = [name for name in WORK if one.get(name) != other.get(name)]
    return [f"{name} {one.get(name, 'unknown')} against {other.get(name, 'unknown')}" for name in names]


def compared(one: Figure, other: Figure, name: str, other_name: str) -> str:
    """What may be said of two figures of the same work: a ratio, with both intervals, or that they do not differ."""
    if not (one.known and other.known):
        return f"{name} {one}, {other_name} {other}: without an interval each, no more can be said"
    if one.low <= other.high and other.low <= one.high:
        return f"no difference: {name} {one}, {other_name} {other} overlap"
    faster, slower = (one, other) if one.value > other.value else (other, one)
    who, whom = (name, other_name) if faster is one else (other_name, name)
    return f"{who} is {faster.value / slower.value:.2f} times as fast as {whom}: {faster} against {slower}"


def varying(trials: pd.DataFrame) -> list[str]:
    """The parameters that are not the same for all, by their names."""
    columns = [c for c in map(str, trials.columns) if c.startswith("param.") and not c.startswith("param.sweep.")]
    return [column.removeprefix("param.") for column in columns if trials[column].nunique(dropna=False) > 1]
