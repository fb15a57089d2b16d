"""Read the runs of an MLflow store: through MLflow's client, or a SQLite file's tables without it.

MLflow takes 3 s of a core to import and to open a SQLite file, twice what the rest of a small report takes. The tables
of runs, parameters, metrics and tags have kept their columns since MLflow 1.30; where they differ, the client reads.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sweeper.tracking import mlflow_store
from workloads.api.errors import UserInputError
from workloads.api.secrets import mask

SQLITE_PREFIX = "sqlite:///"


class Reader(Protocol):
    """Reads experiments and runs. A run has the attributes of `mlflow.entities.Run` that `StoredRun` has."""

    def read_experiments(self) -> dict[str, str]:
        """Return the ids of the experiments by name."""
        ...

    def read_runs(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> list[Any]:
        """Return the runs of these experiments that have all of these tags, the latest first."""
        ...


@contextmanager
def _explained_errors(uri: str) -> Iterator[None]:
    """Turn an error of MLflow's into one line that names the store."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise UserInputError(f"--store {mask(uri)}: {str(error).splitlines()[0][:200]}") from error


@dataclass(frozen=True)
class ClientReader:
    """Reads through an `mlflow.MlflowClient` of the store at `uri`.

    Every method raises `UserInputError` if MLflow cannot read the store.
    """

    client: Any
    uri: str = ""

    def read_experiments(self) -> dict[str, str]:
        """Return the ids of the experiments by name."""
        with _explained_errors(self.uri):
            return {stored.name: stored.experiment_id for stored in self.client.search_experiments()}

    def read_runs(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> list[Any]:
        """Return the runs of these experiments that have all of these tags, the latest first."""
        with _explained_errors(self.uri):
            return list(mlflow_store.search_runs(self.client, experiment_ids, tags))


@dataclass(frozen=True)
class RunInfo:
    """The times are in milliseconds since 1970."""

    run_id: str
    run_name: str
    status: str
    start_time: int
    end_time: int | None


@dataclass(frozen=True)
class RunData:
    """What was logged."""

    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredRun:
    """A run as a table has it."""

    info: RunInfo
    data: RunData


@dataclass(frozen=True)
class SqliteReader:
    """Reads the tables of a SQLite file.

    Every method raises `sqlite3.Error` if the file is none of MLflow's, or of a version whose tables differ.
    """

    path: Path

    def _query(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(query, values).fetchall()

    def read_experiments(self) -> dict[str, str]:
        """Return the ids of the experiments by name."""
        rows = self._query("SELECT name, experiment_id FROM experiments WHERE lifecycle_stage = 'active'")
        return {name: str(experiment_id) for name, experiment_id in rows}

    def read_runs(self, experiment_ids: Sequence[str], tags: Mapping[str, str]) -> list[Any]:
        """Return the runs of these experiments that have all of these tags, the latest first."""
        has_tag = "EXISTS (SELECT 1 FROM tags WHERE tags.run_uuid = runs.run_uuid AND key = ? AND value = ?)"
        of_experiment = f"experiment_id IN ({','.join('?' * len(experiment_ids))})"
        selection = " AND ".join([of_experiment, "lifecycle_stage = 'active'", *[has_tag] * len(tags)])
        values = [*map(int, experiment_ids), *(text for tag in tags.items() for text in tag)]
        rows = self._query(
            f"SELECT run_uuid, name, status, start_time, end_time FROM runs WHERE {selection} "
            "ORDER BY start_time DESC, run_uuid",
            values,
        )
        runs = {row[0]: StoredRun(RunInfo(*row), RunData()) for row in rows}
        selected = f"run_uuid IN (SELECT run_uuid FROM runs WHERE {selection})"
        for run_id, key, value in self._query(f"SELECT run_uuid, key, value FROM params WHERE {selected}", values):
            runs[run_id].data.params[key] = value
        for run_id, key, value in self._query(f"SELECT run_uuid, key, value FROM tags WHERE {selected}", values):
            runs[run_id].data.tags[key] = value
        query = f"SELECT run_uuid, key, value, is_nan FROM latest_metrics WHERE {selected}"
        for run_id, key, value, is_nan in self._query(query, values):
            runs[run_id].data.metrics[key] = math.nan if is_nan else value
        return list(runs.values())


def open_reader(uri: str) -> Reader:
    """Return a reader of the store at this address.

    Raises:
        UserInputError: the file is no database, or MLflow cannot open the store.
    """
    if uri.startswith(SQLITE_PREFIX):
        reader = SqliteReader(Path(uri.removeprefix(SQLITE_PREFIX)))
        try:
            reader.read_runs(list(reader.read_experiments().values())[:1], {})
            return reader
        except sqlite3.OperationalError:
            pass  # the tables of another version, or an interrupted write: MLflow mends them
        except sqlite3.DatabaseError as error:
            raise UserInputError(f"--store {uri}: {error}") from error
    from mlflow import MlflowClient

    with _explained_errors(uri):
        return ClientReader(MlflowClient(tracking_uri=uri), uri)
