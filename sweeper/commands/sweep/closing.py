"""The end of a sweep's run: results on disk, in MLflow and on the terminal."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sweeper.commands.best.files import FOLDER, build_files
from sweeper.common.clock import PhaseClock
from sweeper.common.exit_codes import COMPLETE, INTERRUPTED, SOME_FAILED
from sweeper.common.format import exact_value, format_interval, format_phases
from sweeper.common.trials import BAD, TrialRecord, TrialStatus, narrowest_retry
from sweeper.metrics.derivation import EFFICIENCY, MEMORY_METRICS
from sweeper.metrics.intervals import Interval
from sweeper.pages import trial_tables
from sweeper.pages.progress import Progress
from sweeper.pages.summary import Recording, Summary
from sweeper.pages.sweep_results import Results
from sweeper.preflight.sweep_plan import SweepPlan
from sweeper.results.description import SweepDescription, SweepEnd
from sweeper.results.stored import Winner, front_value, measured_value
from sweeper.search.finals import DEFAULT_FINALISTS, FinalistResult
from sweeper.search.front import FrontPoint, measured_interval
from sweeper.search.progress import SweepProgress
from sweeper.search.study import Study
from sweeper.tracking import mlflow_store, mlflow_view
from sweeper.tracking.client import TrackingClient
from sweeper.tracking.mlflow_view import RANKED_TRIALS, RankedTrial, SweepView
from sweeper.tracking.results_digest import compute_digest
from workloads.api import secrets
from workloads.api.metrics import COST

# A server that was restarted on a busy machine answered after 54 to 82 s. A person starts the command again; after a
# batch job nobody may, and its runs would stay RUNNING. A sweep that is stopped has little time before it is killed.
STORE_PATIENCE_S = 20.0
STORE_PATIENCE_UNATTENDED_S = 120.0
# A person does not wait for the report. A batch system kills what is left when the command has ended.
REPORT_PATIENCE_S = 2.0
REPORT_PATIENCE_UNATTENDED_S = 120.0
MANY_PENDING = 20  # records that take long enough to write that a note is due


@dataclass(frozen=True)
class FinishedRun:
    """One run of a sweep whose loop has ended.

    Attributes:
        arguments: the command line that resumes the sweep.
        description: what the sweep's folder says of it.
        drained: a line for each node that was drained.
        clock: measures the phases of the run.
        error: why the loop ended before the budget; empty if it did not.
        is_interrupted: a person or a batch system stopped it.
        is_over: the budget is used up and no finals are left.
    """

    plan: SweepPlan
    study: Study
    progress: SweepProgress
    arguments: Sequence[str]
    description: SweepDescription
    drained: Sequence[str]
    clock: PhaseClock
    error: str
    is_interrupted: bool
    is_over: bool

    def close(self, tracking: TrackingClient, display: Progress) -> int:
        """Store the results, end the parent run and print the summary. Returns the exit code."""
        results = Results.collect(self.plan, self.study, self.progress)
        if self.is_over:
            results.keep_ceilings()
            results.keep_correction()
        self._keep_winner(results, display)
        summary = Summary(
            results,
            shlex.join(secrets.masked_arguments(self.arguments)),
            extend_command(self.arguments, self.progress),
            retry_command=retry_command(self.arguments, results),
            certify_command=certify_command(self.arguments, results),
            drained=self.drained,
            stopped=self._describe_stop(),
        )
        is_written = self._write(tracking, display, results, summary)
        recording = self._recording(tracking, is_written)
        summary.print(recording, is_over=self.is_over, is_exhausted=self.study.exhausted)
        code = self._exit_code(results, is_written)
        self.clock.enter("report")
        if not self.is_interrupted:  # then there is no report
            tracking.wait_for_report(REPORT_PATIENCE_S if is_attended() else REPORT_PATIENCE_UNATTENDED_S)
        seconds = self.clock.seconds()
        print(f"took     {format_phases(seconds)}", flush=True)
        took_s = {name: round(value, 3) for name, value in seconds.items()}
        retry = summary.retry_command
        display.end({**results.export(), "stopped": self.error, "retry": retry, "took_s": took_s, "exit_code": code})
        return code

    def _keep_winner(self, results: Results, display: Progress) -> None:
        """Write what runs the winner again, and how the sweep ended."""
        winner, value = results.winner, _winning_value(results)
        if winner is not None:
            try:
                build_files(self.description, winner, value, self.plan.folder / FOLDER).write()
            except Exception as error:  # a file is never worth losing a table
                display.note(f"no {FOLDER}/: {type(error).__name__}: {error}")
        end = SweepEnd(
            is_over=self.is_over,
            reason=self.error,
            winner=value.trial if value else None,
            value=value.value if value else None,
            low=_known(value.low) if value else None,
            high=_known(value.high) if value else None,
            rounds=value.rounds if value else 0,
            at_s=time.time(),
            front=tuple(results.front_numbers),
        )
        self.description.with_end(end).write(self.plan.folder)

    def _write(self, tracking: TrackingClient, display: Progress, results: Results, summary: Summary) -> bool:
        """Write the result files and end the parent run. Returns whether everything is written.

        A finished sweep that is run again has all of that, and its plots and its report take minutes for 100,000
        trials: the digest tells whether anything would differ.
        """
        message, view = self._closing_message(results, summary), build_view(results)
        front = results.front_numbers if self.plan.criteria.has_front else None
        digest = compute_digest(
            {"closing": message, "view": asdict(view), **({} if front is None else {"front": front})}
        )
        ran_nothing = self.is_over and not self.progress.finished_in_this_run
        if ran_nothing and results.has_files() and tracking.has_results(digest):
            display.note("finished before: nothing is left to run, and its results are written")
            return True
        texts = results.text_files()
        for name, text in texts.items():
            (self.plan.folder / name).write_text(text)
        plots = [] if self.is_interrupted else self._draw_plots(results, display)
        patience_s = self._store_patience_s()
        if tracking.last_error:
            display.note(f"not written to MLflow yet ({tracking.last_error}): trying for up to {patience_s:g} s")
        if tracking.is_open and tracking.pending > MANY_PENDING:
            display.note(f"writing {tracking.pending} results to MLflow; press Ctrl-C to leave them to the next start")
        if front is not None:
            tracking.log_front(front)
        files = {"artifacts": texts, "plots": plots}
        return tracking.close({**message, **files, "digest": digest}, view, patience_s)

    def _store_patience_s(self) -> float:
        uri = self.plan.config.tracking.uri or "sqlite"
        is_server = not uri.startswith("sqlite")  # a full disk or a locked file does not come back by a restart
        is_short = self.is_interrupted or is_attended() or not is_server
        return STORE_PATIENCE_S if is_short else STORE_PATIENCE_UNATTENDED_S

    def _describe_stop(self) -> str:
        """Return why the loop ended before the budget, and what to do if its trials failed."""
        if self.error and self.error == self.progress.stop_reason:
            advice = "remove the cause and retry; with budget.same_failures=null no sweep stops for this"
            return f"{self.error}\n         {advice}"
        return self.error

    def _closing_message(self, results: Results, summary: Summary) -> dict[str, Any]:
        """Return the arguments of `Store.close`, without the files, which follow from the trials."""
        tags = {
            mlflow_store.DESCRIPTION: summary.markdown(),
            "outcome": trial_tables.format_counts(results.counts),
            "winner": summary.verdict(),
            mlflow_store.LIMITS: json.dumps({limit.metric: limit.bound for limit in self.plan.criteria.limits}),
            **results.projection_tags(),
            **({"drained": "\n".join(self.drained)} if self.drained else {}),
        }
        return {
            "status": "KILLED" if self.is_interrupted else "FAILED" if self.error else "FINISHED",
            "metrics": results.metrics(),
            "tags": tags,
            "abandoned": self.study.abandoned,
            "written": self.study.trial_count if self.study.all_ended else None,
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
        none_complete = not results.counts.get(TrialStatus.COMPLETE)
        return SOME_FAILED if results.has_failures or self.error or not is_written or none_complete else COMPLETE


def _winning_value(results: Results) -> Winner | None:
    """Return the winner's objective: of the finals, without finals of its trial."""
    winner, first, criteria = results.winner, results.first_finalist, results.plan.criteria
    if first:
        return Winner(first.trial.number, *first.value.bounds, first.rounds)
    if winner is None:
        return None
    return front_value(results.front, winner, criteria) if results.front else measured_value(winner, criteria)


def _known(bound: float) -> float | None:
    return None if math.isnan(bound) else bound


def extend_command(arguments: Sequence[str], progress: SweepProgress) -> str:
    """Return the command with twice the limits that ended the sweep, which may have had more before."""
    exhausted = {f"budget.{name}": limit for name, limit in progress.exhausted_limits().items()}
    if "budget.trials" in exhausted:
        exhausted["budget.trials"] = progress.finished_trials
    doubled = {name: f"{2 * limit:.15g}" for name, limit in exhausted.items()}
    return _change_command(arguments, {"retry": None, **doubled})


def retry_command(arguments: Sequence[str], results: Results) -> str:
    """Return the command that runs the failed and lost trials again; empty if there are none."""
    statuses = {record.status for record in (*results.records, *results.remeasured)} & set(BAD)
    if not statuses:
        return ""
    # The narrowest value that has them all; infeasible trials are left alone where that is possible.
    name, has_infeasible = narrowest_retry(statuses), results.counts.get(TrialStatus.INFEASIBLE)
    name = "failed" if name == "all" and has_infeasible else name
    return _change_command(arguments, {"retry": name})


def certify_command(arguments: Sequence[str], results: Results) -> str:
    """Return the command that measures the front again; empty if finals do that, or there is no front."""
    if results.front is None or results.plan.config.finals.top:
        return ""
    return _change_command(arguments, {"retry": None, "finals.top": str(DEFAULT_FINALISTS)})


def _change_command(arguments: Sequence[str], changes: Mapping[str, str | None]) -> str:
    """Return the command line with these values instead of its own. None removes a setting."""
    kept = [argument for argument in arguments if argument.partition("=")[0] not in changes]
    added = [f"{name}={value}" for name, value in changes.items() if value is not None]
    return shlex.join(secrets.masked_arguments([*kept, *added]))


def is_attended() -> bool:
    """Return whether a person waits for the command, on a terminal and not in a batch job."""
    return sys.stdout.isatty() and "SLURM_JOB_ID" not in os.environ


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
