"""Reading a store."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from sweeper.common.trials import Remeasurement
from sweeper.results import mlflow_results
from sweeper.tracking import mlflow_store
from sweeper.tracking.store import Store
from tests.conftest import Workspace
from tests.support.factories import trial_record
from workloads.api.errors import UserInputError

PARENT = {"started_at": "now", "params": {}, "tags": {"workload": "probe"}, "artifacts": {}}


@pytest.mark.parametrize("tag", ["remeasured_trial", "retried_as"])
def test_rounds_of_the_finals_and_replaced_attempts_are_not_trials(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    monkeypatch.chdir(workspace.path)
    uri = mlflow_store.default_uri(workspace.path)
    written = Store(uri, "e", "study", "sweep", PARENT)
    written.write_trial(trial_record(0, metrics={"tflops": 1.0}))
    # The best figure of all, by chance.
    again = Remeasurement(trial=0, round=0, group=(0,))
    written.write_trial(trial_record(1, metrics={"tflops": 9.0}, remeasurement=again))
    (run,) = [run for run in workspace.runs("trial") if "remeasured_trial" in run.data.tags]
    assert run.data.tags["remeasured_trial"] == "0"
    client = MlflowClient(tracking_uri=uri)
    client.delete_tag(run.info.run_id, "remeasured_trial")
    client.set_tag(run.info.run_id, tag, "0")
    for stored in (mlflow_results.read(uri), mlflow_results.of_study(client, written.experiment_id, "study")):
        assert list(stored.trials["tag.sweeper.trial"]) == ["0"]


def test_a_sqlite_file_is_read_as_mlflow_reads_it(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.path)
    uri = mlflow_store.default_uri(workspace.path)
    written = Store(uri, "it's", "study", "sweep", PARENT)
    for number, rate in enumerate((1.5, math.nan, 1e308)):
        written.write_trial(trial_record(number, {"x": "a'b", "y": number}, metrics={"tflops": rate}))
    client = MlflowClient(tracking_uri=uri)
    deleted = client.create_run(written.experiment_id, tags={mlflow_store.KIND: mlflow_store.TRIAL_KIND})
    client.delete_run(deleted.info.run_id)
    readers = mlflow_results.open_reader(uri), mlflow_results.ClientReader(client, uri)
    assert isinstance(readers[0], mlflow_results.SqliteReader)
    experiments = [one.read_experiments() for one in readers]
    assert experiments[0] == experiments[1] and "it's" in experiments[0]
    for kind in (mlflow_store.TRIAL_KIND, mlflow_store.SWEEP_KIND):
        of_kind = {mlflow_store.KIND: kind}
        direct, through_mlflow = ([describe(run) for run in one.read_runs(["1"], of_kind)] for one in readers)
        assert direct == through_mlflow and len(direct) == (3 if kind == mlflow_store.TRIAL_KIND else 1)


def describe(run: Any) -> str:
    """Return the parts of a run that a table has, as text: NaN equals NaN there."""
    info, data = run.info, run.data
    times = (info.start_time, info.end_time)
    return repr(
        (info.run_id, info.run_name, info.status, times, *map(sorted_items, (data.params, data.metrics, data.tags)))
    )


def sorted_items(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(values.items())


def test_a_file_that_is_no_database_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    path.write_text("not a database")
    with pytest.raises(UserInputError, match=r"tracking.uri=sqlite:.* file is not a database"):
        mlflow_results.open_reader(f"sqlite:///{path}")
