"""The client of the store: no result is lost if a write fails."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from mlflow import MlflowClient

from sweeper.common.trials import Retry, TrialStatus
from sweeper.tracking.client import TrackingClient
from sweeper.tracking.mlflow_store import REFUSED, RETRIED_AS, TRIAL_NUMBER, WRITTEN
from sweeper.tracking.mlflow_view import TAG_PREFIX, RankedTrial, SweepView
from tests.conftest import Workspace, environment, wait_for
from tests.support.factories import trial_record
from tests.support.tracking import open_store, record, store_arguments

VIEW = SweepView("score", ["score"], ["x"], [RankedTrial(0, {}, "1 to 2")])


def test_an_abandoned_trial_that_reported_steps_ends_as_cancelled(uri: str, workspace: Workspace) -> None:
    store = open_store(uri)
    for number in (3, 4):
        store.write_step(number, f"{number}", 1, 1.0, {"score": 1.0})
    store.close("FINISHED", {}, {}, {}, [], abandoned=[3, 7])
    runs = {run.data.tags["sweeper.trial"]: run for run in workspace.runs("trial")}
    assert (runs["3"].info.status, runs["3"].data.tags["outcome"]) == ("KILLED", "cancelled")
    assert runs["4"].info.status == "RUNNING"


def test_the_client_records_trials_steps_results_and_the_report(
    uri: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("queue", "mlflow"):  # in the results directory, where they are nobody's
        (workspace.path / f"{module}.py").write_text("x = 1\n")
    site = workspace.path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('site ready')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, ["site", "", os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    lock_fd = os.open(workspace.path, os.O_RDONLY)
    client = TrackingClient(store_arguments(uri), workspace.path, workspace.path, lock_fd)
    client.log_step(0, "0000", 1, 1e9, {"score": 0.5})
    bad = trial_record(3, {}, metrics={"score": "fast"})
    client.log_trial(bad)  # no later one waits for it
    client.log_trial(record(0))
    results = {"status": "FINISHED", "metrics": {"best_score": 1.5}, "tags": {}, "artifacts": {}, "plots": []}
    assert client.close(results, VIEW, patience_s=60), client.last_error
    experiment = MlflowClient(uri).get_experiment(str(client.experiment_id))
    assert client.view_key and TAG_PREFIX + client.view_key in experiment.tags
    assert client.is_open and client.pending == 0 and client.last_error == ""
    client.detach()
    os.close(lock_fd)
    run, refused = sorted(workspace.runs("trial"), key=lambda run: run.data.tags[TRIAL_NUMBER])
    assert run.info.status == "FINISHED" and run.data.metrics["steps/score"] == 0.5
    assert list(client.refused) == [3] and "fast" in client.refused[3]
    assert refused.info.status == "FINISHED" and refused.data.tags[REFUSED] == client.refused[3]
    (parent,) = workspace.runs("sweep")
    assert parent.info.status == "FINISHED" and parent.data.metrics["best_score"] == 1.5
    link = f"[report.html](#/experiments/{client.experiment_id}/runs/{parent.info.run_id}/artifacts/report.html)"
    wait_for(lambda: link in workspace.runs("sweep")[0].data.tags.get("mlflow.note.content", ""), timeout_s=120)
    report = workspace.path / "mlruns" / parent.info.experiment_id / parent.info.run_id / "artifacts" / "report.html"
    assert "<title>sweeper: sweep</title>" in report.read_text()
    assert "no report" not in (workspace.path / "tracking.log").read_text()


def test_a_trial_whose_run_cannot_be_made_at_all_is_left_to_the_next_start(uri: str, workspace: Workspace) -> None:
    """Somebody deletes the experiment in MLflow's pages and restores it."""
    with (workspace.path / "lock").open("w") as lock:
        client = TrackingClient(store_arguments(uri), workspace.path, workspace.path, lock.fileno())
        wait_for(lambda: client.is_open)
        MlflowClient(uri).delete_experiment(str(client.experiment_id))
        client.log_trial(record(0))
        wait_for(lambda: client.refused)
        MlflowClient(uri).restore_experiment(str(client.experiment_id))
        results = {"status": "FINISHED", "metrics": {}, "tags": {}, "artifacts": {}, "plots": [], "written": 1}
        assert not client.close(results, VIEW, patience_s=60) and client.pending == 1 and client.last_error
    (parent,) = workspace.runs("sweep")
    assert parent.info.status == "FINISHED" and WRITTEN not in parent.data.tags and not workspace.runs("trial")
    store = open_store(uri)
    assert 0 not in store.children.written_trials and not store.written_before


def test_a_retry_that_does_not_replace_a_complete_attempt_is_the_run_left_out(uri: str, workspace: Workspace) -> None:
    store, lost = open_store(uri), replace(record(1), status=TrialStatus.LOST, metrics={}, retry=Retry(0))
    store.write_trial(record(0))
    store.write_trial(lost.weighed_against(record(0)))
    refused = replace(record(2), retry=Retry(0))
    store.set_aside(refused, "why")
    tags = {run.data.tags[TRIAL_NUMBER]: run.data.tags.get(RETRIED_AS) for run in workspace.runs("trial")}
    assert tags == {"0": "2", "1": "0", "2": None}


def test_a_failure_to_write_the_report_loses_no_other_result(uri: str, workspace: Workspace) -> None:
    """The recording process receives a driver's messages; a folder stands where the report has to go."""
    store = open_store(uri)
    (workspace.path / "mlruns" / store.experiment_id / store.parent_id / "artifacts" / "report.html").mkdir()
    results = {"status": "FINISHED", "metrics": {}, "tags": {"winner": "1"}, "artifacts": {"a": "b"}, "plots": []}
    messages = [
        {"open": store_arguments(uri)},
        {"record": record(0).to_json()},
        {"close": results, "view": asdict(VIEW)},
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "sweeper.tracking.process", "1"],
        cwd=workspace.path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write("".join(json.dumps(message) + "\n" for message in messages))
    process.stdin.flush()
    answers = [json.loads(process.stdout.readline()) for _ in range(len(messages) + 2)]
    assert [answers.pop(2), answers.pop(2)] == [
        {"ranked": 0},
        {"ranked": 1},
    ]  # the driver waits while there is progress
    _, log = process.communicate(timeout=120)
    assert answers[1] == {"written": 0} and "view" in answers[2]["closed"] and process.returncode == 0
    assert "no report.html: IsADirectoryError" in log
    (parent,) = workspace.runs("sweep")
    assert parent.info.status == "FINISHED" and parent.data.tags["winner"] == "1"
    assert "report.html" not in parent.data.tags.get("mlflow.note.content", "")
