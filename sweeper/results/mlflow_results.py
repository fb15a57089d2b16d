"""Read sweeps from an MLflow store as tables, with one row per sweep or per trial.

Runs are read through MLflow's client, or directly from the tables of a SQLite file. Importing MLflow and opening a
SQLite file takes 3 s of CPU time, twice as long as the rest of a small report. The columns of the runs, params, metrics
and tags tables have not changed since MLflow 1.30. If the columns ever differ, the client is used.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd

from sweeper.metrics.criteria import Criteria, Limit
from sweeper.metrics.intervals import Interval
from sweeper.results.ranking import SPEEDS, BestResult, find_best_results, state_objective
from sweeper.tracking import mlflow_store
from sweeper.tracking.mlflow_store import KIND, STUDY
from workloads.api.errors import UserInputError
from workloads.api.secrets import mask
from workloads.api.validation import check_known

if TYPE_CHECKING:
    from mlflow import MlflowClient


@contextmanager
def _explained_errors(uri: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError) as error:
        raise UserInputError(f"tracking.uri={mask(uri)}: {str(error).splitlines()[0][:200]}") from error


@dataclass(frozen=True)
class ClientReader:
    """Reads the store at `uri` through MLflow's client. Methods raise `UserInputError` if MLflow fails."""

    client: Any
    uri: str = ""

    def read_experiments(self) -> dict[str, str]:
        """Return the experiments' ids by name."""
        with _explained_errors(self.uri):
            return {stored.name: stored.experiment_id for stored in self.client.search_experiments()}

    def read_runs(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> list[Any]:
        """Return the runs in these experiments that have all of these tags, latest first."""
        with _explained_errors(self.uri):
            return list(mlflow_store.search_runs(self.client, experiment_ids, tags))


@dataclass(frozen=True)
class SqliteReader:
    """Reads the same data from a SQLite file. Runs have only the attributes of MLflow runs that this module uses.

    Every method raises `sqlite3.Error` if MLflow did not create the file or its tables are of another version.
    """

    path: Path

    def _query(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with closing(sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(query, values).fetchall()

    def read_experiments(self) -> dict[str, str]:
        rows = self._query("SELECT name, experiment_id FROM experiments WHERE lifecycle_stage = 'active'")
        return {name: str(experiment_id) for name, experiment_id in rows}

    def read_runs(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> list[Any]:
        has_tag = "EXISTS (SELECT 1 FROM tags WHERE tags.run_uuid = runs.run_uuid AND key = ? AND value = ?)"
        of_experiment = f"experiment_id IN ({','.join('?' * len(experiment_ids))})"
        selection = " AND ".join([of_experiment, "lifecycle_stage = 'active'", *[has_tag] * len(tags)])
        values = [*map(int, experiment_ids), *(text for tag in tags.items() for text in tag)]
        columns = "run_uuid, name, status, start_time, end_time"
        query = f"SELECT {columns} FROM runs WHERE {selection} ORDER BY start_time DESC, run_uuid"
        runs = {}
        for run_id, name, status, start_ms, end_ms in self._query(query, values):
            info = SimpleNamespace(run_id=run_id, run_name=name, status=status, start_time=start_ms, end_time=end_ms)
            runs[run_id] = SimpleNamespace(info=info, data=SimpleNamespace(params={}, metrics={}, tags={}))
        selected = f"run_uuid IN (SELECT run_uuid FROM runs WHERE {selection})"
        for table in ("params", "tags"):
            for run_id, key, value in self._query(f"SELECT run_uuid, key, value FROM {table} WHERE {selected}", values):
                getattr(runs[run_id].data, table)[key] = value
        query = f"SELECT run_uuid, key, value, is_nan FROM latest_metrics WHERE {selected}"
        for run_id, key, value, is_nan in self._query(query, values):
            runs[run_id].data.metrics[key] = math.nan if is_nan else value
        return list(runs.values())


def open_reader(uri: str) -> ClientReader | SqliteReader:
    """Return a reader for the store. Raises UserInputError if MLflow cannot open the store."""
    if path := mlflow_store.sqlite_path(uri):
        reader = SqliteReader(path)
        try:
            reader.read_runs(list(reader.read_experiments().values())[:1], {})
            return reader
        except sqlite3.OperationalError:  # an interrupted write, which MLflow will repair
            if reason := mlflow_store.find_damage(path):
                raise UserInputError(f"tracking.uri={uri}: {reason}") from None
        except sqlite3.DatabaseError as error:
            raise UserInputError(f"tracking.uri={uri}: {error}") from error
    from mlflow import MlflowClient

    with _explained_errors(uri):
        return ClientReader(MlflowClient(tracking_uri=uri), uri)


@dataclass(frozen=True)
class Stored:
    """Tables of sweeps, of trials, and of results imported from other tools.

    The columns of every table are `run`, `run_id`, `parent`, `status`, `start`, `end`, and `param.…`, `metric.…` and
    `tag.…`. A trial also has the sweep's constants as `param.…`, the result of the sweep's finals as `final.…`,
    and in `objective` the `Objective` that ranks it in place of the speed, or None.
    `is_beyond_limit` is true for a trial that one of the sweep's limits excludes.
    """

    sweeps: pd.DataFrame
    trials: pd.DataFrame
    imported: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def best_results(self) -> list[BestResult]:
        return find_best_results(self.trials)


def read(uri: str, experiment: str | None = None, sweep: str | None = None) -> Stored:
    """Read a whole store, one experiment or one sweep. Raises UserInputError if any of them does not exist."""
    if (path := mlflow_store.sqlite_path(uri)) and not path.is_file():
        remedy = "Run `python -m sweeper` to create one, or set tracking.uri="
        raise UserInputError(f"{uri}: the store does not exist. {remedy}")
    reader = open_reader(uri)
    ids = reader.read_experiments()
    if experiment is not None:
        check_known(experiment, ids, f"tracking.experiment={experiment}: unknown experiment")
    selected = [ids[experiment]] if experiment else list(ids.values())
    parents = reader.read_runs(selected, {KIND: mlflow_store.SWEEP_KIND})
    if sweep is not None:
        check_known(sweep, {run.info.run_name for run in parents}, f"sweep={sweep}: unknown sweep")
    imported = [] if sweep else reader.read_runs(selected, {KIND: mlflow_store.IMPORTED_KIND})
    if not (parents or imported):
        raise UserInputError(f"{mask(uri)}: the store has no sweep yet")
    parents = [run for run in parents if sweep in (None, run.info.run_name)]
    of_sweep = {mlflow_store.SWEEP_NAME: sweep} if sweep else {}
    trials = reader.read_runs(selected, {KIND: mlflow_store.TRIAL_KIND, **of_sweep})
    return _build_tables(parents, trials, imported)


def of_study(client: MlflowClient, experiment_id: str, study_id: str) -> Stored:
    """Read one sweep by study id, because sweep names are not unique."""
    # MLflow's client takes 1.2 ms to read a run from a SQLite file: two minutes instead of 15 s for 100,000 trials.
    reader, study = open_reader(client.tracking_uri), {STUDY: study_id}
    kinds = (mlflow_store.SWEEP_KIND, mlflow_store.TRIAL_KIND)
    return _build_tables(*(reader.read_runs([experiment_id], {KIND: kind, **study}) for kind in kinds))


def _build_tables(parents: Sequence[Any], trials: Sequence[Any], imported: Sequence[Any] = ()) -> Stored:
    sweeps = pd.DataFrame([_columns(run) for run in parents], columns=None if parents else ["run", "start"])
    shared: dict[str, dict[str, Any]] = {}
    limits: dict[str, tuple[Limit, ...]] = {}
    front_rounds: dict[str, float] = {}
    for run in parents:
        metrics, tags, study_id = run.data.metrics, run.data.tags, run.data.tags[STUDY]
        front_rounds[study_id] = metrics.get("front_rounds", 0.0)
        limits[study_id] = Criteria.of({}, json.loads(tags.get(mlflow_store.LIMITS, "{}"))).limits
        finals = (n.removeprefix("final_") for n in metrics if n.startswith("final_") and f"{n}_ci_low" in metrics)
        winner = str(int(metrics["final_trial"])) if "final_trial" in metrics else None
        shared[study_id] = {
            **{f"param.{name}": value for name, value in run.data.params.items()},
            "workload": tags.get("workload", ""),
            "objective": state_objective(json.loads(tags.get(mlflow_store.OBJECTIVES, "{}"))),
            **_finals_columns(metrics, next(finals, None), winner, metrics.get("final_rounds", 0.0)),
        }
    rows = []
    for run in trials:
        metrics, tags, study_id = run.data.metrics, run.data.tags, run.data.tags[STUDY]
        # Leave out single rounds of the finals. The best of them would win by luck, so finalists need all rounds.
        if study_id not in shared or any(tag in tags for tag in mlflow_store.LEFT_OUT):
            continue
        # A trial exceeds a limit in the search, or as the median over the rounds of the finals.
        is_beyond = mlflow_store.EXCEEDED in tags or any(limit.excess(metrics) > 0 for limit in limits[study_id])
        # Finals with several objectives have no winner, so each trial keeps its speed from the finals.
        speed = next((name for name in SPEEDS if f"final_{name}" in metrics), None)
        in_finals = _finals_columns(metrics, speed, tags.get("sweeper.trial"), front_rounds[study_id])
        rows.append({**shared[study_id], **in_finals, **_columns(run), "is_beyond_limit": is_beyond})
    return Stored(sweeps, pd.DataFrame(rows), pd.DataFrame([_columns(run) for run in imported]))


def _finals_columns(metrics: Mapping[str, float], name: str | None, trial: str | None, rounds: float) -> dict[str, Any]:
    if name is None or trial is None or not rounds:
        return {}
    values = {f"final.{key}": value for key, value in asdict(Interval.read(metrics, f"final_{name}")).items()}
    return {"final.metric": name, "final.trial": trial, "final.rounds": rounds, **values}


def _columns(run: Any) -> dict[str, Any]:
    info, data = run.info, run.data
    return {
        "run": info.run_name,
        "run_id": info.run_id,
        "parent": data.tags.get(mlflow_store.PARENT_RUN, ""),
        "status": info.status,
        "start": pd.Timestamp(info.start_time, unit="ms", tz="UTC"),
        "end": pd.Timestamp(info.end_time, unit="ms", tz="UTC") if info.end_time else pd.NaT,
        **{f"param.{name}": value for name, value in data.params.items() if value is not None},
        **{f"metric.{name}": value for name, value in data.metrics.items()},
        **{f"tag.{name}": value for name, value in data.tags.items() if not name.startswith("mlflow.")},
    }
