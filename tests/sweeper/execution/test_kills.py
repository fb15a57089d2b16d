"""Killing the driver at any point loses no finished trial and runs none twice."""

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.conftest import PROBE, Workspace, find_processes, wait_for


@pytest.mark.soak  # `test_faults.py` kills a driver too, among other faults
@pytest.mark.timeout(1800)
def test_a_sweep_killed_at_any_time_completes_every_trial_exactly_once(workspace: Workspace) -> None:
    trials, kills, longest_s = 100, 25, 9.0
    ledger = workspace.path / "ledger"
    arguments = [*PROBE, f"budget.trials={trials}", "space.sleep_s=0.7", f"space.ledger={ledger}", "search=random"]
    rng = random.Random(7)
    for _ in range(kills):
        process = workspace.start(*arguments, SWEEPER_TEST=workspace.path.name)
        with pytest.raises(subprocess.TimeoutExpired):  # the sweep has not ended
            process.wait(timeout=rng.uniform(0.2, longest_s))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    result = workspace.run(*arguments)
    assert result.code == 0, result.err

    assert workspace.states() == {"COMPLETE": trials}
    runs = workspace.runs("trial")
    assert Counter(run.info.status for run in runs) == {"FINISHED": trials}
    assert sorted(int(run.data.tags["sweeper.trial"]) for run in runs) == list(range(trials))
    assert [run.info.status for run in workspace.runs("sweep")] == ["FINISHED"]
    completions = Counter(ledger.read_text().splitlines())
    assert len(completions) == trials
    repeated = sum(count - 1 for count in completions.values())
    assert repeated <= 2 * kills  # at most the two that a worker holds, each time
    wait_for(lambda: not leftover_processes(workspace.path.name))


@pytest.mark.soak  # `test_new_store.py` kills the creation of the store alone
@pytest.mark.timeout(3600)
def test_a_first_run_whose_process_tree_is_killed_breaks_nothing(tmp_path: Path) -> None:
    """Each kill is in a new directory. The same command then completes: of every fifth directory, to save time."""
    rng, kills, longest_s = random.Random(11), 25, 12.0
    arguments = [*PROBE, "budget.trials=3", "search=random"]
    for kill in range(kills):
        workspace = Workspace(tmp_path / f"{kill}")
        workspace.path.mkdir()
        mark = f"{tmp_path.name}-{kill}"
        process = workspace.start(*arguments, SWEEPER_TEST=mark)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=rng.uniform(0.3, longest_s))
        kill_tree(process, mark)
        database = workspace.path / "mlflow.db"
        if database.exists():
            MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()  # raises for a part of a store
        if kill % 5 == 0:
            result = workspace.run(*arguments)
            assert result.code == 0, result.err
            assert workspace.states() == {"COMPLETE": 3}
            assert Counter(run.info.status for run in workspace.runs("trial")) == {"FINISHED": 3}
            assert not list(workspace.path.glob(".mlflow.db*"))


def kill_tree(process: subprocess.Popen[str], mark: str) -> None:
    """Kill every process that the command has started, until none is left."""
    while process.poll() is None or leftover_processes(mark):
        for pid in {process.pid, *find_processes("SWEEPER_TEST", mark)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.1)
    process.communicate()


def leftover_processes(mark: str) -> list[str]:
    """Return the command lines of processes of killed drivers, without the agents that Ray keeps for a minute."""
    commands = []
    for pid in find_processes("SWEEPER_TEST", mark):
        try:
            commands.append(Path(f"/proc/{pid}/cmdline").read_text())
        except OSError:
            continue
    return [command for command in commands if command and "Agent" not in command]


@pytest.mark.soak
def test_a_sigterm_to_the_whole_process_group_ends_the_sweep_in_order(workspace: Workspace) -> None:
    """`timeout` and batch systems send it to every process of the group, Ray's own included."""
    command = ["command.run='sleep 0.5; exit {code}'", "command.log={step_time_s: 'took ([0-9.]+)'}"]
    space = ["space.code=range(1,100)", "objective=step_time_ms", "budget.same_failures=null"]
    process = workspace.start("workload=command", *command, *space, "gpus=2", "progress=always")
    assert process.stderr is not None
    err = ""
    while "trial 1 failed" not in err:
        line = process.stderr.readline()
        assert line, err
        err += line
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert re.search(r": \d failed", out) and "resume   " in out
    assert [run.info.status for run in workspace.runs("sweep")] == ["KILLED"]
    assert not workspace.states()["RUNNING"]


def find_process(workspace: Workspace, name: str) -> int | None:
    """Return a process of the sweep with this name in its command line."""
    for pid in find_processes("SWEEPER_TEST", workspace.path.name):
        with suppress(OSError):
            if name in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    return None


@pytest.mark.soak
def test_a_sweep_survives_a_killed_recording_process(workspace: Workspace) -> None:
    process = workspace.start(*PROBE, "budget.trials=20", "space.sleep_s=0.3", SWEEPER_TEST=workspace.path.name)
    wait_for(lambda: list(workspace.path.glob("sweeps/*/study.journal")) and workspace.path.joinpath("mlruns").exists())
    os.kill(wait_for(lambda: find_process(workspace, "sweeper.tracking.process")), signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert Counter(run.info.status for run in workspace.runs("trial")) == {"FINISHED": 20}
    assert len({run.data.tags["sweeper.trial"] for run in workspace.runs("trial")}) == 20


@pytest.mark.soak
def test_a_killed_raylet_ends_the_sweep_and_the_same_command_resumes_it(workspace: Workspace) -> None:
    arguments = ["workload=probe", "budget.trials=20", "space.sleep_s=0.5", "search=random", "finals.top=0"]
    process = workspace.start(*arguments, SWEEPER_TEST=workspace.path.name)
    wait_for(lambda: list(workspace.path.glob("sweeps/*/study.journal")) and workspace.states()["COMPLETE"] > 2)
    os.kill(wait_for(lambda: find_process(workspace, "raylet/raylet")), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "is dead: its raylet ended" in out and "resume   python" in out, out
    assert set(workspace.states()) == {"COMPLETE", "FAIL"}
    result = workspace.run(*arguments)
    assert result.code == 0 and workspace.outcomes()["complete"] == 20, result.err


@pytest.mark.soak
def test_ray_that_does_not_start_in_time_is_started_once_more(workspace: Workspace) -> None:
    """Ray waits 30 s for a raylet, which a load average of 25 on two cores may take."""
    process = workspace.start(*PROBE, "budget.trials=2", SWEEPER_TEST=workspace.path.name)
    os.kill(wait_for(lambda: find_process(workspace, "raylet/raylet")), signal.SIGSTOP)
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0 and "Ray did not start in time (load average" in err, err
