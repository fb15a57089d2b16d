"""The tables of the report, as headings and cells for any output format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from sweeper.commands.report import published
from sweeper.common.clock import SECONDS_PER_DAY
from sweeper.common.format import format_interval, format_number, format_percent, format_point
from sweeper.metrics.derivation import MEMORY_METRICS
from sweeper.metrics.energy import Prices, cost_metrics
from sweeper.metrics.intervals import missing_reason
from sweeper.pages.html_page import Table
from sweeper.pages.trial_tables import markdown_of
from sweeper.results import imported
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import (
    MAIN_WORK_NAMES,
    SPEED_UNITS,
    BestResult,
    label_works,
    list_distinctions,
    list_varying_parameters,
)
from workloads.api.metrics import COST

SWEEPS = "Sweeps"
BEST_RESULTS = "Best results"
PARAMETERS = "Parameters of the best results"
FAILURES = "Trials without a result"
WITHOUT_RESULT = ("failed", "lost", "timed_out", "infeasible")
PUBLISHED = "Published results"
IMPORTED = "Imported results"
CONTRADICTIONS = "Contradictions in imported results"
EFFICIENCY_UNITS = {"joules_per_token": "J/token", "tflop_per_joule": "TFLOP/J"}
SHARES = {"mfu": "MFU %", "hfu": "HFU %", "mamf_utilization": "of matmul ceiling %"}


def build_tables(stored: Stored, prices: Prices | None, fronts: Iterable[Table] = ()) -> list[Table]:
    """Return the tables that have rows: sweeps, fronts, best results, failures, and published and imported results."""
    models = {result.work["model"] for result in stored.best_results if "model" in result.work}
    tables = [
        build_sweeps_table(stored),
        *fronts,
        build_best_results_table(stored.best_results, stored.trials, prices),
        build_parameters_table(stored.best_results),
        build_failures_table(stored.trials),
        _build_unranked_table(PUBLISHED, published.HEADING, published.list_published(models), published.NOTE),
        _build_unranked_table(IMPORTED, imported.HEADING, imported.list_rows(stored.imported), imported.NOTE),
        _build_unranked_table(
            CONTRADICTIONS,
            imported.CONTRADICTIONS_HEADING,
            list(imported.list_contradictions(stored.imported)),
            imported.CONTRADICTIONS_NOTE,
        ),
    ]
    return [table for table in tables if table.rows]  # a store may have imported results alone


def _build_unranked_table(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> Table:
    return Table(title, *_drop_empty_columns(heading, rows), note, unranked=True)


def build_sweeps_table(stored: Stored) -> Table:
    """Return a row for each sweep: its workload and device, when it ran and how its trials ended."""
    heading = ["sweep", "workload", "device", "power limit W", "began", "ended", "state", "trials", "versions"]
    rows = [_format_sweep(sweep, stored.trials) for sweep in stored.sweeps.sort_values("start").to_dict("records")]
    return Table(SWEEPS, *_drop_empty_columns(heading, rows))


def build_failures_table(trials: pd.DataFrame) -> Table:
    """Return a row for each sweep, outcome and kind of reason: how many trials ended so, with one of them."""
    heading = ["sweep", "outcome", "trials", "example", "reason"]
    if not len(trials) or "tag.reason" not in trials:
        return Table(FAILURES, heading, [])
    failed = trials[trials["tag.outcome"].isin(WITHOUT_RESULT)]
    reasons = failed["tag.reason"].fillna("")
    kinds = reasons.str.replace(r"[\d.,]+", "#", regex=True)  # reasons that differ only in numbers are of one kind
    groups = failed.assign(reason=reasons).groupby(["tag.sweep", "tag.outcome", kinds], sort=False)
    rows = [
        [str(sweep), str(outcome), str(len(group)), str(group["run"].iloc[-1]), str(group["reason"].iloc[-1])]
        for (sweep, outcome, _), group in groups
    ]
    rows.sort(key=lambda row: (row[0], WITHOUT_RESULT.index(row[1]), -int(row[2])))
    return Table(FAILURES, heading, rows)


def _format_sweep(sweep: dict[Any, Any], all_trials: pd.DataFrame) -> list[str]:
    trials = (
        all_trials[all_trials["tag.sweeper.study"] == sweep["tag.sweeper.study"]] if len(all_trials) else all_trials
    )
    outcomes = trials["tag.outcome"].value_counts() if len(trials) else pd.Series(dtype=int)
    tainted = int((trials["tag.tainted"] == "yes").sum()) if "tag.tainted" in trials else 0
    counts = [f"{count} {name}" for name, count in outcomes.items()]
    counts += [f"{tainted} tainted"] if tainted else []
    power_limits = trials["tag.power_limit_w"].dropna().unique() if "tag.power_limit_w" in trials else []
    versions = {name: _join_lines(sweep.get(f"tag.version.{name}")) for name in ("torch", "ray")}
    return [
        sweep["run"],
        _join_lines(sweep.get("tag.workload")),
        _join_lines(sweep.get("tag.machine")) or _join_lines(sweep.get("tag.device")),
        " or ".join(sorted(power_limits)),
        *("" if pd.isna(sweep[when]) else f"{sweep[when]:%Y-%m-%d %H:%M} UTC" for when in ("start", "end")),
        sweep["status"].lower(),
        ", ".join(counts),
        " ".join(f"{name} {version}" for name, version in versions.items() if version),
    ]


def build_best_results_table(results: Sequence[BestResult], trials: pd.DataFrame, prices: Prices | None) -> Table:
    """Return a row for each best result. Rows of different work are not compared.

    Args:
        trials: all trials of the store; the parameters that vary within a result's sweep are shown.
        prices: None for the cost of tokens as it was recorded, if it was.
    """
    distinctions = list_distinctions([result.work for result in results])
    heading = [
        *(name.replace("_", " ") for name in MAIN_WORK_NAMES),
        "work",
        "device",
        "speed",
        "95%",
        "per device",
        "TFLOP/s",
        *SHARES.values(),
        "GiB",
        *EFFICIENCY_UNITS.values(),
        "repeats",
        "of trials",
        "10^9 tokens a day",
        "cost of 10^6 tokens",
        "as executed",
    ]
    rows = [
        _format_result(result, distinct, trials, prices) for result, distinct in zip(results, distinctions, strict=True)
    ]
    note = (
        "Rows that differ in their work are not ranked together. The work is everything that changes what is computed."
    )
    if any(result.rounds for result in results):
        note += (
            " Repeats in rounds: the winner of a sweep's finals, with the mean of its rounds there; otherwise the best "
            "single trial."
        )
    return Table(BEST_RESULTS, *_drop_empty_columns(heading, rows), note)


def _format_result(
    result: BestResult, distinct: Mapping[str, str], trials: pd.DataFrame, prices: Prices | None
) -> list[str]:
    speed, is_tokens = result.speed, result.speed_metric == "tokens_per_s"
    tokens_per_day = SECONDS_PER_DAY * speed.value if is_tokens else math.nan
    costs = cost_metrics(result.metrics, result.devices, prices) if prices else result.metrics
    sweep_trials = trials[trials["tag.sweeper.study"] == result.trial["tag.sweeper.study"]]
    varying = list_varying_parameters(sweep_trials)
    return [
        *(result.work.get(name, "") for name in MAIN_WORK_NAMES),
        format_point(distinct) if distinct else "",
        result.platform,
        f"{format_number(speed.value)} {SPEED_UNITS[result.speed_metric]}",
        _describe_interval(result),
        format_number(speed.divide(result.devices).value) if result.devices > 1 else "",
        format_number(result.get_metric("tflops")) if result.speed_metric != "tflops" else "",  # not the speed again
        *(format_percent(result.get_metric(name)) for name in SHARES),
        format_number(result.get_first_metric(MEMORY_METRICS)),
        *(format_number(result.get_metric(name)) for name in EFFICIENCY_UNITS),
        f"{result.rounds} rounds" if result.rounds else format_number(result.get_metric("steps")),
        str(len(result.trials)),
        format_number(tokens_per_day / 1e9),
        format_number(costs.get(COST, math.nan)),
        " ".join(f"{name}={result.trial.get(f'param.{name}')}" for name in varying),
    ]


def build_parameters_table(results: Sequence[BestResult]) -> Table:
    """Return a row for each best result with every parameter of its trial, fixed or searched."""
    rows = []
    for result, label in zip(results, label_works([result.work for result in results]), strict=True):
        columns = [str(name) for name in result.trial.index if str(name).startswith("param.")]
        values = {name.removeprefix("param."): result.trial[name] for name in columns if ".sweep." not in name}
        point = {name: value for name, value in sorted(values.items()) if isinstance(value, str) and value != "None"}
        rows.append([label, result.platform, format_point(point)])
    return Table(PARAMETERS, ["work", "device", "parameters"], rows)


def _describe_interval(result: BestResult) -> str:
    """Return the bounds of the speed's 95% interval, or why it has none."""
    if result.speed.has_interval:
        return format_interval(result.speed.low, result.speed.high)
    reason = missing_reason(result.metrics, result.speed_metric)
    return f"— ({reason})" if reason else ""


def _drop_empty_columns(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    filled = [n for n in range(len(heading)) if any(row[n] for row in rows)]
    return [heading[n] for n in filled], [[row[n] for n in filled] for row in rows]


def _join_lines(value: object) -> str:
    """Return the lines of a tag that has one for each of several values, joined by "or"."""
    return " or ".join(value.splitlines()) if isinstance(value, str) else ""


def build_markdown(tables: Sequence[Table]) -> str:
    """Return the tables with their titles and notes as Markdown."""
    parts = [[f"## {table.title}", markdown_of(table.heading, table.rows), table.note] for table in tables]
    return "\n\n".join(text for part in parts for text in part if text)
