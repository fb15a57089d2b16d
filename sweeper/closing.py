"""The end of a sweep's run: results on disk, in MLflow and on the terminal."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweeper.common.exit_codes import COMPLETE, INTERRUPTED, SOME_FAILED
from sweeper.common.trials import TrialRecord, TrialStatus, exact_value
from sweeper.planning.plan import Plan
from sweeper.search.finals import FinalistResult
from sweeper.search.progress import SweepProgress
from sweeper.search.study import Study
from sweeper.tracking import mlflow_store, mlflow_view
from sweeper.tracking.client import TrackingClient
from sweeper.tracking.mlflow_view import MEMORY_METRICS, RANKED_TRIALS, RankedTrial, SweepView
from sweeper.ui import tables
from sweeper.ui.format import format_number
from sweeper.ui.progress import Progress
from sweeper.ui.results import Results
from sweeper.ui.summary import Recording, Summary
from workloads.api import secrets

MLFLOW_PATIENCE_S = 20.0
MANY_PENDING = 20  # records that take long enough to write that a note is due


@dataclass(frozen=True)
class FinishedRun:
    """One run of a sweep whose loop has ended.

    Attributes:
        arguments: the command line that resumes the sweep.
        drained: a line for each node that was drained.
        error: why the loop ended before the budget; empty if it did not.
        is_interrupted: a person or a batch system stopped it.
        is_over: the budget is used up and no finals are left.
    """

    plan: Plan
    study: Study
    progress: SweepProgress
    arguments: Sequence[str]
    drained: Sequence[str]
    error: str
    is_interrupted: bool
    is_over: bool

    def close(self, tracking: TrackingClient, display: Progress) -> int:
        """Store the results, end the parent run and print the summary. Returns the exit code."""
        results = Results.collect(self.plan, self.study, self.progress)
        texts = results.text_files()
        for name, text in texts.items():
            (self.plan.folder / name).write_text(text)
        if self.is_over:
            results.keep_ceilings()
        command = shlex.join(secrets.masked_arguments(self.arguments))
        summary = Summary(results, command, extend_command(self.arguments, self.progress), self.drained)
        plots = [] if self.is_interrupted else self._draw_plots(results, display)
        closing = self._closing_message(results, summary, texts, plots)
        if tracking.is_open and tracking.pending > MANY_PENDING:
            display.note(f"writing {tracking.pending} results to MLflow; press Ctrl-C to leave them to the next start")
        is_written = tracking.close(closing, build_view(results), MLFLOW_PATIENCE_S)
        recording = self._recording(tracking, is_written)
        summary.print(recording, is_over=self.is_over, is_exhausted=self.study.exhausted)
        if self.error:
            print(f"stopped  {self.error}")
        code = self._exit_code(results, is_written)
        display.end({**results.export(), "exit_code": code})
        return code

    def _closing_message(
        self, results: Results, summary: Summary, texts: dict[str, str], plots: list[str]
    ) -> dict[str, Any]:
        """Return the arguments of `Store.close`."""
        tags = {
            mlflow_store.DESCRIPTION: summary.markdown(),
            "outcome": tables.format_counts(self.progress.counts),
            "winner": summary.verdict(),
            **results.projection_tags(),
            **({"drained": "\n".join(self.drained)} if self.drained else {}),
        }
        return {
            "status": "KILLED" if self.is_interrupted else "FAILED" if self.error else "FINISHED",
            "metrics": results.metrics(),
            "tags": tags,
            "artifacts": texts,
            "plots": plots,
            "abandoned": self.study.abandoned,
        }

    def _recording(self, tracking: TrackingClient, is_written: bool) -> Recording:
        return Recording(
            uri=self.plan.config.tracking.uri,
            runs_page=mlflow_view.runs_page(tracking.experiment_id, self.plan.name, tracking.view_key),
            pending=tracking.pending,
            error=tracking.last_error,
            is_complete=is_written,
        )

    def _draw_plots(self, results: Results, display: Progress) -> list[str]:
        try:
            return [str(path) for path in results.draw_plots(self.study)]
        except Exception as error:  # a plot is never worth losing a table
            display.note(f"no plots: {type(error).__name__}: {error}")
            return []

    def _exit_code(self, results: Results, is_written: bool) -> int:
        if self.is_interrupted:
            return INTERRUPTED
        none_complete = not self.progress.counts[TrialStatus.COMPLETE]
        return SOME_FAILED if results.has_failures or self.error or not is_written or none_complete else COMPLETE


def extend_command(arguments: Sequence[str], progress: SweepProgress) -> str:
    """Return the command with twice the limits that ended the sweep, which may have had more before."""
    exhausted = {f"budget.{name}": limit for name, limit in progress.exhausted_limits().items()}
    if "budget.trials" in exhausted:
        exhausted["budget.trials"] = progress.finished_trials
    kept = [argument for argument in arguments if argument.partition("=")[0] not in exhausted]
    doubled = [f"{name}={2 * limit:.15g}" for name, limit in exhausted.items()]
    return shlex.join(secrets.masked_arguments([*kept, *doubled]))


def build_view(results: Results) -> SweepView:
    """Return what MLflow's pages show of a sweep: its best trials with those of the finals first."""
    objective, plan = results.objective, results.plan
    finalists = [_rank_finalist(finalist, objective) for finalist in results.finalists]
    numbers = {trial.number for trial in finalists}
    others = [_rank_trial(trial, objective) for trial in results.best if trial.number not in numbers]
    measured = results.best[0].metrics if results.best else {}
    metrics = [f"final_{objective}"] if finalists else []
    metrics += [objective, *(name for name in ("mfu", *MEMORY_METRICS) if name in measured)]
    return SweepView(
        objective=objective,
        minimize=results.direction == "minimize",
        metrics=metrics,
        parameters=list(plan.space.dimensions),
        space={name: exact_value(value) for name, value in plan.space.described().items()},
        ranking=[*finalists, *others][:RANKED_TRIALS],
    )


def _rank_finalist(finalist: FinalistResult, objective: str) -> RankedTrial:
    value = finalist.value
    name = f"final_{objective}"
    metrics = {name: value.value, f"{name}_ci_low": value.low, f"{name}_ci_high": value.high}
    known = {name: bound for name, bound in metrics.items() if not math.isnan(bound)}
    return RankedTrial(finalist.trial.number, known, _format_interval(value.low, value.high))


def _rank_trial(trial: TrialRecord, objective: str) -> RankedTrial:
    low, high = (trial.metrics.get(f"{objective}_ci_{bound}", math.nan) for bound in ("low", "high"))
    return RankedTrial(trial.number, {}, _format_interval(low, high))


def _format_interval(low: float, high: float) -> str:
    return "" if math.isnan(low) or math.isnan(high) else f"{format_number(low)} to {format_number(high)}"
