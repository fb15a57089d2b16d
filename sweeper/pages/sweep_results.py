"""A sweep's final results, in the formats in which they are stored."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sweeper.common.trials import BAD, TrialRecord, TrialStatus
from sweeper.metrics.criteria import Limit
from sweeper.pages import per_gpu, trial_tables
from sweeper.preflight import ceilings, corrections, cost_model
from sweeper.preflight.corrections import Correction, place_of
from sweeper.preflight.sweep_plan import SweepPlan
from sweeper.search.finals import FinalistResult, finalist_results
from sweeper.search.front import Front, FrontPoint, measure_front, select_finalists
from sweeper.search.progress import SweepProgress
from sweeper.search.study import Study
from workloads.api.metrics import get_metric

PROJECTED_NODES = (1, 2, 4, 8)  # unless projection.nodes is set
MAX_INCONCLUSIVE = 0.2  # the largest share of inconclusive trials (busy machine) with which a command exits with 0
PLOTS = "plots/plots.html"
MIN_TRIALS_OF_PLOTS = 20  # for fewer trials, a table is better


@dataclass(frozen=True)
class Results:
    plan: SweepPlan
    counts: Mapping[TrialStatus, int]  # the number of trials in the search, by status
    records: Sequence[TrialRecord]  # the trials of the search
    remeasured: Sequence[TrialRecord]  # the trials of the finals and node comparisons
    earlier_attempts: Sequence[TrialRecord]  # trials that retries have replaced; not counted
    best: Sequence[TrialRecord]  # the ranked trials of the search, best first
    finalists: Sequence[FinalistResult]  # best first; empty with several objectives
    gpus: list[per_gpu.GpuResult]  # GPUs that were measured side by side, slowest first
    front: Front | None = None  # None with one objective, or without a ranked trial

    @staticmethod
    def collect(plan: SweepPlan, study: Study, progress: SweepProgress) -> Results:
        records, best = study.current_records, progress.ranked_trials()
        criteria, finals = plan.criteria, plan.config.finals
        searched = [record for record in records if not record.remeasurement]
        return Results(
            plan=plan,
            counts=Counter(record.status for record in searched),
            records=searched,
            remeasured=[record for record in records if record.remeasurement],
            earlier_attempts=[record for record in study.records.values() if record.number in study.replaced],
            best=best,
            finalists=[] if criteria.has_front else finalist_results(best, finals.top, records, criteria),
            gpus=per_gpu.per_gpu_results(records),
            front=measure_front(best, records, criteria, finals.top),
        )

    @property
    def objective(self) -> str:
        return self.plan.config.workload.objective

    @property
    def direction(self) -> str:
        return self.plan.config.workload.direction

    @property
    def has_failures(self) -> bool:
        """Whether any trial failed, or too many trials are inconclusive."""
        return any(record.status in BAD for record in self.every) or self.is_inconclusive

    @property
    def is_inconclusive(self) -> bool:
        count = sum(record.status is TrialStatus.INCONCLUSIVE for record in self.every)
        return count > MAX_INCONCLUSIVE * len(self.every)

    @property
    def every(self) -> list[TrialRecord]:
        """The trials of the search, the finals and the node comparisons."""
        return [*self.records, *self.remeasured]

    @property
    def lost_finalists(self) -> list[TrialRecord]:
        """The finalists that have no result because too few of their rounds were complete."""
        chosen = select_finalists(self.best, self.plan.criteria, self.plan.config.finals.top)
        group = tuple(sorted(trial.number for trial in chosen))  # earlier finals may have had other finalists
        begun = any(record.remeasurement and record.remeasurement.group == group for record in self.remeasured)
        compared = {row.trial.number for row in self.finalists} | {point.trial.number for point in self._certified}
        return [trial for trial in chosen if begun and trial.number not in compared]

    @property
    def winner(self) -> TrialRecord | None:
        """The winner of the finals, the leader of the front, or else the search's best trial."""
        if first := self.first_finalist:
            return first.trial
        if self.front:
            return self.front.leader
        exceeding = {finalist.trial.number for finalist in self.finalists}  # a finalist within limits would have won
        return next((trial for trial in self.best if trial.number not in exceeding), None)

    @property
    def first_finalist(self) -> FinalistResult | None:
        """The best finalist within the limits, or None."""
        return self.finalists[0] if self.finalists and not self.finalists[0].exceeded else None

    def text_files(self) -> dict[str, str]:
        columns: dict[int, dict[str, object]] = {
            number: {"beyond_limits": "; ".join(map(str, limits))} for number, limits in self.exceeded.items()
        }
        columns |= {number: {"front": "yes"} for number in self.front_numbers}
        for point in self._certified:
            columns.setdefault(point.trial.number, {})["front_share"] = point.share
        files = {"trials.csv": trial_tables.trials_csv([*self.every, *self.earlier_attempts], columns)}
        return files | ({"gpus.csv": trial_tables.csv_of([vars(gpu) for gpu in self.gpus])} if self.gpus else {})

    @cached_property
    def exceeded(self) -> dict[int, list[Limit]]:
        """The limits that complete trials of the search exceed, by trial number. Other trials are left out."""
        criteria, complete = self.plan.criteria, [r for r in self.records if self.plan.criteria.values(r) is not None]
        return {record.number: limits for record in complete if (limits := criteria.exceeded(record))}

    @property
    def _certified(self) -> Sequence[FrontPoint]:
        return self.front.certified if self.front else ()

    @property
    def front_numbers(self) -> list[int]:
        return self.front.numbers if self.front else []

    @property
    def other_objectives(self) -> tuple[str, ...]:
        return self.plan.criteria.metrics[1:] if self.front else ()

    @property
    def has_plots(self) -> bool:
        return len(self.best) >= MIN_TRIALS_OF_PLOTS and len(self.plan.space.dimensions) > 0

    def has_files(self) -> bool:
        """Return whether the sweep's folder contains all files and plots of these results."""
        names = {"trials.csv": True, "gpus.csv": self.gpus, PLOTS: self.has_plots}
        return all((self.plan.folder / name).exists() for name, is_due in names.items() if is_due)

    def metrics(self) -> dict[str, float]:
        """Return the sweep's metrics: `best_…` from the search's best trial and `final_…` from the finals' winner."""
        metrics = self.prediction_quality()
        final = None
        if self.front:
            metrics["front_trials"] = float(len(self.front.numbers))
        for point in self._certified:
            metrics["front_rounds"] = float(point.rounds)
            final = point.values[self.objective] if point.trial is self.winner else final
        if first := self.first_finalist:
            final = first.value
            metrics |= {"final_trial": float(first.trial.number), "final_rounds": float(first.rounds)}
        if final:
            metrics |= final.to_metrics(f"final_{self.objective}")
        best = self.best[0].metrics if self.best else {}
        return metrics | {f"best_{name}": value for name, value in best.items()}

    def prediction_quality(self) -> dict[str, float]:
        """Return the median relative error and the Spearman rank correlation of the estimates, if there are any."""
        pairs = [(r.metrics.get(f"predicted_{self.objective}"), r.metrics[self.objective]) for r in self.best]
        pairs = [pair for pair in pairs if pair[0]]
        if not pairs:
            return {}
        import pandas as pd  # takes a third of a second; a sweep without estimates does not need it

        table = pd.DataFrame(pairs, columns=["predicted", "measured"])
        quality = {"predicted_error": float((table.predicted / table.measured - 1).abs().median())}
        order = table.rank().corr().to_numpy()[0, 1] if len(table) > 2 else math.nan
        return quality if math.isnan(order) else quality | {"predicted_order": float(order)}

    def projection_tags(self) -> dict[str, str]:
        """Return the winner's projection to more devices, if there are estimates, as tags for the parent run."""
        plan = self.plan
        if not (plan.estimates and self.winner):
            return {}
        point, objective = dict(self.winner.params), plan.estimates.objective
        per_node = plan.target.devices_per_node(plan.resources.gpus)
        step = cost_model.nodes_step(plan.resources.gpus, per_node)
        nodes = plan.resolved.projection_nodes or [step * count for count in PROJECTED_NODES]
        projection = cost_model.project(plan.resolved, plan.space, plan.estimates, point, nodes, per_node)
        if projection is None:
            return {}
        projection = projection.anchored(self.metrics().get(f"final_{objective}", self.winner.metrics[objective]))
        projected = {f"projected_{objective}": json.dumps(projection.by_devices)}
        return projected | {"projection_assumes": projection.assumptions}

    def draw_plots(self, study: Study) -> list[Path]:
        """Write the page of plots in the sweep's folder and return its path. A small search has no plots.

        The page includes plotly.js (5 MB), so it opens anywhere, even in MLflow's artifact view."""
        if not self.has_plots:
            return []
        from sweeper.pages import search_plots  # plotly and pandas take a second; a small search does not need them
        from sweeper.pages.front_plot import build_front_chart
        from sweeper.pages.html_page import build_page

        in_order = sorted(self.best, key=lambda record: record.number)
        charts = [*search_plots.build_charts(in_order, study.distributions, self.objective, self.direction)]
        if self.front:
            charts.insert(0, build_front_chart(in_order, self.plan.criteria.metrics, self.front.numbers))
        page = self.plan.folder / PLOTS
        page.parent.mkdir(exist_ok=True)
        page.write_text(build_page(f"{self.plan.name}: {get_metric(self.objective).heading}", charts))
        return [page]

    def keep_ceilings(self) -> None:
        """If the search was for the highest matmul rate, store the rates for later training runs on such devices."""
        is_for_rate = (self.objective, self.direction) == ("tflops", "maximize")
        if is_for_rate and self.best and self.plan.resolved.workload.is_matmul_ceiling:
            rates = ceilings.from_sweep(self.plan.target.model, self.best, self.finalists)
            ceilings.keep(self.plan.directory, rates)

    @cached_property
    def correction(self) -> Correction | None:
        """The ratio of measured to planned step times, or None if there are no estimates or too few trials. There is no
        correction for a space with several routings either, because a single factor would mix them."""
        plan = self.plan
        if plan.estimates is None or not self.records or corrections.ROUTING in plan.space.dimensions:
            return None
        place = place_of(plan.target, plan.resolved, plan.space, plan.estimates.machine, plan.calibration)
        return corrections.from_sweep(place, plan.estimates.correction, plan.estimates.metrics_of, self.records)

    def export(self) -> dict[str, Any]:
        """Return the results as plain values for programs (`progress=json`)."""
        winner = self.winner
        return {
            "sweep": self.plan.name,
            "folder": str(self.plan.folder),
            "device": self.plan.target.model,
            "outcomes": {status.value: count for status, count in self.counts.items()},
            "best": {"params": dict(winner.params), "metrics": dict(winner.metrics)} if winner else None,
            "finals": [_export_row(finalist) for finalist in self.finalists],
            **({"front": self.front.numbers} if self.front else {}),
            **({"certified": [_export_row(point) for point in self._certified]} if self._certified else {}),
        }


def _export_row(row: FinalistResult | FrontPoint) -> dict[str, Any]:
    fields = asdict(row)
    trial = fields.pop("trial")
    verdict = {"verdict": row.verdict} if isinstance(row, FrontPoint) else {}
    return {"trial": trial["number"], "params": trial["params"], **fields, **verdict}
