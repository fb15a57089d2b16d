"""New runs: read from the MLflow store, one for each kind of work and device, and compared with the history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from sweeper.commands.history.reference_file import History, Identity, RecordedRun, Series, round_value
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import SPEED_UNITS, describe_closest, find_best_results, list_varying_parameters
from sweeper.results.runs import Comparison, Gate, Verdict, compare_runs
from workloads.api.errors import UserInputError, suggest

VERSION_TAG = "tag.version."
RUNNING, INTERRUPTED = "RUNNING", "KILLED"  # MLflow's names


@dataclass(frozen=True)
class NewRun:
    """A run of a sweep, with what it measured."""

    identity: Identity
    run: RecordedRun


def read_runs(stored: Stored, names: Sequence[str]) -> list[NewRun]:
    """Return the runs of these sweeps, of the last one without a name.

    Raises:
        UserInputError: a sweep is unknown, has not ended or has no complete trial.
    """
    sweeps = stored.sweeps.sort_values("start")
    if not len(sweeps):
        raise UserInputError("the store has no sweep")
    known = list(sweeps["run"])
    for name in names:
        if name not in known:
            raise UserInputError(f"{name}: unknown sweep. {suggest(name, known)}")
    chosen = sweeps[sweeps["run"].isin(names)] if names else sweeps.tail(1)
    return [run for row in chosen.to_dict("records") for run in _read_sweep(row, stored.trials)]


def _read_sweep(sweep: dict[Any, Any], trials: pd.DataFrame) -> list[NewRun]:
    name = sweep["run"]
    if sweep["status"] == RUNNING:
        raise UserInputError(f"{name}: the sweep runs, or was killed: its command resumes it")
    if sweep["status"] == INTERRUPTED:
        raise UserInputError(f"{name}: the sweep was interrupted: its command resumes it")
    of_sweep = trials[trials["tag.sweeper.study"] == sweep["tag.sweeper.study"]] if len(trials) else trials
    results = find_best_results(of_sweep)
    if not results:
        raise UserInputError(f"{name}: the sweep has no complete trial with a speed")
    # Sweeps before 0.2 did not record the driver.
    tags = {str(key): _text(value) for key, value in sweep.items()}
    versions = {key.removeprefix(VERSION_TAG): text for key, text in tags.items() if key.startswith(VERSION_TAG)}
    versions["driver"] = tags.get("tag.driver", "")
    runs = []
    for result in results:
        identity = Identity(
            metric=result.speed_metric,
            unit=SPEED_UNITS[result.speed_metric],
            direction="maximize",
            work=result.work,
            device=result.device,
            devices=result.devices,
            basis="finals" if result.rounds else "single trial",
        )
        point = {key: result.trial[f"param.{key}"] for key in list_varying_parameters(result.trials)}
        run = RecordedRun(
            sweep=name,
            date=sweep["start"].strftime("%Y-%m-%dT%H:%M:%SZ"),
            value=round_value(result.speed.value),
            point={key: value for key, value in point.items() if isinstance(value, str)},
            versions={key: version for key, version in sorted(versions.items()) if version},
            commit=tags.get("tag.git_commit", "")[-40:][:12],  # the last one, of 40 digits
        )
        if result.speed.has_interval:
            run = replace(run, low=round_value(result.speed.low), high=round_value(result.speed.high))
        runs.append(NewRun(identity, run))
    return runs


def _text(value: Any) -> str:
    """Return a tag of a table, in which a run that lacks it has NaN. A resumed sweep has a line for each value."""
    return ", ".join(value.splitlines()) if isinstance(value, str) else ""


@dataclass(frozen=True)
class Compared:
    """New runs of one series and the runs that they are compared with."""

    identity: Identity
    earlier: tuple[RecordedRun, ...]
    new: tuple[RecordedRun, ...]
    result: Comparison

    @property
    def changes(self) -> list[str]:
        """The versions in which the last new run differs from the last earlier one."""
        return describe_changes(self.earlier[-1], self.new[-1])


@dataclass(frozen=True)
class Unknown:
    """New runs of work or hardware that the history does not have, and how they differ from the most similar one."""

    identity: Identity
    new: tuple[RecordedRun, ...]
    reason: str


def compare(history: History, runs: Sequence[NewRun], gate: Gate) -> tuple[list[Compared], list[Unknown]]:
    """Compare new runs with the present level of their series, each series by itself."""
    compared, unknown = [], []
    for identity, new in group(runs):
        series = history.find(identity)
        earlier = tuple(run for run in series.level if not any(map(run.is_same, new))) if series else ()
        if earlier:
            before, after = ([run.to_run(identity) for run in side] for side in (earlier, new))
            result = compare_runs(before, after, gate)
            compared.append(Compared(identity, earlier, new, result))
        else:
            unknown.append(Unknown(identity, new, _explain(history, identity, series)))
    return compared, unknown


def append(history: History, runs: Sequence[NewRun], gate: Gate, *, new_level: bool) -> History:
    """Return the history with these runs.

    Raises:
        UserInputError: it has one of them, or one is slower or faster than the level that it would belong to.
    """
    for identity, new in group(runs):
        series = history.find(identity)
        if series and (known := next((run for run in new if any(map(run.is_same, series.runs))), None)):
            raise UserInputError(f"{known.sweep} of {known.date}: already in the history")
        if series and not new_level:
            _check_level(series, new, gate)
        for place, run in enumerate(new):
            starts = bool(series) and new_level and not place
            history = history.append(identity, replace(run, starts_level=starts))
    return history


def group(runs: Sequence[NewRun]) -> list[tuple[Identity, tuple[RecordedRun, ...]]]:
    """Return the runs of each identity, in their order."""
    groups: dict[str, tuple[Identity, tuple[RecordedRun, ...]]] = {}
    for new in runs:
        key = json.dumps(asdict(new.identity), sort_keys=True)
        _, known = groups.get(key, (new.identity, ()))
        groups[key] = new.identity, (*known, new.run)
    return list(groups.values())


def describe_changes(before: RecordedRun, after: RecordedRun) -> list[str]:
    """Return the versions that differ between two runs: `torch 2.11 to 2.12`."""
    names = {**before.versions, **after.versions}
    versions = {name: (before.versions.get(name, "none"), after.versions.get(name, "none")) for name in names}
    return [f"{name} {old} to {new}" for name, (old, new) in versions.items() if old != new]


def _check_level(series: Series, new: Sequence[RecordedRun], gate: Gate) -> None:
    """Refuse runs that would make the level a mixture of two."""
    level, added = ([run.to_run(series.identity) for run in side] for side in (series.level, new))
    result = compare_runs(level, added, gate)
    is_faster = compare_runs(added, level, gate).verdict is Verdict.SLOWER
    if is_faster or result.verdict is Verdict.SLOWER:
        differs = f"{'faster' if is_faster else 'slower'} than the runs before ({result.ratio.value - 1:+.1%})"
        raise UserInputError(
            f"{new[-1].sweep}: {differs}. --new-level starts a new level, with which later runs are compared"
        )


def _explain(history: History, identity: Identity, series: Series | None) -> str:
    """Return why there is nothing to compare with: in what the most similar series differs."""
    if series is not None:
        return "the history has no other run of this work at its present level"
    if not history.series:
        return "the history is empty: `python -m sweeper history append` adds the last sweep"
    known = [series.identity.details for series in history.series]
    return f"not in the history: {describe_closest(identity.details, known)}"
