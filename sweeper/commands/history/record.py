"""From a sweep in the MLflow store to the runs of a history: one for each kind of work and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from sweeper.commands.history.reference_file import Identity, RecordedRun, round_value
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import SPEED_UNITS, BestResult, find_best_results, list_varying_parameters
from workloads.api.errors import UserInputError, suggest

VERSION_TAG = "tag.version."
SWEEPER = "gpu-sweeper"
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
    return [NewRun(_identify(result), _record(result, sweep)) for result in results]


def _identify(result: BestResult) -> Identity:
    return Identity(
        metric=result.speed_metric,
        unit=SPEED_UNITS[result.speed_metric],
        direction="maximize",
        work=result.work,
        device=result.device,
        devices=result.devices,
        basis="finals" if result.rounds else "single trial",
    )


def _record(result: BestResult, sweep: dict[Any, Any]) -> RecordedRun:
    names = list_varying_parameters(result.trials)
    point = {name: result.trial[f"param.{name}"] for name in names}
    run = RecordedRun(
        sweep=sweep["run"],
        date=sweep["start"].strftime("%Y-%m-%dT%H:%M:%SZ"),
        value=round_value(result.speed.value),
        point={name: value for name, value in point.items() if isinstance(value, str)},
        versions=_read_versions(sweep),
        commit=_text(sweep.get("tag.git_commit"))[-40:][:12],  # the last one, of 40 digits
    )
    if not result.speed.has_interval:
        return run
    return replace(run, low=round_value(result.speed.low), high=round_value(result.speed.high))


def _read_versions(sweep: dict[Any, Any]) -> dict[str, str]:
    """Return the versions of the software and of the driver, which sweeps before 0.2 did not record."""
    tags = {str(name): _text(value) for name, value in sweep.items()}
    versions = {name.removeprefix(VERSION_TAG): value for name, value in tags.items() if name.startswith(VERSION_TAG)}
    versions["driver"] = tags.get("tag.driver", "")
    return {name: version for name, version in sorted(versions.items()) if version}


def _text(value: Any) -> str:
    """Return a tag of a table, in which a run that lacks it has NaN. A resumed sweep has a line for each value."""
    return ", ".join(value.splitlines()) if isinstance(value, str) else ""
