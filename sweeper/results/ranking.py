"""Find the best result for each device and kind of work. Results of different work are never ranked together."""

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sweeper.common.grouping import group_values
from sweeper.metrics.criteria import Objective
from sweeper.metrics.derivation import first_known
from sweeper.metrics.intervals import BOUNDS, Interval
from sweeper.preflight.work import SEARCHED
from workloads.api.metrics import ROWS, base_name, get_metric

# The names in a work's identity that have their own columns in tables.
MAIN_WORK_NAMES = ("workload", "model", "sequence_length", "type")
# Prefixes of the metrics that are proportional to a trial's speed: rates, and the rates' intervals and per-GPU values.
RATES = tuple(row.name for row in ROWS if row.is_rate)
# Trials of the same kind of work are ranked by the first of these that they have, unless the objective of their sweep
# is not a rate, such as a loss.
SPEEDS = tuple(row.name for row in sorted(ROWS, key=lambda row: row.speed) if row.speed)


@dataclass(frozen=True)
class BestResult:
    """The best trial of a platform (a device and the number of devices) for one kind of work."""

    work: dict[str, str]  # the identity of the work; only results with equal identity are ranked or compared
    device: str
    devices: int
    objective: Objective  # the metric that ranks the trials; `estimate` is its best value
    estimate: Interval
    trial: pd.Series  # the row of the best trial
    trials: pd.DataFrame  # the rows from which the best trial was chosen
    rounds: int = 0  # the number of finals rounds in the mean values; 0 for a single trial

    @property
    def platform(self) -> str:
        """The device's name, with the number of devices (for a CPU, processes) if there are several."""
        if self.devices > 1 and self.is_cpu:
            return f"{self.device}, {self.devices} processes"
        return f"{self.devices} x {self.device}" if self.devices > 1 else self.device

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are CPU processes without their own device."""
        return bool(self.trial.get("tag.hardware") == "cpu")

    @property
    def is_rate(self) -> bool:
        """Whether the result is a speed, of which each device has a share. Other values, such as a loss, are whole."""
        return get_metric(self.objective.metric).is_rate

    @property
    def unit(self) -> str:
        """The unit of the estimate, or the metric's name if it has none."""
        return find_unit(self.objective.metric)

    @property
    def per_device(self) -> Interval:
        """The estimate, divided by the number of devices if it is a rate."""
        return self.estimate.scaled(1 / self.devices) if self.is_rate else self.estimate

    @property
    def metrics(self) -> dict[str, float]:
        names = [name for name in map(str, self.trial.index) if name.startswith("metric.")]
        return {name.removeprefix("metric."): float(self.trial[name]) for name in names if pd.notna(self.trial[name])}

    def get_metric(self, name: str) -> float:
        return float(self.trial.get(f"metric.{name}", math.nan))

    def get_first_metric(self, names: Sequence[str]) -> float:
        """Return the first of these metrics that the best trial has, or NaN if it has none of them."""
        return first_known(map(self.get_metric, names))


def group_by_work(results: Sequence[BestResult]) -> dict[str, list[BestResult]]:
    """Group results that can share an axis (equal work and objective), keyed by a label of the work."""
    groups: dict[str, list[BestResult]] = {}
    for result, label in zip(results, label_works([result.work for result in results]), strict=True):
        lower = "lower" if result.objective.direction == "minimize" else "higher"
        unit = f" ({result.unit})" if result.is_rate else f" ({result.unit}, {lower} is better)"
        unit = "" if result.objective.metric == "tokens_per_s" else unit
        groups.setdefault(f"{label}{unit}", []).append(result)
    return groups


def label_works(works: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a unique label for each work, with the main values and other values that distinguish the work."""
    labels = []
    for work, details in zip(works, list_distinctions(works), strict=True):
        main = [work[name] for name in MAIN_WORK_NAMES if name in work]
        labels.append(" ".join([*main, *(f"{name}={value}" for name, value in details.items())]))
    return labels


def list_distinctions(works: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """For each work, return the values that differ between works of the same workload, except the main values."""
    distinctions = []
    for work in works:
        same_workload = [other for other in works if other.get("workload") == work.get("workload")]
        names = [name for name in work if name not in MAIN_WORK_NAMES]
        differing = [name for name in names if len({other.get(name) for other in same_workload}) > 1]
        distinctions.append({name: work[name] for name in differing})
    return distinctions


def sort_by_platform(results: Sequence[BestResult]) -> list[BestResult]:
    return sorted(results, key=lambda result: (result.device, result.devices))


def find_unit(metric: str) -> str:
    """Return the unit of a metric's stored values, or the metric's name if it has no unit or is shown as a multiple."""
    row = get_metric(metric)
    return row.unit if row.unit and row.factor == 1 else metric


def find_objective(trials: pd.DataFrame) -> Objective | None:
    """Return the objective that ranks these trials, or None if they have neither a speed nor an objective's value.

    A sweep's only objective ranks its trials. Rates are proportional to the speed, so one speed stands for all."""
    stated = list(trials["objective"].dropna()) if "objective" in trials else []
    candidates = stated[:1] or [Objective(name, "maximize") for name in SPEEDS]
    present = (candidate for candidate in candidates if f"metric.{candidate.metric}" in trials)
    return next((goal for goal in present if trials[f"metric.{goal.metric}"].notna().any()), None)


def state_objective(objectives: Mapping[str, str]) -> Objective | None:
    """Return a sweep's objective if it ranks the trials in place of the speed: a single one that is not a rate."""
    goals = [Objective(name, direction) for name, direction in objectives.items()]
    return goals[0] if len(goals) == 1 and not get_metric(base_name(goals[0].metric)).is_rate else None


def select_complete(trials: pd.DataFrame) -> pd.DataFrame:
    return trials[trials["tag.outcome"] == "complete"] if len(trials) else trials


def read_work(row: Any) -> dict[str, str]:
    """Return the recorded identity of a trial's work."""
    recorded = row.get("tag.work")
    return {str(name): str(value) for name, value in json.loads(recorded).items()} if isinstance(recorded, str) else {}


def read_value(row: Any, metric: str) -> Interval:
    """Return a trial's metric with its 95% interval. Missing values are NaN."""
    return Interval.read(row, f"metric.{metric}")


def find_best_results(trials: pd.DataFrame) -> list[BestResult]:
    """Return the best result for each device, device count and kind of work, sorted by work, then best first."""
    complete = select_complete(trials)
    if "is_beyond_limit" in complete:
        complete = complete[~complete["is_beyond_limit"].astype(bool)]
    if not len(complete):
        return []
    groups: dict[Hashable, list[int]] = {}  # row positions of the trials, by work, platform and objective
    for position, row in enumerate(complete.to_dict("records")):
        if work := read_work(row):  # version 0.1 recorded no work
            stated = row.get("objective")  # or NaN, in a column of which other rows have one
            goal = stated if isinstance(stated, Objective) else None
            groups.setdefault((tuple(sorted(work.items())), *_read_platform(row), goal), []).append(position)
    results = []
    for rows in groups.values():
        group = complete.iloc[rows]
        objective = find_objective(group)
        if objective is None:
            continue
        metric = objective.metric
        ranked = group[group[f"metric.{metric}"].notna()]
        best, rounds = ranked.iloc[int(rank_losses(ranked, objective).to_numpy().argmin())].copy(), 0
        if _won_finals(ranked.loc[[best.name]], metric).iloc[0]:
            rounds = int(best["final.rounds"])
            _apply_finals(best, metric)
        estimate = read_value(best, metric)
        results.append(BestResult(read_work(best), *_read_platform(best), objective, estimate, best, ranked, rounds))

    def sort_key(result: BestResult) -> tuple[list[str], list[tuple[str, str]], str, float]:
        main = [result.work.get(name, "") for name in MAIN_WORK_NAMES]
        goal = result.objective
        return main, sorted(result.work.items()), goal.metric, goal.loss(result.estimate.value)

    return sorted(results, key=sort_key)


def _read_platform(row: Any) -> tuple[str, int]:
    device, count = row.get("tag.device"), row.get("param.sweep.gpus")
    return device if isinstance(device, str) else "unknown", int(count) if isinstance(count, str) else 1


def rank_losses(ranked: pd.DataFrame, objective: Objective) -> pd.Series:
    """Return the values by which trials are ranked, with the sign chosen so that lower is better.

    The best of many single trials owes its place partly to luck. If a sweep has finals, only the winner counts, with
    its values from the finals. A single trial of another sweep is then ranked by the worse bound of its interval.
    """
    metric = objective.metric
    losses = ranked[f"metric.{metric}"].astype(float) * objective.loss(1.0)
    is_winner = _won_finals(ranked, metric)
    if not is_winner.any():
        return losses
    worse = f"metric.{metric}_ci_{'low' if objective.direction == 'maximize' else 'high'}"
    if worse in ranked:
        losses = (ranked[worse].astype(float) * objective.loss(1.0)).fillna(losses)
    has_finals = ranked["tag.sweeper.study"].isin(ranked.loc[is_winner, "tag.sweeper.study"])
    final = ranked["final.value"].astype(float) * objective.loss(1.0)
    return losses.mask(has_finals, final.where(is_winner, math.inf))


def _won_finals(trials: pd.DataFrame, metric: str) -> pd.Series:
    if "final.metric" not in trials:
        return pd.Series(False, trials.index)
    is_dominated = trials.get("tag.front_verdict", pd.Series("", trials.index)) == "dominated"  # in another objective
    return (trials["final.metric"] == metric) & (trials["final.trial"] == trials["tag.sweeper.trial"]) & ~is_dominated


def _apply_finals(best: pd.Series, metric: str) -> None:
    if metric not in RATES:
        for name, end in zip(("value", "low", "high"), BOUNDS, strict=True):
            best[f"metric.{metric}{end}"] = best[f"final.{name}"]
        return
    factor = best["final.value"] / best[f"metric.{metric}"]
    rates = tuple(f"metric.{rate}" for rate in RATES)
    for column in best.index:  # all rates of the burst change by the same factor, as the work is equal
        if column.startswith(rates) and "sustained" not in column:
            best[column] *= factor
    if "metric.step_time_ms" in best:
        best["metric.step_time_ms"] /= factor
    for name in rates:
        for bound in ("low", "high"):
            if f"{name}_ci_{bound}" in best or name == f"metric.{metric}":
                best[f"{name}_ci_{bound}"] = best[name] * best[f"final.{bound}"] / best["final.value"]


def split_by_work(trials: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the trials for each kind of work, with a label made of the values that distinguish the kind.

    An incomplete trial may record only part of the work. Such a trial is included in every kind of work that it may
    belong to."""
    numbered = enumerate(trials.to_dict("records"))
    rows_by_work = group_values((tuple(read_work(row).items()), position) for position, row in numbered)
    complete = set(select_complete(trials).index)
    kinds = [dict(work) for work, rows in rows_by_work.items() if complete & set(trials.index[rows])]
    for kind in kinds:
        positions = []
        for work, rows in rows_by_work.items():
            # Include trials of this kind of work, and trials with an incomplete identity that does not contradict it.
            if dict(work) == kind or (dict(work) not in kinds and set(work) <= kind.items()):
                positions += rows
        distinct = [name for name in kind if len({other.get(name) for other in kinds}) > 1]
        label = " ".join(kind[name] if name in MAIN_WORK_NAMES else f"{name}={kind[name]}" for name in distinct)
        yield label, trials.iloc[sorted(positions)]


def describe_differences(work: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Describe each value that differs between two kinds of work."""
    names = [name for name in {**work, **other} if work.get(name) != other.get(name)]
    return [f"{name} {work.get(name, 'unknown')} against {other.get(name, 'unknown')}" for name in names]


def read_space(sweep: Mapping[str, Any], work: Mapping[str, str]) -> dict[str, str]:
    """Given a row of `Stored.sweeps`, return the searched parameters of a work's identity, and the space as text."""
    names = [name for name, value in work.items() if value == SEARCHED]
    # Version 0.3 kept the space in the sweep's parameters. Fields that are missing in a row are NaN.
    texts = {name: (sweep.get(f"tag.space.{name}"), sweep.get(f"param.{name}")) for name in names}
    return {name: next((text for text in both if isinstance(text, str)), SEARCHED) for name, both in texts.items()}


def list_varying_parameters(trials: pd.DataFrame) -> list[str]:
    """Return the names of the parameters that differ between trials."""
    names = [name for name in map(str, trials.columns) if name.startswith("param.")]
    varying = [name for name in names if trials[name].nunique(dropna=False) > 1]
    return [name.removeprefix("param.") for name in varying if not name.startswith("param.sweep.")]
