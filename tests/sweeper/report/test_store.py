"""Reading a store that this version or version 0.1 has written."""

from __future__ import annotations

import pytest
from mlflow import MlflowClient

from sweeper.common.trials import Remeasurement
from sweeper.report import store
from sweeper.tracking import mlflow_store
from sweeper.tracking.store import Store
from tests.conftest import Workspace
from tests.support.factories import trial_record

PARENT = {"started_at": "now", "params": {}, "tags": {"workload": "probe"}, "artifacts": {}}


@pytest.mark.parametrize("tag", ["remeasured_trial", "again_of"])
def test_rounds_of_the_finals_are_not_trials_in_either_spelling(
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
    for stored in (store.read(uri), store.of_study(client, written.experiment_id, "study")):
        assert list(stored.trials["tag.sweeper.trial"]) == ["0"]
