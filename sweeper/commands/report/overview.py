"""The report's first paragraph in three sentences: what was measured, what won, and what it means to run it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sweeper.commands.report.front_overview import describe_front
from sweeper.commands.report.fronts import SweepFront
from sweeper.common.clock import SECONDS_PER_HOUR
from sweeper.common.format import TIE, count, format_number, format_point
from sweeper.metrics.derivation import MEMORY_METRICS
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import (
    SPEED_UNITS,
    BestResult,
    MeasuredValue,
    list_varying_parameters,
    rank_speeds,
    read_value,
)


def describe(stored: Stored, fronts: Sequence[SweepFront] = ()) -> str:
    """Return the paragraph; without a complete trial only what was measured. Of several objectives the front counts."""
    headline = _find_headline(stored, fronts)
    sentences = [_describe_extent(stored)]
    if isinstance(headline, BestResult):
        sentences += [_describe_winner(headline, stored), _describe_use(headline)]
    elif headline:
        sentences.append(describe_front(headline))
    return " ".join(filter(None, sentences))


def _find_headline(stored: Stored, fronts: Sequence[SweepFront]) -> BestResult | SweepFront | None:
    """Return the front, or with one objective the best result, of the latest sweep that has one."""
    studies = list(stored.sweeps.sort_values("start")["tag.sweeper.study"]) if len(stored.sweeps) else []
    found: dict[str, BestResult | SweepFront] = {r.trial["tag.sweeper.study"]: r for r in stored.best_results}
    found |= {front.study: front for front in fronts}
    return found[max(found, key=studies.index)] if found else None


def _describe_extent(stored: Stored) -> str:
    parts = []
    if len(stored.sweeps):
        names, devices = (
            " and ".join(dict.fromkeys(stored.sweeps[column].dropna())) if column in stored.sweeps else ""
            for column in ("tag.workload", "tag.device")
        )
        outcomes = Counter(stored.trials["tag.outcome"] if len(stored.trials) else [])
        counts = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
        what = f"{count(len(stored.sweeps), 'sweep')} of {names}" + (f" on {devices}" if devices else "")
        parts.append(f"{what} tried {count(len(stored.trials), 'trial')} ({counts})")
    if len(stored.imported):
        parts.append(f"{count(len(stored.imported), 'result')} of other tools were imported, which are not ranked")
    return "; ".join(parts) + "."


def _describe_winner(result: BestResult, stored: Stored) -> str:
    study = result.trial["tag.sweeper.study"]
    names = list_varying_parameters(stored.trials[stored.trials["tag.sweeper.study"] == study])
    speed, unit = result.speed, SPEED_UNITS[result.speed_metric]
    method = f"mean of {result.rounds} rounds of the finals" if result.rounds else "a single trial"
    interval = f"95% {format_number(speed.low)} to {format_number(speed.high)}, " if speed.has_interval else ""
    text = f"On {result.platform} the fastest is {_format_point(result.trial, names)}"
    text += f" with {format_number(speed.value)} {unit} ({interval}{method})"
    return f"{text}{_describe_lead(result, names, stored)}."


def _describe_lead(result: BestResult, names: list[str], stored: Stored) -> str:
    """Return by how much the best trial leads the next one and whether that is certain."""
    others = result.trials[result.trials.index != result.trial.name]
    column = f"metric.final_{result.speed_metric}"
    if result.rounds:
        speeds = others[column].astype(float).dropna() if column in others else pd.Series(dtype=float)
    else:
        speeds = rank_speeds(others, result.speed_metric)
    speeds = speeds[speeds > 0]
    if not len(speeds):
        return ""
    second = others.iloc[others.index.get_loc(speeds.idxmax())]
    in_finals = result.rounds or speeds.max() == second.get(column)
    value = read_value(second, f"final_{result.speed_metric}" if in_finals else result.speed_metric)
    lead = f", {100 * (result.speed.value / value.value - 1):.1f}% ahead of {_format_point(second, names)}"
    return lead + _describe_certainty(result, value, stored)


def _describe_certainty(result: BestResult, second: MeasuredValue, stored: Stored) -> str:
    if result.rounds:
        is_same = stored.sweeps["tag.sweeper.study"] == result.trial["tag.sweeper.study"]
        verdicts = stored.sweeps.loc[is_same, "tag.winner"].dropna() if "tag.winner" in stored.sweeps else []
        is_tie = any(str(verdict).startswith(TIE) for verdict in verdicts)
        return ", which the finals cannot tell apart" if is_tie else ", which the finals confirm"
    if not (result.speed.has_interval and second.has_interval):
        return ", of unknown certainty: there are no intervals to compare"
    return ", with disjoint intervals" if second.high < result.speed.low else ", but their intervals overlap"


def _describe_use(result: BestResult) -> str:
    step_ms, memory = result.get_metric("step_time_ms"), result.get_first_metric(MEMORY_METRICS)
    mfu = result.get_metric("mfu")
    facts = [f"takes {format_number(step_ms)} ms a step"] if not math.isnan(step_ms) else []
    facts += [f"reaches {100 * mfu:.1f}% of the dense peak (MFU)"] if not math.isnan(mfu) else []
    facts += [f"needs {format_number(memory)} GiB of a device's memory"] if not math.isnan(memory) else []
    if result.speed_metric == "tokens_per_s":
        hours = 1e9 / result.speed.value / SECONDS_PER_HOUR
        facts.append(f"trains 10^9 tokens in {format_number(hours)} hours on {result.platform}")
    if not facts:
        return ""
    return f"Run so, it {', '.join(facts[:-1])}{' and ' if len(facts) > 1 else ''}{facts[-1]}."


def _format_point(trial: Any, names: list[str]) -> str:
    values = {name: trial.get(f"param.{name}") for name in names}
    point = format_point({name: value for name, value in values.items() if not pd.isna(value)})
    return point if names else "the only configuration"
