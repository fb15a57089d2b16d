"""MLflow going away, refusing, or being half written: no result is lost, nothing is written twice."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.tracking.process import Store
from tests.conftest import PROBE, Place, Server, environment, wait_for


def record(number: int, ending: TrialStatus = TrialStatus.COMPLETE) -> TrialRecord:
    return TrialRecord(number, {"x": number}, ending, "", "", {"score": 1.5}, [], {"node": "n"}, 1e9, 1e9 + 1, 1.0)


PARENT = {"began": "now", "params": {"seed": 0}, "tags": {"workload": "probe"}, "artifacts": {"config.yaml": "a: 1"}}


@pytest.fixture
def uri(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_writing_again_changes_nothing(uri: str, place: Place) -> None:
    store = Store(uri, "e", "study", "sweep", PARENT)
    for _ in range(2):
        store.write(record(0))
    again = Store(uri, "e", "study", "sweep", PARENT)
    assert again.written() == [0] and again.parent_id == store.parent_id
    again.write(record(0))
    (run,) = place.runs("trial")
    assert run.data.metrics["score"] == 1.5 and run.info.status == "FINISHED"
    assert len(store._client.get_metric_history(run.info.run_id, "score")) == 1


def test_what_another_start_says_takes_the_place_of_nothing(uri: str, place: Place) -> None:
    """A sweep that is gone on with by other words: the first ones stay, and so does its configuration."""

    def start(began: str, command: str) -> None:
        tags, texts = {"command": command, "version.torch": "2.13"}, {"config.yaml": f"said: {command}"}
        Store(uri, "e", "study", "sweep", {"began": began, "params": {}, "tags": tags, "artifacts": texts})

    for began, command in (("1", "a"), ("1", "a"), ("2", "a"), ("3", "b"), ("3", "b"), ("4", "a")):
        start(began, command)
    (parent,) = place.runs("sweep")
    assert parent.data.tags["command"].splitlines() == ["a", "b"] and parent.data.tags["version.torch"] == "2.13"
    kept = Path(place.path / "mlruns" / parent.info.experiment_id / parent.info.run_id / "artifacts")
    texts = {str(path.relative_to(kept)): path.read_text() for path in kept.rglob("*.yaml")}
    assert texts == {"config.yaml": "said: a", "since 3/config.yaml": "said: b"}


def test_a_run_that_was_half_written_is_finished(uri: str, place: Place) -> None:
    store = Store(uri, "e", "study", "sweep", PARENT)
    store._client.create_run(
        store.experiment_id,
        run_name="0003",
        tags={"sweeper.study": "study", "sweeper.kind": "trial", "sweeper.trial": "3"},
    )
    again = Store(uri, "e", "study", "sweep", PARENT)
    assert again.written() == []
    again.write(record(3))
    (run,) = place.runs("trial")
    assert (run.info.status, run.data.tags["outcome"], run.data.metrics["score"]) == ("FINISHED", "complete", 1.5)


def test_of_two_runs_of_one_trial_one_stays(uri: str, place: Place) -> None:
    """A server that goes away after it made a run, and before it said so, is asked to make it again."""
    store = Store(uri, "e", "study", "sweep", PARENT)
    for _ in range(2):
        store.write(record(5))
        store._children.clear()
    assert len(place.runs("trial")) == 2
    store.look_again()
    assert len(place.runs("trial")) == 1 and store.written() == [5]


def test_a_metric_of_any_name_is_recorded(uri: str, place: Place) -> None:
    odd = TrialRecord(0, {}, TrialStatus.COMPLETE, "", "", {"rate (GB/s)": 2.0}, [], {}, 1e9, 1e9 + 1, 1.0)
    Store(uri, "e", "study", "sweep", PARENT).write(odd)
    assert place.runs("trial")[0].data.metrics["rate _GB/s_"] == 2.0


def test_sweeps_of_the_same_name_in_one_store_stay_apart(uri: str) -> None:
    one, other = Store(uri, "e", "study-1", "sweep", PARENT), Store(uri, "e", "study-2", "sweep", PARENT)
    one.write(record(0))
    assert Store(uri, "e", "study-2", "sweep", PARENT).written() == []
    assert one.parent_id != other.parent_id


def test_a_report_that_cannot_be_written_costs_nothing_else(uri: str, place: Place) -> None:
    """The recording process itself, told what a driver tells it; a folder lies where the report has to go."""
    store = Store(uri, "e", "study", "sweep", PARENT)
    (place.path / "mlruns" / store.experiment_id / store.parent_id / "artifacts" / "report.html").mkdir()
    opening = {"uri": uri, "experiment": "e", "study": "study", "sweep": "sweep", "parent": PARENT}
    closing = {"status": "FINISHED", "metrics": {}, "tags": {"winner": "1"}, "artifacts": {"a": "b"}, "pictures": []}
    messages = [{"open": opening}, {"record": record(0).to_json()}, {"close": closing}]
    process = subprocess.Popen(
        [sys.executable, "-m", "sweeper.tracking.process"],
        cwd=place.path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write("".join(json.dumps(message) + "\n" for message in messages))
    process.stdin.flush()
    answers = [json.loads(process.stdout.readline()) for _ in messages]
    _, log = process.communicate(timeout=60)
    assert answers[1:] == [{"written": 0}, {"closed": True}] and process.returncode == 0
    assert "no report.html: IsADirectoryError" in log
    (parent,) = place.runs("sweep")
    assert parent.info.status == "FINISHED" and parent.data.tags["winner"] == "1"
    assert "report.html" not in parent.data.tags.get("mlflow.note.content", "")


# ── a server ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.soak
def test_a_server_that_goes_away_for_a_while_costs_no_result(place: Place, server: Server) -> None:
    process = place.start(*PROBE, "budget.trials=40", "space.sleep_s=0.2", f"tracking.uri={server.uri}")
    wait_for(lambda: len(place.runs("trial", server.uri)) >= 3)
    server.kill()
    time.sleep(5)
    server.start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    runs = place.runs("trial", server.uri)
    assert Counter(run.info.status for run in runs) == {"FINISHED": 40}
    assert len({run.data.tags["sweeper.trial"] for run in runs}) == 40
    assert f"{server.uri}/#/experiments/" in out


@pytest.mark.soak
def test_a_server_that_stays_away_is_caught_up_with_on_the_next_start(place: Place, server: Server) -> None:
    words = [*PROBE, "budget.trials=10", "space.sleep_s=0.3", f"tracking.uri={server.uri}"]
    process = place.start(*words)
    wait_for(lambda: len(place.runs("trial", server.uri)) >= 2)
    server.kill()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "results are not in it" in out and "the same command writes them" in out
    assert place.states() == {"COMPLETE": 10}
    server.start()
    done = place.run(*words)
    assert done.code == 0, done.err
    assert place.states() == {"COMPLETE": 10}
    assert Counter(run.info.status for run in place.runs("trial", server.uri)) == {"FINISHED": 10}
    assert [run.info.status for run in place.runs("sweep", server.uri)] == ["FINISHED"]


def test_a_trial_that_told_steps_and_was_given_up_ends_with_the_sweep(uri: str, place: Place) -> None:
    store = Store(uri, "e", "study", "sweep", PARENT)
    for number in (3, 4):
        store.write_step(number, f"{number}", 1, 1.0, {"score": 1.0})
    store.close("FINISHED", {}, {}, {}, [], abandoned=[3, 7])
    runs = {run.data.tags["sweeper.trial"]: run for run in place.runs("trial")}
    assert (runs["3"].info.status, runs["3"].data.tags["outcome"]) == ("KILLED", "cancelled")
    assert runs["4"].info.status == "RUNNING"


# ── the disk ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.soak
def test_a_locked_store_is_waited_for(place: Place) -> None:
    assert place.run(*PROBE, "budget.trials=1").code == 0
    holder = sqlite3.connect(place.path / "mlflow.db", isolation_level=None)
    holder.execute("begin exclusive")
    process = place.start("workload=probe", "progress=auto", "budget.trials=5", "seed=3")
    wait_for(lambda: len(place.sweeps) == 2)
    time.sleep(8)
    holder.execute("commit")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(place.runs("trial")) == 6


@pytest.mark.soak
def test_a_full_disk_is_said_once_and_corrupts_nothing(place: Place) -> None:
    """A file system of 400 KiB for the study alone: the sweep runs until it is full."""
    small = place.path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    words = [*PROBE, f"dir={small}", f"tracking.uri=sqlite:///{place.path}/mlflow.db", "search=random", "name=full"]
    try:
        done = place.run(*words, "budget.trials=2000")
        assert done.code == 1
        assert "No space left on device" in done.err and "Traceback" not in done.err
        assert "what had finished is kept; to resume:" in done.err
        kept = Place(small).states()["COMPLETE"]
        assert kept > 20
        done = place.run(*words, "budget.trials=2000")  # nothing has been done about it
        assert done.code == 1 and "No space left on device" in done.err and "Traceback" not in done.err
        subprocess.run(["mount", "-o", "remount,size=20m", str(small)], check=True)
        done = place.run(*words, f"budget.trials={kept + 30}")
        assert done.code == 0, done.err
        runs = place.runs("trial")
        assert Counter(run.info.status for run in runs) == {"FINISHED": kept + 30}
        assert len({run.data.tags["sweeper.trial"] for run in runs}) == kept + 30
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
