"""MLflow going away, refusing, or being half written: no result is lost, and nothing is written twice."""

import json
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from sweeper.common.trials import Retry, TrialRecord, TrialStatus
from sweeper.results.mlflow_results import SqliteReader
from sweeper.tracking import provenance
from sweeper.tracking.client import TrackingClient
from sweeper.tracking.mlflow_store import REFUSED, RETRIED_AS, TRIAL_NUMBER, WRITTEN, default_uri
from sweeper.tracking.mlflow_view import TAG_PREFIX, RankedTrial, SweepView
from sweeper.tracking.process import describe_error
from sweeper.tracking.provenance import compute_digest
from sweeper.tracking.store import Store
from tests.conftest import PROBE, Server, Workspace, environment, wait_for
from tests.support.factories import trial_record

PARENT = {
    "started_at": "now",
    "params": {"seed": 0},
    "tags": {"workload": "probe"},
    "artifacts": {"config.yaml": "a: 1"},
}
VIEW = SweepView("score", ["score"], ["x"], [RankedTrial(0, {}, "1 to 2")])


def record(number: int) -> TrialRecord:
    return trial_record(
        number, metrics={"score": 1.5}, where={"node": "n"}, started_at_s=1e9, ended_at_s=1e9 + 1, elapsed_s=1.0
    )


@pytest.fixture
def uri(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


def open_store(uri: str, **changes: Any) -> Store:
    return Store(**{**store_arguments(uri), **changes})


def store_arguments(uri: str) -> dict[str, Any]:
    return {"uri": uri, "experiment": "e", "study_id": "study", "sweep": "sweep", "parent": PARENT}


# ── the store ───────────────────────────────────────────────────────────────────────────────────────────────


def test_writing_a_trial_twice_changes_nothing(uri: str, workspace: Workspace) -> None:
    store = open_store(uri)
    for _ in range(2):
        store.write_trial(record(0))
    reopened = open_store(uri)
    assert reopened.children.written_trials == [0] and reopened.parent_id == store.parent_id
    reopened.write_trial(record(0))
    (run,) = workspace.runs("trial")
    assert run.data.metrics["score"] == 1.5 and run.info.status == "FINISHED"
    assert len(store._client.get_metric_history(run.info.run_id, "score")) == 1


def test_the_front_is_a_tag_and_a_metric_by_which_runs_are_filtered(uri: str, workspace: Workspace) -> None:
    store = open_store(uri)
    for number in range(3):
        store.write_trial(record(number))
    for front in ([0, 1], [1, 2]):  # trial 2 dominates trial 0
        store.write_front(front)
        runs = {int(run.data.tags["sweeper.trial"]): run.data for run in workspace.runs("trial")}
        assert [number for number, data in sorted(runs.items()) if data.tags.get("front") == "yes"] == front
    assert {number: data.metrics.get("front") for number, data in runs.items()} == {0: 0.0, 1: 1.0, 2: 1.0}
    found = store._client.search_runs([store.experiment_id], "metrics.front = 1", order_by=["metrics.front DESC"])
    assert len(found) == 2


def test_resuming_with_other_settings_adds_them_and_replaces_nothing(uri: str, workspace: Workspace) -> None:
    """When another command resumes a sweep, the first configuration stays and the other is added."""

    def resume(started_at: str, command: str) -> None:
        tags, texts = {"command": command, "version.torch": "2.13"}, {"config.yaml": f"command: {command}"}
        open_store(uri, parent={"started_at": started_at, "params": {}, "tags": tags, "artifacts": texts})

    for started_at, command in (("1", "a"), ("1", "a"), ("2", "a"), ("3", "b"), ("3", "b"), ("4", "a")):
        resume(started_at, command)
    (parent,) = workspace.runs("sweep")
    assert parent.data.tags["command"].splitlines() == ["a", "b"] and parent.data.tags["version.torch"] == "2.13"
    artifacts = Path(workspace.path / "mlruns" / parent.info.experiment_id / parent.info.run_id / "artifacts")
    texts = {str(path.relative_to(artifacts)): path.read_text() for path in artifacts.rglob("*.yaml")}
    assert texts == {"config.yaml": "command: a", "since 3/config.yaml": "command: b"}


def test_a_half_written_run_is_completed(uri: str, workspace: Workspace) -> None:
    store = open_store(uri)
    store._client.create_run(
        store.experiment_id,
        run_name="0003",
        tags={"sweeper.study": "study", "sweeper.kind": "trial", "sweeper.trial": "3"},
    )
    reopened = open_store(uri)
    assert reopened.children.written_trials == []
    reopened.write_trial(record(3))
    (run,) = workspace.runs("trial")
    assert (run.info.status, run.data.tags["outcome"], run.data.metrics["score"]) == ("FINISHED", "complete", 1.5)


def test_of_two_runs_of_one_trial_one_is_deleted(uri: str, workspace: Workspace) -> None:
    """A server that goes away after it created a run, and before it answered, is asked to create it again."""
    store = open_store(uri)
    for _ in range(2):
        store.write_trial(record(5))
        store.children._runs.clear()
    assert len(workspace.runs("trial")) == 2
    store.children.doubt(5)
    store.write_trial(record(5))
    assert len(workspace.runs("trial")) == 1 and store.children.written_trials == [5]


def count_searches(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the filters of the searches that follow, a list that grows."""
    filters: list[str] = []
    search = store._client.search_runs

    def counted(experiments: Any, condition: str, **options: Any) -> Any:
        filters.append(condition)
        return search(experiments, condition, **options)

    monkeypatch.setattr(store._client, "search_runs", counted)
    return filters


def test_a_finished_sweep_is_opened_without_a_listing_and_stays_finished(
    uri: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = {**PARENT, "trials": 3}
    store = open_store(uri)
    for number in range(3):
        store.write_trial(record(number))
    store.close("FINISHED", {}, {}, {}, [], written=3)
    pages = list[int]()
    reopened = open_store(uri, parent=parent, on_page=pages.append)
    assert (reopened.written_before, reopened.children.written_trials, pages) == (3, [], [])
    (run,) = workspace.runs("sweep")
    assert run.info.status == "FINISHED"
    filters = count_searches(reopened, monkeypatch)
    reopened.write_trial(record(1))  # one of the three: looked up by its number, not listed
    reopened.write_trial(record(3))  # a new one: nothing to look up
    assert len(filters) == 1 and filters[0].startswith("tags.`sweeper.trial` = '1'")
    assert len(workspace.runs("trial")) == 4 and workspace.runs("sweep")[0].info.status == "RUNNING"


@pytest.mark.parametrize("written", [None, 2])
def test_a_sweep_that_was_not_closed_with_all_of_its_trials_is_listed(uri: str, written: int | None) -> None:
    store = open_store(uri)
    for number in range(3):
        store.write_trial(record(number))
    store.close("KILLED", {}, {}, {}, [], written=written)
    reopened = open_store(uri, parent={**PARENT, "trials": 3})
    assert sorted(reopened.children.written_trials) == [0, 1, 2]


def test_results_are_complete_once_the_report_is_there(uri: str) -> None:
    store = open_store(uri)
    store.close("FINISHED", {}, {}, {}, [], digest="first")
    assert open_store(uri).stored_results == {}
    store.finish_results("first", "a-key")
    reopened = open_store(uri)
    assert reopened.stored_results == {"digest": "first", "view": "a-key"}
    reopened.close("FINISHED", {}, {}, {}, [], digest="second")
    store.finish_results("first", "a-key")  # the report of the run before ends after another run has closed
    assert open_store(uri).stored_results == {}
    reopened.finish_results("second", "")
    assert open_store(uri).stored_results == {"digest": "second", "view": ""}
    reopened.write_trial(record(0))  # the sweep goes on
    assert open_store(uri).stored_results == {}


def test_an_error_costs_one_lookup(uri: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server executed the call that creates the run and went away before it answered."""
    store = open_store(uri)
    create_run = store._client.create_run
    filters = count_searches(store, monkeypatch)

    def created_without_an_answer(*arguments: Any, **options: Any) -> None:
        create_run(*arguments, **options)
        raise MlflowException("connection reset")

    monkeypatch.setattr(store._client, "create_run", created_without_an_answer)
    with pytest.raises(MlflowException):
        store.write_trial(record(7))
    store.children.doubt(7)
    store.write_trial(record(7))
    assert len(workspace.runs("trial")) == 1 and len(filters) == 1


def test_names_and_texts_that_mlflow_does_not_allow_are_replaced(uri: str, workspace: Workspace) -> None:
    names = ["rate (GB/s)", "rate [GB/s]", "train//loss", "/a", "a/", "", "../up", "n" * 300, "n" * 301]
    metrics = {name: float(place) for place, name in enumerate(names, start=2)}
    many = {f"m{place}": 0.5 for place in range(1500)}
    open_store(uri).write_trial(trial_record(0, {"text": "a\udc80"}, metrics={**metrics, **many}, reason="b\0"))
    (run,) = workspace.runs("trial")
    by_value = {value: name for name, value in run.data.metrics.items()}
    legal = [by_value[value] for value in metrics.values()]
    assert legal[:7] == ["rate _GB/s_", "rate _GB/s__1", "train/_/loss", "_/a", "a/_", "_", "_/up"]
    assert {len(name) for name in legal[7:]} == {250} and legal[7] != legal[8]
    assert (run.data.params["text"], run.data.tags["reason"]) == ("a?", "b\ufffd")
    assert run.data.metrics.items() >= many.items()


def test_sweeps_of_the_same_name_in_one_store_are_kept_apart(uri: str) -> None:
    first, second = open_store(uri, study_id="study-1"), open_store(uri, study_id="study-2")
    first.write_trial(record(0))
    assert open_store(uri, study_id="study-2").children.written_trials == []
    assert first.parent_id != second.parent_id


def test_a_store_and_its_artifacts_stay_in_a_directory_of_any_name_and_move_with_it(
    tmp_path: Path, empty_store: Path
) -> None:
    def write(directory: Path, number: int) -> None:
        # MLflow remembers within a process where a run's artifacts are, here those of the parent run.
        store = open_store(default_uri(directory), parent={**PARENT, "artifacts": {}})
        store.write_trial(record(number))
        runs = SqliteReader(directory / "mlflow.db").read_runs([store.experiment_id], {TRIAL_NUMBER: str(number)})
        assert [run.info.status for run in runs] == ["FINISHED"]
        assert len(list(directory.glob("mlruns/1/*/artifacts/trial.json"))) == number + 1

    first, second = tmp_path / "run%41 ?x=1#é", tmp_path / "moved"
    for folder in (first, tmp_path / "runA ?x=1#é"):  # the first one decoded
        folder.mkdir()
        shutil.copy(empty_store, folder)
    write(first, 0)
    first.rename(second)
    write(second, 1)
    copy = shutil.copytree(second, tmp_path / "copy")
    write(copy, 2)
    assert len(list(second.glob("mlruns/1/*/artifacts/trial.json"))) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"runA ?x=1#é", "moved", "copy"}
    assert (tmp_path / "runA ?x=1#é" / "mlflow.db").read_bytes() == empty_store.read_bytes()


def test_an_abandoned_trial_that_reported_steps_ends_as_cancelled(uri: str, workspace: Workspace) -> None:
    store = open_store(uri)
    for number in (3, 4):
        store.write_step(number, f"{number}", 1, 1.0, {"score": 1.0})
    store.close("FINISHED", {}, {}, {}, [], abandoned=[3, 7])
    runs = {run.data.tags["sweeper.trial"]: run for run in workspace.runs("trial")}
    assert (runs["3"].info.status, runs["3"].data.tags["outcome"]) == ("KILLED", "cancelled")
    assert runs["4"].info.status == "RUNNING"


# ── the recording process ───────────────────────────────────────────────────────────────────────────────────


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


# ── a server ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_does_not_answer_is_named_in_a_line_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(MlflowException) as caught:
        MlflowClient(tracking_uri=f"http://me:a-password@{address}").get_experiment_by_name("e")
    assert describe_error(caught.value) == f"http://me:***@{address} does not respond: Connection refused"


@pytest.mark.soak
def test_an_interruption_of_the_server_loses_no_result(workspace: Workspace, server: Server) -> None:
    process = workspace.start(*PROBE, "budget.trials=40", "space.sleep_s=0.2", f"tracking.uri={server.uri}")
    wait_for(lambda: len(workspace.runs("trial", server.uri)) >= 3)
    server.kill()
    time.sleep(5)
    server.start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    runs = workspace.runs("trial", server.uri)
    assert Counter(run.info.status for run in runs) == {"FINISHED": 40}
    assert len({run.data.tags["sweeper.trial"] for run in runs}) == 40
    assert f"{server.uri}/#/experiments/" in out


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_server_that_is_away_for_40_s_after_the_last_trial_gets_all_results(
    workspace: Workspace, server: Server
) -> None:
    arguments = [*PROBE, "budget.trials=10", "space.sleep_s=0.3", f"tracking.uri={server.uri}", "progress=auto"]
    process = workspace.start(*arguments)
    wait_for(lambda: len(workspace.runs("trial", server.uri)) >= 2)
    server.kill()
    wait_for(lambda: workspace.states() == {"COMPLETE": 10})
    time.sleep(40)
    server.start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert "not written to MLflow yet" in err and "trying for up to 120 s" in err
    statuses = Counter(run.info.status for kind in ("trial", "sweep") for run in workspace.runs(kind, server.uri))
    assert statuses == {"FINISHED": 11}


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_results_that_a_server_missed_are_written_by_the_next_run(workspace: Workspace, server: Server) -> None:
    arguments = [*PROBE, "budget.trials=10", "space.sleep_s=0.3", f"tracking.uri={server.uri}"]
    process = workspace.start(*arguments)
    wait_for(lambda: len(workspace.runs("trial", server.uri)) >= 2)
    server.kill()
    out, _ = process.communicate(timeout=300)  # it waits for the server for 120 s
    assert process.returncode == 1
    assert "results are not written" in out and "the same command writes them" in out
    assert workspace.states() == {"COMPLETE": 10}
    server.start()
    resumed = workspace.run(*arguments)
    assert resumed.code == 0, resumed.err
    assert workspace.states() == {"COMPLETE": 10}
    assert Counter(run.info.status for run in workspace.runs("trial", server.uri)) == {"FINISHED": 10}
    assert [run.info.status for run in workspace.runs("sweep", server.uri)] == ["FINISHED"]


# ── the disk ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.soak
def test_a_locked_store_is_waited_for(workspace: Workspace) -> None:
    assert workspace.run(*PROBE, "budget.trials=1").code == 0
    holder = sqlite3.connect(workspace.path / "mlflow.db", isolation_level=None)
    holder.execute("begin exclusive")
    process = workspace.start("workload=probe", "progress=auto", "budget.trials=5", "seed=3")
    wait_for(lambda: len(workspace.sweeps) == 2)
    time.sleep(8)
    holder.execute("commit")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(workspace.runs("trial")) == 6


@pytest.mark.soak
def test_a_full_disk_is_reported_once_and_corrupts_nothing(workspace: Workspace) -> None:
    """A file system of 400 KiB for the study alone: the sweep runs until it is full."""
    small = workspace.path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    store = f"tracking.uri=sqlite:///{workspace.path}/mlflow.db"
    arguments = [*PROBE, f"dir={small}", store, "search=random", "name=full"]
    try:
        stopped = workspace.run(*arguments, "budget.trials=2000")
        assert stopped.code == 1
        assert "No space left on device" in stopped.err and "Traceback" not in stopped.err
        assert "finished trials are kept; to resume:" in stopped.err
        finished = Workspace(small).states()["COMPLETE"]
        assert finished > 20
        stopped = workspace.run(*arguments, "budget.trials=2000")  # the disk is still full
        assert stopped.code == 1 and "No space left on device" in stopped.err and "Traceback" not in stopped.err
        subprocess.run(["mount", "-o", "remount,size=20m", str(small)], check=True)
        resumed = workspace.run(*arguments, f"budget.trials={finished + 30}")
        assert resumed.code == 0, resumed.err
        runs = workspace.runs("trial")
        assert Counter(run.info.status for run in runs) == {"FINISHED": finished + 30}
        assert len({run.data.tags["sweeper.trial"] for run in runs}) == finished + 30
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.soak
def test_the_command_that_met_a_full_disk_completes_when_there_is_space(tmp_path: Path) -> None:
    """A first run on a file system of 300 KiB, a third of what MLflow's tables take."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    workspace, arguments = Workspace(tmp_path), [*PROBE, f"dir={small}", "budget.trials=3", "finals.top=0"]
    try:
        full = workspace.run(*arguments)
        (line,) = [line for line in full.out.splitlines() if line.startswith("MLflow   ")]
        assert full.code == 1 and "3 of 3 results are not written (database or disk is full: " in line
        assert "Traceback" not in full.err and not (small / "mlflow.db").exists()
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        repaired = workspace.run(*arguments)
        assert repaired.code == 0, repaired.err
        assert Counter(run.info.status for run in Workspace(small).runs("trial")) == {"FINISHED": 3}
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_the_digest_follows_the_results_and_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables.py").write_text("WIDTH = 80")
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    first = compute_digest({"metrics": {"best": 1.5, "gap": math.nan}, "written": 3})
    assert compute_digest({"written": 3, "metrics": {"gap": math.nan, "best": 1.5}}) == first
    assert compute_digest({"metrics": {"best": 1.5, "gap": math.nan}, "written": 4}) != first
    (tmp_path / "tables.py").write_text("WIDTH = 90")
    assert compute_digest({"metrics": {"best": 1.5, "gap": math.nan}, "written": 3}) != first
