"""Factories of trial records and stored trials, and a helper that runs the report."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sweeper.commands.report.main import main
from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.results.description import SweepDescription
from tests.conftest import CommandResult, run_in_process


def trial_record(number: int = 0, params: Mapping[str, Any] | None = None, **changes: Any) -> TrialRecord:
    """A complete trial of one second, with `changes` to any of its fields."""
    fields: dict[str, Any] = {
        "number": number,
        "params": {"x": number} if params is None else dict(params),
        "status": TrialStatus.COMPLETE,
        "reason": "",
        "detail": "",
        "metrics": {},
        "measurements": [],
        "where": {},
        "started_at_s": 0.0,
        "ended_at_s": 1.0,
        "elapsed_s": 1.0,
    }
    return TrialRecord(**{**fields, **changes})


def finals_record(
    number: int, rate: float, remeasurement: Remeasurement | None = None, status: TrialStatus = TrialStatus.COMPLETE
) -> TrialRecord:
    """A trial with the metric `rate`, of the search or of the finals."""
    metrics = {"rate": rate} if status is TrialStatus.COMPLETE else {}
    return trial_record(number, status=status, metrics=metrics, remeasurement=remeasurement)


def complete_trials(
    speeds: Mapping[str, Sequence[float]], *, devices: int = 1, **params: Sequence[object]
) -> pd.DataFrame:
    """Complete trials of training, by the device's name: what the store would say of them."""
    rows = []
    for device, values in speeds.items():
        for n, value in enumerate(values):
            work = {"workload": "parallel", "type": "bf16"}
            work |= {name: str(params[name][n]) for name in ("model", "sequence_length", "statistic") if name in params}
            row = {"tag.outcome": "complete", "tag.device": device, "tag.work": json.dumps(work)}
            row |= {"param.sweep.gpus": str(devices), "metric.tokens_per_s": value, "metric.tflops": value / 20}
            row |= {"metric.mfu": value / 2e4 / devices, "metric.tokens_per_s_ci_low": 0.9 * value}
            row |= {"metric.tokens_per_s_ci_high": 1.1 * value, "metric.step_time_ms": 1e6 / value}
            rows.append(row | {f"param.{name}": str(own[n]) for name, own in params.items()})
    return pd.DataFrame(rows)


def run_report(folder: Path, *arguments: str) -> CommandResult:
    """`python -m sweeper report` in `folder`."""
    return run_in_process(main, folder, *arguments)


def sweep_description(arguments: Sequence[str], workload: str = "probe", **changes: Any) -> SweepDescription:
    """A sweep of one CPU that these words started, with `changes` to any of its fields."""
    section = {"name": workload, "objective": "score", "direction": "maximize"}
    trial = {"timeout_s": 300.0, "retries": 2, "grace_s": 10.0}
    config = {"workload": section, "seed": 0, "trial": trial, "finals": {"top": 3, "rounds": 5}, "exclusive": None}
    fields: dict[str, Any] = {
        "name": "probe-cpu",
        "study": "0" * 32,
        "arguments": list(arguments),
        "python": sys.executable,
        "host": "here",
        "config": config,
        "settings": None,
        "constants": {"seed": 0},
        "space": {},
        "hardware": "cpu",
        "device": "a CPU",
        "gpus": 1,
        "ranks_per_node": 1,
        "nodes": 1,
        "tracking_uri": "",
        "software": {"torch": "2.13.0"},
        "git": {},
    }
    return SweepDescription(**{**fields, **changes})
