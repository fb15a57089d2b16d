"""A worker returns why a trial has no measurement, with what is kept of its program."""

from __future__ import annotations

from sweeper.execution.worker import Job, RankResult, Worker
from workloads.api.contract import Rank


def run(program: str) -> RankResult:
    return Worker().run(Job("command", {}, Rank(), {"run": ["{python}", "-c", program]}))


def test_a_failed_program_has_its_reason_its_last_lines_and_its_files() -> None:
    result = run("print('a hint'); print('loss: nan', flush=True)")
    assert result.reason == "loss is nan at step 1" and result.measurement is None
    assert result.detail == "a hint\nloss: nan"
    assert set(result.files) == {"command.txt", "last_lines.txt", "log.txt"}


def test_a_program_that_ran_out_of_memory_keeps_its_last_lines() -> None:
    result = run("print('a hint'); print('CUDA out of memory', flush=True)")
    assert result.infeasible and not result.reusable and result.detail.startswith("a hint")


def test_an_error_of_this_project_has_its_traceback() -> None:
    result = Worker().run(Job("probe", {"behaviour": "raise"}, Rank()))
    assert result.reason.startswith("RuntimeError: ") and "Traceback" in result.detail
