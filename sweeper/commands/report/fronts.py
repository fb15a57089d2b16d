"""Build a table and a chart of the Pareto front for each sweep with several objectives.

The front of a finished sweep is stored, with the finals' verdict on each point. For an unfinished sweep, the front is
computed from the measurements of the search.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from sweeper.commands.report.notes import NOTES
from sweeper.common.format import count
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.metrics.criteria import Criteria
from sweeper.pages.front_plot import build_front_chart
from sweeper.pages.html_page import Chart, Table
from sweeper.pages.trial_tables import front_rows
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import list_varying_parameters, read_value, select_complete
from sweeper.search.front import Front, FrontPoint
from sweeper.tracking import mlflow_store


@dataclass(frozen=True)
class SweepFront:
    """The Pareto front of one sweep, and the sweep's ranked trials in order of trial number."""

    sweep: str
    study: str
    criteria: Criteria
    records: Sequence[TrialRecord]
    front: Front

    @property
    def chart(self) -> Chart:
        """A chart with one figure for each pair of objectives."""
        chart = build_front_chart(self.records, self.criteria.metrics, self.front.numbers)
        return replace(chart, title=f"Pareto front of {self.sweep}", note=NOTES["picture"])

    @property
    def table(self) -> Table:
        """A table of the remeasured points, followed by the rest of the front, with a note on the front's certainty."""
        goals = ", ".join(f"{goal.direction} {goal.metric}" for goal in self.criteria.objectives)
        limits = "".join(f"; limit {limit}" for limit in self.criteria.limits)
        on_front = f"{len(self.front.numbers)} of {count(len(self.records), 'ranked trial')}"
        note = f"{goals}{limits}. {on_front} are on the front: no other is at least as good in all and better in one. "
        if certified := self.front.certified:
            again = f"{count(len(certified), 'point')} measured again in {certified[0].rounds} rounds"
            note += f"{again}: {NOTES['certified']}"
        else:
            note += NOTES["not_certified"]
        heading, rows, _ = front_rows(self.front, self.criteria.metrics)
        return Table(f"Pareto front of {self.sweep}", heading, rows, note)


def find_fronts(stored: Stored) -> list[SweepFront]:
    """Return the fronts of sweeps with several objectives and at least one ranked trial, ordered by start time."""
    column = f"tag.{mlflow_store.OBJECTIVES}"
    if column not in stored.sweeps or not len(stored.trials):
        return []
    fronts = []
    for sweep in stored.sweeps.sort_values("start").to_dict("records"):
        study = sweep["tag.sweeper.study"]
        trials = stored.trials[stored.trials["tag.sweeper.study"] == study]
        if isinstance(sweep[column], str) and len(json.loads(sweep[column])) > 1 and len(trials):
            front = _read_front(sweep, trials)
            fronts += [front] if front.records else []
    return fronts


def _read_front(sweep: Mapping[Any, Any], trials: pd.DataFrame) -> SweepFront:
    limits = sweep.get(f"tag.{mlflow_store.LIMITS}")
    objectives = json.loads(sweep[f"tag.{mlflow_store.OBJECTIVES}"])
    criteria = Criteria.of(objectives, json.loads(limits) if isinstance(limits, str) else {})
    names, rounds = list_varying_parameters(trials), sweep.get("metric.front_rounds", math.nan)
    records, certified = [], []
    for row in select_complete(trials).to_dict("records"):
        metrics = {str(name): value for name, value in row.items() if str(name).startswith("metric.")}
        known = {name.removeprefix("metric."): float(v) for name, v in metrics.items() if not pd.isna(v)}
        params = {name: str(row.get(f"param.{name}")) for name in names}
        number = int(row["tag.sweeper.trial"])
        records.append(TrialRecord(number, params, TrialStatus.COMPLETE, "", "", known, [], {}, 0.0, 0.0, 0.0))
        verdict, share = row.get(f"tag.{mlflow_store.FRONT_VERDICT}"), known.get(mlflow_store.FRONT_SHARE)
        if not isinstance(verdict, str) or share is None:
            continue
        same, exceeded = (row.get(f"tag.{tag}") for tag in (mlflow_store.SAME_AS, mlflow_store.EXCEEDED))
        values = {name: read_value(row, f"final_{name}") for name in criteria.metrics}
        point = FrontPoint(
            trial=records[-1],
            values=values,
            share=share,
            is_certain=verdict == "on the front",
            is_dominated=verdict == "dominated",
            is_on_front=row.get(f"tag.{mlflow_store.FRONT}") == "yes",
            same_as=tuple(map(int, same.split(", "))) if isinstance(same, str) else (),
            rounds=0 if math.isnan(rounds) else int(rounds),
            exceeded=(exceeded,) if isinstance(exceeded, str) else (),
        )
        certified.append(point)
    leading = criteria.objectives[0]
    certified.sort(key=lambda point: leading.loss(point.values[leading.metric].value))
    exceeding = {point.trial.number for point in certified if point.exceeded}
    ranked = criteria.rank(records)
    front = Front(criteria.front(trial for trial in ranked if trial.number not in exceeding), certified)
    by_number = sorted(ranked, key=lambda record: record.number)
    return SweepFront(str(sweep["run"]), str(sweep["tag.sweeper.study"]), criteria, by_number, front)
