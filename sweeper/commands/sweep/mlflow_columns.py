"""From the results of a sweep to what MLflow's pages show of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sweeper.common.format import format_interval
from sweeper.common.trials import TrialRecord, exact_value
from sweeper.metrics.derivation import MEMORY_METRICS
from sweeper.metrics.energy import EFFICIENCY
from sweeper.metrics.intervals import Interval
from sweeper.pages.sweep_results import Results
from sweeper.search.finals import FinalistResult
from sweeper.search.front import FrontPoint, measured_interval
from sweeper.tracking import mlflow_store
from sweeper.tracking.mlflow_view import RANKED_TRIALS, RankedTrial, SweepView
from workloads.api.metrics import COST


def build_view(results: Results) -> SweepView:
    """Return what MLflow's pages show of a sweep: its best trials with those of the finals first."""
    objective, plan, front = results.objective, results.plan, results.front
    certified = front.certified if front else ()
    finalists = [_rank_finalist(finalist, objective) for finalist in results.finalists if not finalist.exceeded]
    finalists += [_rank_front_point(point, objective) for point in certified if not point.exceeded]
    exceeding = [_rank_finalist(finalist, objective) for finalist in results.finalists if finalist.exceeded]
    exceeding += [_rank_front_point(point, objective) for point in certified if point.exceeded]
    numbers = {trial.number for trial in (*finalists, *exceeding)}
    others = [_rank_trial(trial, objective) for trial in results.best if trial.number not in numbers]
    measured = results.best[0].metrics if results.best else {}
    metrics = [f"final_{objective}"] if finalists else []
    metrics += [
        objective,
        *results.other_objectives,
        *(["front"] if front else []),
        *(["front_share"] * bool(certified)),
    ]
    metrics += [*(name for name in ("mfu", *MEMORY_METRICS, COST) if name in measured and name not in metrics)]
    metrics += [name for name in EFFICIENCY if name in measured and name not in metrics][:1]
    return SweepView(
        objective=objective,
        minimize=results.direction == "minimize",
        metrics=metrics,
        parameters=list(plan.space.dimensions),
        space={name: exact_value(value) for name, value in plan.space.described().items()},
        ranking=[*finalists, *others[: max(0, RANKED_TRIALS - len(numbers))], *exceeding],
        other_objectives=results.other_objectives,
    )


def _rank_finalist(finalist: FinalistResult, objective: str) -> RankedTrial:
    value = finalist.value
    metrics = _final_metrics({objective: value})
    tags = {mlflow_store.EXCEEDED: "; ".join(finalist.exceeded)} if finalist.exceeded else {}
    return RankedTrial(finalist.trial.number, metrics, format_interval(value.low, value.high), tags)


def _rank_front_point(point: FrontPoint, objective: str) -> RankedTrial:
    value = point.values[objective]
    metrics = {**_final_metrics(point.values), mlflow_store.FRONT_SHARE: point.share}
    tags = {
        mlflow_store.FRONT_VERDICT: point.verdict,
        mlflow_store.SAME_AS: ", ".join(map(str, point.same_as)),
        mlflow_store.EXCEEDED: "; ".join(point.exceeded),
    }
    filled = {name: text for name, text in tags.items() if text}
    return RankedTrial(point.trial.number, metrics, format_interval(value.low, value.high), filled)


def _final_metrics(values: Mapping[str, Interval]) -> dict[str, float]:
    """Return the means of the finals' rounds and the bounds of their intervals, under their names in MLflow."""
    bounds = {f"final_{name}": value for name, value in values.items()}
    metrics = {name: value.value for name, value in bounds.items()}
    metrics |= {f"{name}_ci_low": value.low for name, value in bounds.items()}
    metrics |= {f"{name}_ci_high": value.high for name, value in bounds.items()}
    return {name: bound for name, bound in metrics.items() if not math.isnan(bound)}


def _rank_trial(trial: TrialRecord, objective: str) -> RankedTrial:
    value = measured_interval(trial, objective)
    return RankedTrial(trial.number, {}, format_interval(value.low, value.high))
