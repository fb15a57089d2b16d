"""MLflow going away, a locked store and a full disk: no result is lost, and nothing is written twice."""

import socket
import sqlite3
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from sweeper.tracking.process import describe_error
from tests.conftest import PROBE, Server, Workspace, wait_for


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
