"""Build the report's tables as headings and cells, and render them as Markdown, CSV and JSON.

CSV and JSON are for programs to read. Units are in names or in a separate column, and best results are not rounded. In
JSON, numbers are not strings, intervals are [low, high], and unknown values are null.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from sweeper.commands.report.notes import NOTES
from sweeper.common.clock import SECONDS_PER_DAY
from sweeper.common.format import (
    format_interval,
    format_number,
    format_percent,
    format_point,
    spreadsheet_cell,
    typed_value,
)
from sweeper.common.trials import WITHOUT_RESULT, TrialStatus, mask_numbers
from sweeper.metrics.derivation import MEMORY_METRICS, Prices, cost_metrics
from sweeper.metrics.intervals import missing_reason
from sweeper.pages.html_page import Table, drop_empty
from sweeper.pages.trial_tables import markdown_of
from sweeper.results import imported, ranking
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import MAIN_WORK_NAMES, BestResult, list_varying_parameters
from workloads.api.errors import UserInputError
from workloads.api.metrics import COST
from workloads.tables import read_csv

BEST_RESULTS = "Best results"
PARAMETERS = "Parameters of the best results"
FAILURES = "Trials without a result"
OUTCOMES_OF_FAILURES = [str(status) for status in (*WITHOUT_RESULT, TrialStatus.INFEASIBLE)]
IMPORTED = "Imported results"
CONTRADICTIONS = "Contradictions in imported results"
NAMES = ("sweep", "result", "example", "device", "gpu", "same as")  # text columns, even with values of only digits
EXPORTED_RATES_AND_SHARES = ("tflops", "mfu", "hfu", "mamf_utilization", "bandwidth_utilization")
PUBLISHED_COLUMNS = {  # columns of published.csv by table heading
    **{"model": "model", "sequence length": "sequence_length", "type": "type", "device": "gpu", "devices": "gpus"},
    **{"claimed tokens/s per device": "tokens_per_s_per_gpu", "stated MFU %": "stated_mfu"},
    **{"FLOPs": "flops_convention", "source": "source", "as executed": "layout"},
}


def build_tables(stored: Stored, prices: Prices | None, fronts: Iterable[Table] = ()) -> list[Table]:
    """Return the non-empty tables: fronts, best results, sweeps, failures, and published and imported results."""
    models = {result.work["model"] for result in stored.best_results if "model" in result.work}
    selected, contradictions = imported.list_rows(stored.imported), [*imported.list_contradictions(stored.imported)]
    tables = [
        *fronts,
        _build_best_results_table(stored.best_results, stored.trials, prices),
        _build_parameters_table(stored.best_results),
        _build_sweeps_table(stored),
        build_failures_table(stored.trials),
        _build_table("Published results", _list_published(models), NOTES["published"], unranked=True),
        _build_table(IMPORTED, selected, NOTES["imported"], unranked=True),
        _build_table(CONTRADICTIONS, contradictions, NOTES["contradictions"], unranked=True),
    ]
    return [table for table in tables if table.rows]  # for example if a store contains only imported results


def _build_table(title: str, rows: Sequence[Mapping[str, str]], note: str = "", *, unranked: bool = False) -> Table:
    return Table(title, *drop_empty([*(rows[0] if rows else ())], [[*row.values()] for row in rows]), note, unranked)


def _build_sweeps_table(stored: Stored) -> Table:
    rows = []
    for sweep in stored.sweeps.sort_values("start").to_dict("records"):
        trials = stored.trials
        if len(trials):
            trials = trials[trials["tag.sweeper.study"] == sweep["tag.sweeper.study"]]
        outcomes = trials["tag.outcome"].value_counts() if len(trials) else pd.Series(dtype=int)
        tainted = int((trials["tag.tainted"] == "yes").sum()) if "tag.tainted" in trials else 0
        counts = [f"{count} {name}" for name, count in outcomes.items()]
        counts += [f"{tainted} tainted"] if tainted else []
        limits = trials.get("tag.power_limit_w", pd.Series(dtype=str)).dropna().unique()
        versions = {name: _join_lines(sweep.get(f"tag.version.{name}")) for name in ("torch", "ray")}
        times = (sweep["start"], sweep["end"])
        began, ended = ("" if pd.isna(time) else f"{time:%Y-%m-%d %H:%M} UTC" for time in times)
        cells = {
            "sweep": sweep["run"],
            "workload": _join_lines(sweep.get("tag.workload")),
            "device": _join_lines(sweep.get("tag.machine")) or _join_lines(sweep.get("tag.device")),
            "power limit W": " or ".join(sorted(limits)),
            "began": began,
            "ended": ended,
            "state": sweep["status"].replace("KILLED", "interrupted").lower(),  # like `sweeper list`
            "trials": ", ".join(counts),
            "versions": " ".join(f"{name} {version}" for name, version in versions.items() if version),
        }
        rows.append(cells)
    return _build_table("Sweeps", rows)


def _join_lines(value: object) -> str:
    return " or ".join(value.splitlines()) if isinstance(value, str) else ""


def build_failures_table(trials: pd.DataFrame) -> Table:
    """Return a table with the number of trials, and an example, for each sweep, outcome and kind of reason."""
    heading = ["sweep", "outcome", "trials", "example", "reason"]
    if not len(trials) or "tag.reason" not in trials:
        return Table(FAILURES, heading, [])
    failed = trials[trials["tag.outcome"].isin(OUTCOMES_OF_FAILURES)]
    reasons = failed["tag.reason"].fillna("")
    kinds = reasons.map(mask_numbers)
    groups = failed.assign(reason=reasons).groupby(["tag.sweep", "tag.outcome", kinds], sort=False)
    rows = [
        [str(sweep), str(outcome), str(len(group)), str(group["run"].iloc[-1]), str(group["reason"].iloc[-1])]
        for (sweep, outcome, _), group in groups
    ]
    rows.sort(key=lambda row: (row[0], OUTCOMES_OF_FAILURES.index(row[1]), -int(row[2])))
    return Table(FAILURES, heading, rows)


def _build_best_results_table(results: Sequence[BestResult], trials: pd.DataFrame, prices: Prices | None) -> Table:
    rows = []
    distinctions = ranking.list_distinctions([result.work for result in results])
    heading = "speed" if all(result.is_rate for result in results) else "result"
    for result, distinct in zip(results, distinctions, strict=True):
        estimate, metric = result.estimate, result.objective.metric
        tokens_per_day = SECONDS_PER_DAY * estimate.value if metric == "tokens_per_s" else math.nan
        costs = cost_metrics(result.metrics, result.devices, prices) if prices else result.metrics
        varying = list_varying_parameters(trials[trials["tag.sweeper.study"] == result.trial["tag.sweeper.study"]])
        few = "too few rounds" if result.rounds else missing_reason(result.metrics, metric)
        tflops = result.get_metric("tflops") if metric != "tflops" else math.nan  # do not repeat it
        cells = {name.replace("_", " "): result.work.get(name, "") for name in MAIN_WORK_NAMES} | {
            "work": format_point(distinct) if distinct else "",
            "device": result.platform,
            heading: f"{format_number(estimate.value)} {result.unit}",
            "95%": format_interval(estimate.low, estimate.high) or (f"— ({few})" if few else ""),
            "per device": format_number(result.per_device.value) if result.is_rate and result.devices > 1 else "",
            "TFLOP/s": format_number(tflops),
            "MFU %": format_percent(result.get_metric("mfu")),
            "HFU %": format_percent(result.get_metric("hfu")),
            "of matmul ceiling %": format_percent(result.get_metric("mamf_utilization")),
            "GiB": format_number(result.get_first_metric(MEMORY_METRICS)),
            "J/token": format_number(result.get_metric("joules_per_token")),
            "TFLOP/J": format_number(result.get_metric("tflop_per_joule")),
            "repeats": f"{result.rounds} rounds" if result.rounds else format_number(result.get_metric("steps")),
            "of trials": str(len(result.trials)),
            "10^9 tokens a day": format_number(tokens_per_day / 1e9),
            "cost of 10^6 tokens": format_number(costs.get(COST, math.nan)),
            "as executed": " ".join(f"{name}={result.trial.get(f'param.{name}')}" for name in varying),
        }
        rows.append(cells)
    note = NOTES["best_results"] + (NOTES["finals"] if any(result.rounds for result in results) else "")
    return _build_table(BEST_RESULTS, rows, note)


def _build_parameters_table(results: Sequence[BestResult]) -> Table:
    rows = []
    for result, label in zip(results, ranking.label_works([result.work for result in results]), strict=True):
        columns = sorted(str(name) for name in result.trial.index if str(name).startswith("param."))
        values = {name.removeprefix("param."): result.trial[name] for name in columns if ".sweep." not in name}
        point = {name: value for name, value in values.items() if isinstance(value, str) and value != "None"}
        rows.append([label, result.platform, format_point(point)])
    return Table(PARAMETERS, ["work", "device", "parameters"], rows)


def _list_published(models: Collection[str]) -> list[dict[str, str]]:
    # Each row names a source. These results were not measured here, so the report never ranks or divides them.
    rows = [row for row in read_csv(__file__, "published.csv") if row["model"] in models]
    for row in rows:
        row["tokens_per_s_per_gpu"] = format_number(float(row["tokens_per_s_per_gpu"]))
        row["stated_mfu"] = format_percent(float(row["stated_mfu"] or math.nan))
    return [{heading: row[column] for heading, column in PUBLISHED_COLUMNS.items()} for row in rows]


def build_text(stored: Stored, tables: Sequence[Table], text_format: str) -> str:
    """Render the tables as "markdown" or "json", or best results as "csv". Raises UserInputError if a CSV is empty."""
    if text_format == "markdown":
        parts = [[f"## {table.title}", markdown_of(table.heading, table.rows), table.note] for table in tables]
        return "\n\n".join(text for part in parts for text in part if text)
    rows = [_export_result(result) for result in stored.best_results]
    if text_format == "json":
        shown = [table for table in tables if table.title != PARAMETERS]  # the best results include the parameters
        content = {table.title: [dict(zip(table.heading, row, strict=True)) for row in table.rows] for table in shown}
        typed = {title: [*map(_type_cells, rows)] for title, rows in (content | {BEST_RESULTS: rows}).items()}
        return json.dumps(typed, indent=1, ensure_ascii=False)
    if not rows:
        raise UserInputError("format=csv: there is no complete trial to rank")
    exported = pd.DataFrame(rows).dropna(axis="columns", how="all").map(spreadsheet_cell)
    return exported.rename(columns=spreadsheet_cell).to_csv(index=False).rstrip()


def _type_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    typed = {}
    for name, value in row.items():
        is_list = name.startswith("param.") and "," in str(value)  # elsewhere, a comma separates thousands
        typed[name] = typed_value(value) if isinstance(value, str) and name not in NAMES and not is_list else value
    if isinstance(counts := typed.get("trials"), str):  # a sweep's number of trials by outcome
        typed["trials"] = {name: int(number) for number, name in (part.split(" ", 1) for part in counts.split(", "))}
    return typed


def _export_result(result: BestResult) -> dict[str, Any]:
    """Return a best result as a row: the work, the value with a 95% interval, and the parameters. Shares are fractions.
    `rounds` is the number of finals rounds that were averaged, or 0 for a single trial."""
    row = {
        **{name: result.work.get(name) for name in MAIN_WORK_NAMES},
        **{f"work.{name}": value for name, value in result.work.items() if name not in MAIN_WORK_NAMES},
        "device": result.device,
        "devices": result.devices,
        "metric": result.objective.metric,
        "unit": result.unit,
        "value": result.estimate.value,
        "ci_low": result.estimate.low,
        "ci_high": result.estimate.high,
        **{name: result.get_metric(name) for name in EXPORTED_RATES_AND_SHARES},
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
