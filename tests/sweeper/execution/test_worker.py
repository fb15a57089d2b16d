"""A worker returns why a trial has no measurement, with what is kept of its program."""

import signal
from pathlib import Path

import pytest

from sweeper.execution.worker import Job, RankResult, Worker
from workloads.api.contract import Rank


def run(program: str) -> RankResult:
    return Worker().run(Job("command", {}, {}, Rank(), {"run": ["{python}", "-c", program]}))


def test_a_failed_program_has_its_reason_its_last_lines_and_its_files() -> None:
    result = run("print('a hint'); print('loss: nan', flush=True)")
    assert result.reason == "loss is nan at step 1" and result.measurement is None
    assert result.detail == "a hint\nloss: nan"
    assert set(result.files) == {"command.txt", "last_lines.txt", "log.txt"}


def test_a_program_that_ran_out_of_memory_keeps_its_last_lines() -> None:
    result = run("print('a hint'); print('CUDA out of memory', flush=True)")
    assert result.status == "infeasible" and not result.reusable and result.detail.startswith("a hint")


def test_an_error_of_this_project_has_its_traceback() -> None:
    result = Worker().run(Job("probe", {"behaviour": "raise"}, {}, Rank()))
    assert result.reason.startswith("RuntimeError: ") and "Traceback" in result.detail


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit(3), "the function called sys.exit(3)"),
        (SystemExit(), "the function called sys.exit()"),
        (KeyboardInterrupt(), "KeyboardInterrupt: no message"),
        (Mute(), "Mute: no message"),
    ],
    ids=["exit code", "exit", "interrupt", "mute"],
)
def test_whatever_ends_a_trial_is_its_reason(
    error: BaseException, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_: float) -> None:
        raise error

    monkeypatch.setattr("workloads.probe.time.sleep", end)
    assert Worker().run(Job("probe", {}, {}, Rank())).reason == reason


def test_a_worker_without_the_requested_variables_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    ledger = tmp_path / "ledger"
    requested = {"NCCL_ALGO": None, "NCCL_DEBUG": "WARN"}
    result = Worker().run(Job("probe", {"ledger": str(ledger)}, requested, Rank()))
    assert result.reason == (
        "ParameterMismatch: the worker's environment has NCCL_ALGO=Ring, requested no NCCL_ALGO; "
        "no NCCL_DEBUG, requested NCCL_DEBUG=WARN"
    )
    assert result.measurement is None and not ledger.exists()


def test_a_workload_that_changes_a_requested_variable_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setattr("workloads.probe.time.sleep", lambda _: monkeypatch.setenv("NCCL_ALGO", "Tree"))
    result = Worker().run(Job("probe", {}, {"NCCL_ALGO": "Ring"}, Rank()))
    assert result.reason.endswith("NCCL_ALGO=Tree, requested NCCL_ALGO=Ring")


def test_executed_variables_are_recorded_as_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    result = Worker().run(Job("probe", {"x": 1.0}, {"NCCL_ALGO": "Ring", "NCCL_DEBUG": None}, Rank()))
    assert result.measurement is not None
    executed = result.measurement.executed
    assert (executed["x"], executed["env.NCCL_ALGO"], executed["env.NCCL_DEBUG"]) == (1.0, "Ring", None)


def test_a_command_is_kept_with_its_trials_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    settings = {"run": ["{python}", "-c", "import os; print(os.environ['NCCL_ALGO'])"]}
    result = Worker().run(Job("command", {}, {"NCCL_ALGO": "Ring"}, Rank(), settings))
    assert result.detail.startswith("Ring") and b"NCCL_ALGO=Ring" in result.files["command.txt"]


def test_a_daemon_of_a_program_ends_with_its_trial() -> None:
    """It has another session and none of the program's variables."""
    result = run(
        "import os, time; os.system('setsid env -i sleep 600 &'); time.sleep(0.3); print('loss: nan', flush=True)"
    )
    assert result.left == ["sleep 600"]


def test_a_program_has_its_exit_code_where_ray_ignores_ended_children() -> None:
    """As Ray's workers do with RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run("print('loss: 1'); raise SystemExit(3)").reason == "the program ended with exit code 3: loss: 1"
    finally:
        signal.signal(signal.SIGCHLD, before)
