"""Tables of a sweep's trials: for the terminal, for MLflow's description, and as CSV."""

from __future__ import annotations

import csv as format_csv
import io
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from sweeper.common.metrics import SHOWN
from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.search.finals import FinalistResult


def best_first(records: Iterable[TrialRecord], objective: str, direction: str) -> list[TrialRecord]:
    """The complete trials, the best of them first; those that are not ranked are left out."""
    ranked = [record for record in records if record.status is TrialStatus.COMPLETE and objective in record.metrics]
    return sorted(ranked, key=lambda r: r.metrics[objective], reverse=direction == "maximize")


def shown_width() -> int:
    """The terminal's width; where there is none, wide enough that nothing is folded."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 200


def said_counts(counted: Mapping[TrialStatus, int]) -> str:
    """`97 complete, 2 infeasible, 1 lost`."""
    return ", ".join(f"{counted[status]} {status.value}" for status in TrialStatus if counted.get(status)) or "none"


def said_point(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={said(value)}" for name, value in params.items()) or "nothing varies"


def said(value: Any) -> str:
    """A number in four significant digits, or as many as it has before the point; anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def varying(records: Sequence[TrialRecord]) -> list[str]:
    """The parameters in which these differ; of one alone, all that it has."""
    names = list(records[0].params) if records else []
    return [name for name in names if len(records) == 1 or len({str(r.params[name]) for r in records}) > 1]


def alike(records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The parameters in which several of a sweep do not differ, though they might."""
    differ = varying(records)
    return {name: value for name, value in records[0].params.items() if name not in differ} if records else {}


def rows(records: Sequence[TrialRecord], objective: str) -> tuple[list[str], list[list[str]]]:
    """The heading and the cells: parameters that vary, then the objective, then what else there is to say."""
    names = varying(records)
    shown = [objective, *(metric for metric in SHOWN if metric != objective)]
    shown = [metric for metric in shown if any(metric in record.metrics for record in records)]
    units = [SHOWN.get(metric, (metric, "", 1.0)) for metric in shown]
    heading = ["trial", *names, *(f"{label} {unit}".strip() for label, unit, _ in units)]
    cells = []
    for record in records:
        figures = [record.metrics.get(metric) for metric in shown]
        scaled = [
            "" if figure is None else said(figure * factor) for figure, (*_, factor) in zip(figures, units, strict=True)
        ]
        cells.append([str(record.number), *(said(record.params[name]) for name in names), *scaled])
    return heading, cells


def terminal(records: Sequence[TrialRecord], objective: str, width: int) -> Table:
    """For a person: numbers to the right and whole; where the terminal is narrow, the last columns are left out."""
    at_least = 2 + len(varying(records))  # the number, the parameters and the objective
    return draw(*rows(records, objective), at_least, width)


def short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:500]


def run_name(number: int, params: Mapping[str, object], remeasurement: Remeasurement | None) -> str:
    """`0012 m=4096 n=512`; of one that measures trial 3 again `0040 round 1 of 0003 m=4096 n=512`."""
    said_again = [f"round {remeasurement.round} of {remeasurement.trial:04d}"] if remeasurement else []
    return " ".join([f"{number:04d}", *said_again, *(f"{name}={short(value)}" for name, value in params.items())])[:250]


def draw(heading: Sequence[str], cells: Sequence[Sequence[str]], at_least: int, width: int) -> Table:
    """A table that keeps its first `at_least` columns and as many more as there is room for, and says which it left
    out. Words are wrapped, and never a number."""
    columns = [list(column) for column in zip(heading, *cells, strict=True)]
    least = [max(len(word) for text in column for word in text.split() or [""]) for column in columns]
    shown = len(heading)
    while shown > at_least and _room(least[:shown], width) < 0:
        shown -= 1
    if heading[shown : shown + 1] == ["to"] and shown > at_least:  # half an interval says nothing
        shown -= 1
    widths = _shared(least[:shown], [max(map(len, column)) for column in columns], width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", caption_justify="left")
    if excluded := heading[shown:]:
        table.caption = f"no room for: {', '.join(excluded)}"
    for column, size in zip(columns, widths, strict=False):
        numbers = all(re.fullmatch(r"[-+\d.e,%]*", text) for text in column[1:])
        table.add_column(column[0], justify="right" if numbers else "left", width=size, overflow="fold")
    for line in cells:
        table.add_row(*line[:shown])
    return table


def _room(widths: Sequence[int], width: int) -> int:
    """What is left of a line beside columns of these widths."""
    return width - sum(widths) - 3 * len(widths) + 1


def _shared(least: Sequence[int], wanted: Sequence[int], width: int) -> list[int]:
    """The widths of columns, where there is room as much as each wants, the narrow ones first."""
    widths = list(least)
    for _ in range(_room(widths, width)):
        lacking = [n for n, size in enumerate(widths) if size < wanted[n]]
        if not lacking:
            break
        widths[min(lacking, key=widths.__getitem__)] += 1
    return widths


def markdown(records: Sequence[TrialRecord], objective: str) -> str:
    return markdown_of(*rows(records, objective))


def final_rows(finalist_results: Sequence[FinalistResult], objective: str) -> tuple[list[str], list[list[str]]]:
    """The finalists: their parameters, their figures and how far each is behind the first."""
    names = varying([standing.trial for standing in finalist_results])
    label, unit, factor = SHOWN.get(objective, (objective, "", 1.0))
    heading = ["trial", *names, f"{label} {unit}".strip(), "95% from", "to", "behind %", "from", "to"]
    cells = []
    for place, standing in enumerate(finalist_results):
        figure, behind = standing.figure, standing.behind
        cells.append(
            [
                str(standing.trial.number),
                *(said(standing.trial.params[name]) for name in names),
                *(said(value * factor) for value in (figure.value, figure.low, figure.high)),
                *(f"{100 * value:.2f}" if place else "" for value in (behind.value, behind.low, behind.high)),
            ]
        )
    return heading, cells


def markdown_of(heading: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---:"] * len(heading), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def csv(records: Iterable[TrialRecord]) -> str:
    """Every trial, by number, with its ending, parameters and metrics."""
    flat = [
        {
            "trial": record.number,
            **(
                {"again_of": record.remeasurement.trial, "round": record.remeasurement.round}
                if record.remeasurement
                else {}
            ),
            "outcome": record.status.value,
            **{f"param.{name}": value for name, value in record.params.items()},
            **record.metrics,
            "reason": record.reason,
        }
        for record in sorted(records, key=lambda record: record.number)
    ]
    return csv_of(flat)


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A column for every name that any row has, empty where a row has none, and for NaN: as pandas would write it,
    which takes a third of a second to import."""
    text = io.StringIO()
    writer = format_csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: value for name, value in row.items() if value == value} for row in rows)
    return text.getvalue()
