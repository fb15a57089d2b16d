"""Sweeps that a budget or a signal ends."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import PROBE, Workspace, wait_for


@pytest.mark.soak
def test_a_sweep_ends_by_patience_or_time(workspace: Workspace) -> None:
    result = workspace.run(*PROBE, "search=random", "budget.trials=null", "budget.patience=5", "name=patient")
    assert result.code == 0
    scores = [trial.value for trial in workspace.trials()]
    assert 5 <= len(scores) - 1 - scores.index(max(scores)) <= 6  # and one that was in flight
    # The budget includes the start of the worker, which takes seconds on a busy machine.
    result = workspace.run(*PROBE, "budget.trials=null", "budget.time_s=12", "space.sleep_s=0.1", "name=timed")
    assert result.code == 0, result.err
    assert 5 <= result.err.count('"event": "trial"') <= 122


def list_trials(workspace: Workspace) -> list[object]:
    return workspace.trials() if list(workspace.path.glob("sweeps/*/study.journal")) else []


def in_flight(workspace: Workspace, at_least: int = 2) -> bool:
    folder = workspace.path / "sweeps"
    return any(path.read_text().count('"record"') >= at_least for path in folder.glob("*/study.journal"))


@pytest.mark.soak
def test_an_interrupt_while_results_are_recorded_leaves_the_table_at_once(workspace: Workspace) -> None:
    """A recording process that does not answer stands for a slow server; the same command writes the rest."""
    overrides = [*PROBE, "budget.trials=3", "name=closing"]
    process = workspace.start(*overrides)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def find_recording() -> int:
        commands = {int(number): Path(f"/proc/{number}/cmdline") for number in children.read_text().split()}
        return next((n for n, path in commands.items() if "sweeper.tracking.process" in path.read_text()), 0)

    recording = wait_for(find_recording)
    wait_for(lambda: list_trials(workspace))
    os.kill(recording, signal.SIGSTOP)
    try:
        wait_for(lambda: in_flight(workspace, 3))
        time.sleep(3)  # the workers end
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=10)
    finally:
        os.kill(recording, signal.SIGCONT)
    assert process.returncode == 130 and "3 complete" in out and "winner   trial " in out and "are not written" in out
    assert workspace.run(*overrides).code == 0 and workspace.states()["RUNNING"] == 0


def interrupt_twice(workspace: Workspace, *overrides: str) -> None:
    """Start a sweep and send it two signals while a trial runs."""
    process = workspace.start(*overrides)
    wait_for(lambda: in_flight(workspace))
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert process.returncode == 130 and "to resume" in err
    assert workspace.states()["RUNNING"] > 0


SLEEPING = (*PROBE, "space.sleep_s=0.7", "trial.grace_s=60")


@pytest.mark.long(30)
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_one_signal_lets_running_trials_finish_and_a_second_exits_at_once(workspace: Workspace, signum: int) -> None:
    """The second start runs the trials that the first did not finish."""
    overrides = [*SLEEPING, "budget.trials=50"]
    interrupt_twice(workspace, *overrides)
    left = workspace.states()

    process = workspace.start(*overrides)
    wait_for(lambda: in_flight(workspace, left["COMPLETE"] + left["RUNNING"]))
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "resume" in out and "budget.trials=50" in out
    states = workspace.states()
    assert set(states) == {"COMPLETE"} and left.total() <= states["COMPLETE"] < 50
    runs = workspace.runs("trial")
    assert {run.info.status for run in runs} == {"FINISHED"} and len(runs) == states["COMPLETE"]
    assert [run.info.status for run in workspace.runs("sweep")] == ["KILLED"]


@pytest.mark.soak
def test_a_sweep_that_two_signals_ended_is_completed_by_the_next_start(workspace: Workspace) -> None:
    interrupt_twice(workspace, *SLEEPING, "budget.trials=50")
    expected_trials = workspace.states()["COMPLETE"] + 3
    result = workspace.run(*SLEEPING, f"budget.trials={expected_trials}")
    assert result.code == 0, result.err
    assert workspace.states() == {"COMPLETE": expected_trials} and len(workspace.runs("trial")) == expected_trials
    assert {run.info.status for run in workspace.runs("trial")} == {"FINISHED"}
    assert [run.info.status for run in workspace.runs("sweep")] == ["FINISHED"]


@pytest.mark.soak
def test_trials_that_run_longer_than_the_grace_are_cancelled_and_repeated(workspace: Workspace) -> None:
    ledger = workspace.path / "ledger"
    overrides = [*PROBE, "budget.trials=2", "trial.grace_s=0.5", f"space.ledger={ledger}"]
    process = workspace.start(*overrides, "space.sleep_s=60", "name=one")
    wait_for(lambda: len(list_trials(workspace)) == 2)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert workspace.outcomes() == {"cancelled": 2}
    assert workspace.states() == {"FAIL": 2}
    cancelled = {tuple(trial.params.values()) for trial in workspace.trials()}
    process = workspace.start(*overrides, "space.sleep_s=60", "name=one")
    wait_for(lambda: len(list_trials(workspace)) == 4)
    process.kill()
    process.communicate()
    assert {tuple(trial.params.values()) for trial in workspace.trials()[2:]} == cancelled
