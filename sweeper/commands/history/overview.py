"""The figures of a history as tables: the present level of each series, and the runs of one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from sweeper.commands.history.comparison import describe_changes
from sweeper.commands.history.output import compute_level, describe_hardware, label_series
from sweeper.commands.history.reference_file import History, RecordedRun, Series
from sweeper.common.format import format_interval, format_number
from sweeper.pages.html_page import Table

MIN_COLUMNS = 4  # work, device, level and unit are shown in any terminal


def build_table(history: History) -> Table:
    """Return a row for each series: its present level, of how many runs, and what they differ by."""
    heading = ["work", "device", "level", "unit", "runs", "spread %", "last run", "date"]
    labels = label_series([series.identity for series in history.series])
    rows = [_build_row(series, label) for series, label in zip(history.series, labels, strict=True)]
    return Table("Present levels", heading, rows)


def _build_row(series: Series, label: str) -> list[str]:
    level, last = series.level, series.runs[-1]
    mean, unit = format_number(compute_level(level)), series.identity.unit
    spread = _measure_spread(level)
    return [label, describe_hardware(series.identity), mean, unit, str(len(level)), spread, last.sweep, last.date[:10]]


def _measure_spread(runs: Sequence[RecordedRun]) -> str:
    """Return the standard deviation of runs in percent, their own errors included; "—" of one run."""
    if len(runs) < 2:
        return "—"
    return f"{100 * statistics.stdev(math.log(run.value) for run in runs):.2f}"


def build_runs_table(series: Series, title: str) -> Table:
    """Return a row for each run of a series, the last one first, with the versions that changed before it."""
    heading = ["sweep", "date", series.identity.unit, "95%", "point", "changed", "commit"]
    changes = [[], *(describe_changes(before, after) for before, after in pairwise(series.runs))]
    rows = [_build_run(run, changed) for run, changed in zip(series.runs, changes, strict=True)]
    return Table(title, heading, rows[::-1])


def _build_run(run: RecordedRun, changed: Sequence[str]) -> list[str]:
    texts = [*changed, *(["a new level"] if run.starts_level else [])]
    interval = format_interval(run.low or math.nan, run.high or math.nan)
    point = " ".join(f"{name}={value}" for name, value in run.point.items())
    return [run.sweep, run.date[:10], format_number(run.value), interval, point, ", ".join(texts), run.commit]
