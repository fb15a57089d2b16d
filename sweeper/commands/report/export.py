"""Export the report for programs, as CSV and JSON: units are in the names, and nothing is rounded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sweeper.commands.report.report_tables import BEST_RESULTS
from sweeper.common.text import spreadsheet_cell
from sweeper.metrics.derivation import MEMORY_METRICS
from sweeper.pages.html_page import Table
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import MAIN_WORK_NAMES, BestResult
from workloads.api.errors import UserInputError

RATES_AND_SHARES = ("tflops", "mfu", "hfu", "mamf_utilization", "bandwidth_utilization")


def list_best_results(stored: Stored) -> list[dict[str, Any]]:
    """Return a row for each best result: its work, its speed with the 95% interval, and its parameters.

    Shares are fractions. `rounds` are those of the finals that the values are the mean of, 0 if of a single trial.
    """
    return [_make_row(result) for result in stored.best_results]


def _make_row(result: BestResult) -> dict[str, Any]:
    row = {
        **{name: result.work.get(name) for name in MAIN_WORK_NAMES},
        **{f"work.{name}": value for name, value in result.work.items() if name not in MAIN_WORK_NAMES},
        "device": result.device,
        "devices": result.devices,
        "metric": result.speed_metric,
        "value": result.speed.value,
        "ci_low": result.speed.low,
        "ci_high": result.speed.high,
        **{name: result.get_metric(name) for name in RATES_AND_SHARES},
        "memory_gib": result.get_first_metric(MEMORY_METRICS),
        "rounds": result.rounds,
        "steps": result.get_metric("steps"),
        "trials": len(result.trials),
        "sweep": result.trial.get("tag.sweep"),
        "trial": result.trial.get("tag.sweeper.trial"),
    }
    params = [str(name) for name in result.trial.index if str(name).startswith("param.")]
    row |= {name: value for name in params if isinstance(value := result.trial[name], str)}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def build_csv(stored: Stored) -> str:
    """Return the best results as CSV, without the other tables: one file is one table.

    Raises:
        UserInputError: there is no complete trial.
    """
    rows = list_best_results(stored)
    if not rows:
        raise UserInputError("--format csv: there is no complete trial")
    table = pd.DataFrame(rows).dropna(axis="columns", how="all").map(spreadsheet_cell)
    return table.rename(columns=spreadsheet_cell).to_csv(index=False).rstrip()


def build_json(stored: Stored, tables: Sequence[Table]) -> str:
    """Return the tables by title as JSON, the best results with their unrounded numbers."""
    content = {table.title: [dict(zip(table.heading, row, strict=True)) for row in table.rows] for table in tables}
    return json.dumps(content | {BEST_RESULTS: list_best_results(stored)}, indent=1, ensure_ascii=False)
