"""Histories of reference figures, and `python -m sweeper history` run in this process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sweeper.commands.history.main import main
from sweeper.commands.history.new_runs import NewRun
from sweeper.commands.history.reference_file import History, Identity, RecordedRun
from tests.conftest import CommandResult, run_in_process

IDENTITY = Identity(
    metric="tflops",
    unit="TFLOP/s",
    direction="maximize",
    work={"workload": "matmul", "type": "bf16"},
    device="NVIDIA H200",
    devices=1,
    basis="finals",
)


def recorded_run(number: int, value: float, torch: str = "2.11.0", driver: str = "570.124") -> RecordedRun:
    """Return a run of one day, with an interval of 0.2% to each side."""
    date = f"2026-{1 + number // 28:02d}-{1 + number % 28:02d}T03:00:00Z"
    versions = {"driver": driver, "torch": torch}
    return RecordedRun(f"night-{number}", date, value, 0.998 * value, 1.002 * value, {"m": "4096"}, versions)


def build_history(values: Sequence[float], identity: Identity = IDENTITY) -> History:
    """Return a history of one series with these values; its third run has another torch."""
    history = History()
    for number, value in enumerate(values):
        history = history.append(identity, recorded_run(number, value, torch="2.11.0" if number < 2 else "2.12.0"))
    return history


def new_run(value: float, number: int = 100, **changes: object) -> NewRun:
    """Return a run of the same work, or with `changes` to its identity."""
    return NewRun(replace(IDENTITY, **changes), recorded_run(number, value))


def run_track(folder: Path, *arguments: str) -> CommandResult:
    return run_in_process(main, folder, *arguments)
