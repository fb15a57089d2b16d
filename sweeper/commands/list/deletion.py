"""Remove a sweep from disk and from MLflow."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sweeper.common.format import count
from sweeper.results.stored import StoredSweep
from sweeper.tracking import mlflow_store
from workloads.api.errors import UserInputError


def delete(sweep: StoredSweep, uri: str | None = None) -> list[str]:
    """Delete the runs of a sweep in MLflow, then its folder. Returns what was done, in lines.

    Args:
        sweep: one that does not run.
        uri: of its store; None for the address that it recorded.

    Raises:
        UserInputError: the sweep runs, or its store cannot be reached. Then nothing is deleted.
    """
    with _locked(sweep):
        lines = [_delete_runs(sweep, uri)]
        shutil.rmtree(sweep.folder)
    return [*lines, f"{sweep.name} is deleted"]


@contextmanager
def _locked(sweep: StoredSweep) -> Iterator[None]:
    """Hold the lock of a sweep, so that no driver starts it."""
    with (sweep.folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserInputError(f"{sweep.name}: process {sweep.driver} is running it") from error
        yield


def _delete_runs(sweep: StoredSweep, uri: str | None) -> str:
    """Mark the runs as deleted, as MLflow's own page does. Returns what was done."""
    description = sweep.description
    if description is None:
        return "its runs in MLflow stay: an earlier version ran it and did not keep where they are"
    uri = uri or description.tracking_uri
    if "***" in uri:
        raise UserInputError(f"{sweep.name}: the password of {uri} is not stored; set tracking.uri=URI")
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return f"{uri}: there is no such store any more"
    mlflow_store.check_uri(uri)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = list(mlflow_store.search_runs(client, experiments, {mlflow_store.STUDY: description.study}))
    for run in runs:
        client.delete_run(run.info.run_id)
    return f"{count(len(runs), 'run')} of {uri} are deleted; `mlflow gc` removes them for good"
