"""What a sweep has found when it ends, and the forms in which it is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper.common.trials import BAD, TrialRecord, TrialStatus
from sweeper.config.resolution import workload_of
from sweeper.planning import ceilings, cost_model
from sweeper.planning.plan import Plan
from sweeper.search.finals import FinalistResult, finalist_results
from sweeper.search.state import SweepProgress
from sweeper.search.study import Study
from sweeper.ui import per_gpu, plots, tables

PROJECTED_TO = (1, 2, 4, 8)  # times the devices of a trial, unless nodes= says others


@dataclass(frozen=True)
class Results:
    """`best` are the ranked trials of the search, the best first; `final` the finalists, likewise; `gpus` those that
    were measured side by side, the slowest first; `again` the finalists' trials."""

    plan: Plan
    counts: Mapping[TrialStatus, int]
    records: Sequence[TrialRecord]
    remeasurement: Sequence[TrialRecord]
    best: Sequence[TrialRecord]
    final: Sequence[FinalistResult]
    gpus: list[per_gpu.Member]

    @staticmethod
    def of(plan: Plan, study: Study, board: SweepProgress) -> Results:
        every, best = list(study.records.values()), board.best_first()
        said = plan.config.workload
        return Results(
            plan,
            board.counts,
            [record for record in every if not record.remeasurement],
            [record for record in every if record.remeasurement],
            best,
            finalist_results(best, plan.config.finals.top, every, said.objective, said.direction),
            per_gpu.members(every),
        )

    @property
    def objective(self) -> str:
        return self.plan.config.workload.objective

    @property
    def direction(self) -> str:
        return self.plan.config.workload.direction

    @property
    def failed(self) -> bool:
        """Whether any trial ended as it should not have."""
        return any(record.status in BAD for record in (*self.records, *self.remeasurement))

    def texts(self) -> dict[str, str]:
        """Files by name."""
        found = {"trials.csv": tables.csv([*self.records, *self.remeasurement])}
        return found | ({"gpus.csv": per_gpu.csv(self.gpus)} if self.gpus else {})

    def metrics(self) -> dict[str, float]:
        """The best trial's of the search, which chance has helped, and the winner's of the finals."""
        found = {f"best_{name}": value for name, value in self.best[0].metrics.items()} if self.best else {}
        found |= self.foresight()
        if self.final:
            figure, name = self.final[0].figure, f"final_{self.objective}"
            found |= {name: figure.value, f"{name}_ci_low": figure.low, f"{name}_ci_high": figure.high}
            found |= {"final_trial": float(self.final[0].trial.number), "final_rounds": float(self.final[0].rounds)}
        return found

    def foresight(self) -> dict[str, float]:
        """How far what was predicted of the trials was off, the median, and whether it had them in the right order
        (Spearman's rank correlation); nothing where nothing was predicted."""
        pairs = [(r.metrics.get(f"predicted_{self.objective}"), r.metrics[self.objective]) for r in self.best]
        pairs = [pair for pair in pairs if pair[0]]
        if not pairs:
            return {}
        import pandas as pd  # a third of a second, which a sweep that foresees nothing is spared

        known = pd.DataFrame(pairs, columns=["predicted", "measured"])
        found = {"predicted_error": float((known.predicted / known.measured - 1).abs().median())}
        order = known.rank().corr().to_numpy()[0, 1] if len(known) > 2 else math.nan
        return found if math.isnan(order) else found | {"predicted_order": float(order)}

    def projection(self) -> dict[str, str]:
        """What is foreseen of the winner on more devices, as tags of the parent run for whoever draws it; nothing where
        nothing is foreseen."""
        plan = self.plan
        if not (plan.foresight and self.winner):
            return {}
        nodes = plan.nodes or PROJECTED_TO
        found = cost_model.project(plan.config, plan.space, plan.foresight, dict(self.winner.params), nodes)
        if found is None:
            return {}
        return {f"projected_{self.objective}": json.dumps(found.by_devices), "projection_assumes": found.assumed}

    @property
    def winner(self) -> TrialRecord | None:
        """Of the finals where there were any, else the best of the search."""
        return self.final[0].trial if self.final else self.best[0] if self.best else None

    def pictures(self, study: Study) -> list[Path]:
        """Drawn into the sweep's folder; none of a small search."""
        in_order = sorted(self.best, key=lambda record: record.number)
        folder = self.plan.folder / "pictures"
        return plots.draw(folder, in_order, study.distributions, self.objective, self.direction)

    def keep_rates(self) -> None:
        """For what trains on such a device later, where the search was one for the highest rate."""
        wanted = (self.objective, self.direction) == ("tflops", "maximize")
        if wanted and self.best and workload_of(self.plan.config).is_matmul_ceiling:
            ceilings.keep(self.plan.directory, ceilings.of_sweep(self.plan.target.model, self.best, self.final))

    def plain(self) -> dict[str, Any]:
        """For programs."""
        winner = self.winner
        return {
            "sweep": self.plan.name,
            "folder": str(self.plan.folder),
            "device": self.plan.target.model,
            "outcomes": {status.value: count for status, count in self.counts.items()},
            "best": {"params": dict(winner.params), "metrics": dict(winner.metrics)} if winner else None,
            "finals": [standing.plain() for standing in self.final],
        }
