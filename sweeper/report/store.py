"""What an MLflow store holds of sweeps, as tables: one row a sweep, one row a trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from sweeper.common.errors import UserInputError, suggest
from sweeper.common.secrets import mask
from sweeper.report.best import BestResult, best_results

PAGE = 5000


@dataclass(frozen=True)
class Stored:
    """Sweeps and trials, and apart from them what others have measured. Columns are plain names for what every run has,
    `param.…`, `metric.…` and `tag.…` for the rest; a trial has its sweep's constants among its parameters, and as
    `final.…` what its sweep's finals came to."""

    sweeps: pd.DataFrame
    trials: pd.DataFrame
    imported: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def best_results(self) -> list[BestResult]:
        """The best of each device at each kind of work."""
        return best_results(self.trials)


def read(uri: str, experiment: str | None = None, sweep: str | None = None) -> Stored:
    """Everything, or one experiment's, or one sweep's. Raises UserInputError where there is nothing of that kind."""
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        raise UserInputError(f"{uri}: there is no such store; `python -m sweeper` makes one, --store names another")
    try:
        client = MlflowClient(tracking_uri=uri)
        found = {each.name: each.experiment_id for each in client.search_experiments()}
        if experiment is not None and experiment not in found:
            raise UserInputError(f"--experiment {experiment}: {suggest(experiment, found)}")
        ids = [found[experiment]] if experiment else list(found.values())
        parents = list(_runs(client, ids, "tags.`sweeper.kind` = 'sweep'"))
        names = {run.info.run_name for run in parents}
        if sweep is not None and sweep not in names:
            raise UserInputError(f"--sweep {sweep}: {suggest(sweep, names) if names else 'the store has no sweep'}")
        imported = [] if sweep else list(_runs(client, ids, "tags.`sweeper.kind` = 'imported'"))
        if not (parents or imported):
            raise UserInputError(f"{mask(uri)}: the store has no sweep yet")
        parents = [run for run in parents if sweep in (None, run.info.run_name)]
        only = f" and tags.`sweep` = '{sweep}'" if sweep else ""
        children = list(_runs(client, ids, f"tags.`sweeper.kind` = 'trial'{only}"))
    except MlflowException as error:
        raise UserInputError(f"--store {mask(uri)}: {str(error).splitlines()[0][:200]}") from error
    return _stored(parents, children, imported)


def of_study(client: MlflowClient, experiment_id: str, study: str) -> Stored:
    """One sweep's, by the identity of its study: names are not unique."""
    mine = f"tags.`sweeper.study` = '{study}' and tags.`sweeper.kind`"
    parents, children = (list(_runs(client, [experiment_id], f"{mine} = '{kind}'")) for kind in ("sweep", "trial"))
    return _stored(parents, children)


def _stored(parents: Sequence[Any], children: Sequence[Any], imported: Sequence[Any] = ()) -> Stored:
    sweeps = pd.DataFrame([_row(run) for run in parents], columns=None if parents else ["run", "start"])
    shared: dict[str, dict[str, Any]] = {}
    for run in parents:
        constants = {f"param.{name}": value for name, value in run.data.params.items()}
        shared[run.data.tags["sweeper.study"]] = {
            **constants,
            "workload": run.data.tags.get("workload", ""),
            **_final(run.data.metrics),
        }
    # A round of the finals is one of several by which finalists were compared: the best of them would be a lucky one.
    searched = [run for run in children if "again_of" not in run.data.tags]
    rows = [{**shared[study], **_row(run)} for run in searched if (study := run.data.tags["sweeper.study"]) in shared]
    return Stored(sweeps, pd.DataFrame(rows), pd.DataFrame([_row(run) for run in imported]))


def _final(metrics: Mapping[str, float]) -> dict[str, Any]:
    """What the finals of a sweep came to: of which figure, the winner's number, its figure and interval, the rounds."""
    name = next((n for n in metrics if n.startswith("final_") and f"{n}_ci_low" in metrics), None)
    if name is None or "final_trial" not in metrics:
        return {}
    return {
        "final.speed": name.removeprefix("final_"),
        "final.trial": str(int(metrics["final_trial"])),
        "final.rounds": metrics["final_rounds"],
        "final.value": metrics[name],
        "final.low": metrics[f"{name}_ci_low"],
        "final.high": metrics[f"{name}_ci_high"],
    }


def _runs(client: MlflowClient, experiments: list[str], where: str) -> Iterator[Any]:
    token = None
    while True:
        page = client.search_runs(experiments, where, max_results=PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _row(run: Any) -> dict[str, Any]:
    info, data = run.info, run.data
    return {
        "run": info.run_name,
        "run_id": info.run_id,
        "parent": data.tags.get("mlflow.parentRunId", ""),
        "status": info.status,
        "start": pd.Timestamp(info.start_time, unit="ms", tz="UTC"),
        "end": pd.Timestamp(info.end_time, unit="ms", tz="UTC") if info.end_time else pd.NaT,
        **{f"param.{name}": value for name, value in data.params.items() if value is not None},
        **{f"metric.{name}": value for name, value in data.metrics.items()},
        **{f"tag.{name}": value for name, value in data.tags.items() if not name.startswith("mlflow.")},
    }
