"""Build tables of trials for the terminal, for the MLflow description, and for CSV files."""

import csv
import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from sweeper.common.format import find_numeric, format_interval, format_number, one_line, short_value, spreadsheet_cell
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.metrics.derivation import hidden_metrics
from sweeper.metrics.intervals import MIN_STEPS, Interval, level_of_median, missing_reason
from sweeper.search.finals import FinalistResult
from sweeper.search.front import Front
from workloads.api.metrics import ROWS, Metric, get_metric

FRONT_COLUMNS = ("front %", "verdict", "same as")
MEASURED_ONCE = "measured once"


class Rows(NamedTuple):
    """A table's heading and cells. At least `minimum` columns are shown even on a narrow terminal."""

    heading: list[str]
    cells: list[list[str]]
    minimum: int


def format_counts(counts: Mapping[TrialStatus, int]) -> str:
    """Format trial counts, as in `97 complete, 2 infeasible, 1 lost`."""
    return ", ".join(f"{counts[status]} {status.value}" for status in TrialStatus if counts.get(status)) or "none"


def varying_parameters(records: Sequence[TrialRecord]) -> list[str]:
    """Return the parameters that differ between the trials. For a single trial, return all parameters."""
    names = list(records[0].params) if records else []
    return [name for name in names if len(records) == 1 or len({str(r.params[name]) for r in records}) > 1]


def common_parameters(records: Sequence[TrialRecord]) -> dict[str, Any]:
    """Return the space's parameters that have the same value in all of these trials, with the values."""
    varying = varying_parameters(records)
    return {name: value for name, value in records[0].params.items() if name not in varying} if records else {}


def fixed_parameters(records: Iterable[TrialRecord]) -> dict[str, Any]:
    """Return the parameters outside the search that are equal in all trials: constants, defaults and settings."""
    fixed: dict[str, Any] = {}
    for number, other in enumerate(record.fixed for record in records if record.fixed):
        fixed = {name: value for name, value in fixed.items() if other.get(name) == value} if number else dict(other)
    return {name: value for name, value in fixed.items() if value not in (None, "")}


def trial_rows(
    records: Sequence[TrialRecord], objective: str, others: Sequence[str] = (), front: Collection[int] = ()
) -> Rows:
    """Return a row for each trial with the varying parameters, the objective and the other metrics. `others` are
    further objectives, shown after the leading objective. With `others`, the trials in `front` are marked."""
    names = varying_parameters(records)
    bounds = [f"{objective}_ci_low", f"{objective}_ci_high"]
    hidden = hidden_metrics([record.metrics for record in records], objective)
    left_out = {objective, *others, *bounds, *hidden}
    metrics = [objective, *others, *(row.name for row in ROWS if row.label and row.name not in left_out)]
    metrics = [metric for metric in metrics if any(metric in record.metrics for record in records)]
    if any(missing_reason(r.metrics, objective) or bounds[0] in r.metrics for r in records):
        metrics[1 + len(others) : 1 + len(others)] = bounds
    bound_columns = {name: Metric(name, label=label) for name, label in zip(bounds, ("95% from", "to"), strict=True)}
    columns = [bound_columns.get(metric) or get_metric(metric) for metric in metrics]
    heading = ["trial", *names, *(column.heading for column in columns)]
    heading[1:1] = ["front"] if others else []
    cells = []
    for record in records:
        values = [record.metrics.get(metric) for metric in metrics]
        formatted = [
            ("—" if column.name in bounds else "") if value is None else format_number(value * column.factor)
            for value, column in zip(values, columns, strict=True)
        ]
        marks = ["yes" if record.number in front else ""] if others else []
        cells.append([str(record.number), *marks, *(short_value(record.params[name]) for name in names), *formatted])
    # At least the number, the parameters and the objectives are shown, and with several objectives the front's mark.
    return Rows(heading, cells, 2 + len(names) + (1 + len(others) if others else 0))


def missing_intervals(records: Sequence[TrialRecord], objective: str) -> str:
    """Return why some trials have no 95% interval or one of a lower level, or "" if no trial lacks an interval."""
    reasons = [missing_reason(record.metrics, objective) for record in records]
    notes = [f"— no 95% interval: {', '.join(missing)}"] if (missing := dict.fromkeys(filter(None, reasons))) else []
    five = [r for r in records if r.metrics.get("steps") == MIN_STEPS and f"{objective}_ci_low" in r.metrics]
    if any(measurement["statistic"] == "median" for record in five for measurement in record.measurements):
        notes.append(f"{level_of_median(MIN_STEPS)} for a trial of {MIN_STEPS} steps: from the fastest to the slowest")
    return "; ".join(notes)


def front_rows(front: Front, metrics: Sequence[str]) -> Rows:
    """Return rows for the remeasured points, then for the rest of the front. The columns are the parameters, the
    objectives, each point's verdict, and the objectives' intervals."""
    trials = [*(point.trial for point in front.certified), *front.measured_once]
    names = varying_parameters(trials)
    columns = [get_metric(metric) for metric in metrics]
    cells = []
    for trial, point in zip_longest(trials, front.certified):
        values = [point.values[name] if point else Interval.read(trial.metrics, name) for name in metrics]
        scaled = [value.scaled(column.factor) for value, column in zip(values, columns, strict=True)]
        row = [str(trial.number), *(short_value(trial.params[name]) for name in names)]
        row += [format_number(value.value) for value in scaled]
        if point:
            row += [f"{100 * point.share:.0f}", point.verdict, ", ".join(map(str, point.same_as))]
        else:
            row += ["", MEASURED_ONCE, ""]
        cells.append([*row, *(format_interval(value.low, value.high) for value in scaled)])
    heading = ["trial", *names, *(column.heading for column in columns), *FRONT_COLUMNS]
    return Rows([*heading, *(f"95% {column.heading}" for column in columns)], cells, len(heading))


def finalist_rows(finalists: Sequence[FinalistResult], objective: str) -> Rows:
    """Return a row for each finalist with the parameters, the result, and the distance to the first finalist."""
    names = varying_parameters([finalist.trial for finalist in finalists])
    column = get_metric(objective)
    has_exceeded = any(finalist.exceeded for finalist in finalists)
    heading = ["trial", *(["limits"] if has_exceeded else []), *names, column.heading]
    cells = []
    for place, finalist in enumerate(finalists):
        row = [str(finalist.trial.number), *(["; ".join(finalist.exceeded) or "kept"] if has_exceeded else [])]
        row += [short_value(finalist.trial.params[name]) for name in names]
        row += [format_number(value * column.factor) or "—" for value in finalist.value.bounds]
        behind = [f"{100 * value:.2f}" for value in finalist.behind.bounds] if place else [""] * 3
        cells.append([*row, *(behind if finalist.value.has_interval else [behind[0], "—", "—"])])
    return Rows([*heading, "95% from", "to", "behind %", "from", "to"], cells, len(heading))


def markdown_of(heading: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with texts on the left and numbers on the right of their columns."""
    texts = [[re.sub(r"([\\|`\[\]<>])", r"\\\1", one_line(cell)) for cell in row] for row in (heading, *cells)]
    ends = ["---:" if is_numeric else "---" for is_numeric in find_numeric(cells) or [False] * len(heading)]
    lines = [texts[0], ends, *texts[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def trials_csv(records: Iterable[TrialRecord], columns: Mapping[int, Mapping[str, object]] | None = None) -> str:
    """Return all trials as CSV: outcome, parameters and metrics. `columns` has additional cells by trial number."""
    rows = [
        {
            "trial": record.number,
            **record.repeats,
            "outcome": record.status.value,
            **(columns or {}).get(record.number, {}),
            # A parameter that is NaN is written as a value, not as an empty cell.
            **{f"param.{name}": v if v == v else str(v) for name, v in record.all_params.items()},
            **record.metrics,
            "reason": record.reason,
        }
        for record in sorted(records, key=lambda record: record.number)
    ]
    return csv_of(rows)


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV with a column for every name. Escape cells that a spreadsheet would treat as formulas."""
    text = io.StringIO()
    # The longest row comes first, so that a column of only some rows, such as the round, has its place.
    names = list(dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writerow({name: spreadsheet_cell(name) for name in names})
    writer.writerows({name: spreadsheet_cell(value) for name, value in row.items() if value == value} for row in rows)
    return text.getvalue()
