"""The report as numbers, for programs: units are in the names, and nothing is rounded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sweeper.common.errors import UserInputError
from sweeper.report.best import WORK, BestResult, varying
from sweeper.report.store import Stored
from sweeper.report.summary import MEMORY, PEAKS, Table

SHARES = ("tflops", "mfu", "hfu", "mamf_utilization", "bandwidth_utilization")


def best_results(stored: Stored) -> list[dict[str, Any]]:
    """A row for each: its work, the figure that it is judged by with its 95% interval, and the parameters that varied.

    Shares are fractions; rounds: of the finals that the figures are the mean of, 0 where they are of one trial.
    """
    return [_row(peak, stored.trials) for peak in stored.best_results]


def _row(peak: BestResult, trials: pd.DataFrame) -> dict[str, Any]:
    memory = next((value for name in MEMORY if not math.isnan(value := peak.metric(name))), math.nan)
    row = {
        **{name.replace(" ", "_"): peak.work.get(name) for name in WORK},
        "device": peak.device,
        "devices": peak.devices,
        "metric": peak.speed,
        "value": peak.figure.value,
        "ci_low": peak.figure.low,
        "ci_high": peak.figure.high,
        **{name: peak.metric(name) for name in SHARES},
        "memory_gib": memory,
        "rounds": peak.rounds,
        "steps": peak.metric("steps"),
        "trials": len(peak.trials),
        "sweep": peak.trial.get("tag.sweep"),
        "trial": peak.trial.get("tag.sweeper.trial"),
    }
    own = varying(trials[trials["tag.sweeper.study"] == peak.trial["tag.sweeper.study"]])
    row |= {f"param.{name}": peak.trial.get(f"param.{name}") for name in own}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def csv(stored: Stored) -> str:
    """The peaks alone: one table is one file. Raises UserInputError where there is none."""
    rows = best_results(stored)
    if not rows:
        raise UserInputError("--format csv: there is no complete trial")
    return pd.DataFrame(rows).dropna(axis="columns", how="all").to_csv(index=False).rstrip()


def json_of(stored: Stored, tables: Sequence[Table]) -> str:
    """The tables by title, the peaks as numbers."""
    found = {t.title: [dict(zip(t.heading, row, strict=True)) for row in t.rows] for t in tables}
    return json.dumps(found | {PEAKS: best_results(stored)}, indent=1, ensure_ascii=False)
