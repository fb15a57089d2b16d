"""End a run of a sweep: write the results to disk and to MLflow, and print the summary."""

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sweeper.cli.exits import COMPLETE, INTERRUPTED, SOME_FAILED, StopRequests
from sweeper.commands.best.files import FOLDER, build_files
from sweeper.commands.sweep.opening import OpenedSweep
from sweeper.common.clock import PhaseClock
from sweeper.common.format import format_interval, format_phases
from sweeper.common.trials import BAD, WITHOUT_RESULT, TrialStatus, narrowest_retry
from sweeper.metrics.derivation import MEMORY_METRICS
from sweeper.metrics.intervals import Interval
from sweeper.pages import trial_tables
from sweeper.pages.plan_view import LONG_S
from sweeper.pages.progress import Progress
from sweeper.pages.summary import Recording, Summary
from sweeper.pages.sweep_results import Results
from sweeper.pages.terminal import terminal_width, wrap_line
from sweeper.preflight import corrections
from sweeper.preflight.sweep_plan import SweepPlan
from sweeper.results.description import SweepEnd
from sweeper.results.stored import Winner, front_value, measured_value
from sweeper.search.finals import DEFAULT_FINALISTS, FinalistResult
from sweeper.search.front import FrontPoint
from sweeper.search.progress import SweepProgress
from sweeper.tracking import mlflow_store, mlflow_view
from sweeper.tracking.mlflow_view import RANKED_TRIALS, RankedTrial, SweepView
from sweeper.tracking.provenance import compute_digest
from sweeper.tracking.shown_metrics import FINAL, USUAL, shown_metrics, shown_name, varying_metrics
from workloads.api import secrets

# A server that restarted on a busy machine responded after 54 to 82 s. A person can rerun the command, but the runs of
# a batch job might stay RUNNING forever. An interrupted sweep has little time before it is killed.
STORE_PATIENCE_S = 20.0
STORE_PATIENCE_UNATTENDED_S = 120.0
# Users should not have to wait for the report. A batch system kills all remaining processes when the command ends.
REPORT_PATIENCE_S = 2.0
REPORT_PATIENCE_UNATTENDED_S = 120.0
MANY_PENDING = 20  # above this number of unwritten records, print a note, because writing takes noticeably long


@dataclass(frozen=True)
class FinishedRun:
    """A run of a sweep whose trial loop has ended."""

    plan: SweepPlan
    opened: OpenedSweep
    drained: Sequence[str]  # one line for each drained node
    clock: PhaseClock
    error: str  # why the loop ended before the budget was used up; empty otherwise
    stop: StopRequests
    is_interrupted: bool  # whether a person or a batch system stopped the sweep early
    is_over: bool  # whether the budget is used up and no finals are left

    def close(self, display: Progress) -> int:
        """Store the results, end the parent run, print the summary, and return the exit code."""
        study, progress, tracking = self.opened.study, self.opened.progress, self.opened.tracking
        results = Results.collect(self.plan, study, progress)
        if self.is_over:
            results.keep_ceilings()
            if results.correction:  # for later sweeps and plans on the same cluster
                corrections.keep(self.plan.directory, results.correction)
        self._keep_winner(results, display)
        stopped = self.error
        if stopped and stopped == progress.stop_reason:  # too many trials failed
            advice = "remove the cause and retry; with budget.same_failures=null no sweep stops for this"
            stopped = f"{stopped}\n         {advice}"
        commands = _next_commands(self.opened.arguments, results, progress)
        summary = Summary(results, self.opened.command, **commands, drained=self.drained, stopped=stopped)
        is_written = self._write(display, results, summary)
        uri, pending, error = self.plan.config.tracking.uri, tracking.pending, tracking.last_error
        runs_page = mlflow_view.runs_page(tracking.experiment_id, self.plan.name, tracking.view_key)
        recording = Recording(uri, runs_page, pending, error, is_complete=is_written, refused=tracking.refused)
        summary.print(recording, is_over=self.is_over, is_exhausted=study.exhausted)
        has_complete = bool(results.counts.get(TrialStatus.COMPLETE))
        has_complete &= not self.plan.criteria.describe_unmet(results.records)
        is_complete = has_complete and is_written and not (results.has_failures or self.error or tracking.refused)
        code = INTERRUPTED if self.stop.requested else COMPLETE if is_complete else SOME_FAILED
        self.stop.leave_at_once = True  # the table is already printed
        self.clock.enter("report")
        if not self.stop.requested:  # after a stop request, no one waits for the report
            tracking.wait_for_report(REPORT_PATIENCE_S if is_attended() else REPORT_PATIENCE_UNATTENDED_S)
        seconds = self.clock.seconds()
        print(wrap_line(f"took     {format_phases(seconds)}", terminal_width()), flush=True)
        if seconds.get("trials", 0.0) >= LONG_S:
            print(f"timed    {progress.timed_share:.0%} of the trials' time was timed steps", flush=True)
        took_s = {name: round(value, 3) for name, value in seconds.items()}
        retry = summary.retry_command
        display.end({**results.export(), "stopped": self.error, "retry": retry, "took_s": took_s, "exit_code": code})
        return code

    def _keep_winner(self, results: Results, display: Progress) -> None:
        winner, first, criteria = results.winner, results.first_finalist, results.plan.criteria
        value: Winner | None = None
        if first:
            value = Winner(first.trial.number, *first.value.bounds, first.rounds)
        elif winner is not None:  # without finals, use the measurement in the search
            value = front_value(results.front, winner, criteria) if results.front else measured_value(winner, criteria)
        if winner is None:  # the files of an earlier winner, which a changed limit excludes
            shutil.rmtree(self.plan.folder / FOLDER, ignore_errors=True)
        else:
            try:
                build_files(self.opened.description, winner, value, self.plan.folder / FOLDER).write()
            except Exception as error:  # a failed file must never cost the table
                display.note(f"no {FOLDER}/: {type(error).__name__}: {error}")
        end = SweepEnd(
            is_over=self.is_over,
            reason=self.error,
            winner=value.trial if value else None,
            value=value.value if value else None,
            low=value.low if value and not math.isnan(value.low) else None,
            high=value.high if value and not math.isnan(value.high) else None,
            rounds=value.rounds if value else 0,
            at_s=time.time(),
            front=tuple(results.front_numbers),
            failed=sum(record.status in BAD for record in results.every),
        )
        replace(self.opened.description, end=end).write(self.plan.folder)

    def _write(self, display: Progress, results: Results, summary: Summary) -> bool:
        """Write the result files and end the parent run. Return whether everything is written. The plots and the report
        take minutes for 100,000 trials, so a rerun of a finished sweep skips them if the digest is unchanged."""
        study, tracking = self.opened.study, self.opened.tracking
        message: dict[str, Any] = {  # for `Store.close`, without the files, because the trials determine them
            "status": "KILLED" if self.is_interrupted else "FAILED" if self.error else "FINISHED",
            "metrics": describe_winner(results) | results.metrics(),
            "tags": {
                mlflow_store.DESCRIPTION: summary.markdown(),
                "outcome": trial_tables.format_counts(results.counts),
                "winner": summary.verdict(),
                mlflow_store.LIMITS: json.dumps({m.metric: [m.bound, m.direction] for m in self.plan.criteria.limits}),
                **results.projection_tags(),
                **({"drained": "\n".join(self.drained)} if self.drained else {}),
            },
            "abandoned": study.abandoned,
            "written": study.trial_count if study.trial_count == len(study.records) + len(study.abandoned) else None,
        }
        view = build_view(results)
        front = results.front_numbers if self.plan.criteria.has_front else None
        written = {"closing": message, "view": asdict(view)} | ({} if front is None else {"front": front})
        digest = compute_digest(written)
        ran_nothing = self.is_over and not self.opened.progress.finished_in_this_run
        if ran_nothing and results.has_files() and tracking.has_results(digest):
            display.note("finished before: nothing is left to run, and its results are written")
            return True
        texts = results.text_files()
        for name, text in texts.items():
            (self.plan.folder / name).write_text(text)
        plots: list[str] = []
        try:
            plots = [] if self.is_interrupted else [str(path) for path in results.draw_plots(study)]
        except Exception as error:  # a failed plot must never cost the table
            display.note(f"no plots: {type(error).__name__}: {error}")
        # Waiting helps if a server restarts, but not if a disk is full or a file is locked.
        is_server = not (self.plan.config.tracking.uri or "sqlite").startswith("sqlite")
        is_short = self.is_interrupted or is_attended() or not is_server
        patience_s = STORE_PATIENCE_S if is_short else STORE_PATIENCE_UNATTENDED_S
        if tracking.last_error:
            display.note(f"not written to MLflow yet ({tracking.last_error}): trying for up to {patience_s:g} s")
        if tracking.is_open and tracking.pending > MANY_PENDING:
            display.note(f"writing {tracking.pending} results to MLflow; press Ctrl-C to leave them to the next start")
        if front is not None:
            tracking.log_front(front)
        closing = {**message, "artifacts": texts, "plots": plots, "digest": digest}
        return tracking.close(closing, view, patience_s, lambda: self.stop.requested and not self.is_interrupted)


def _next_commands(arguments: Sequence[str], results: Results, progress: SweepProgress) -> dict[str, str]:
    def change(changes: Mapping[str, str | None]) -> str:  # None removes a setting
        kept = [argument for argument in arguments if argument.partition("=")[0] not in changes]
        added = [f"{name}={value}" for name, value in changes.items() if value is not None]
        return shlex.join(secrets.masked_arguments([*kept, *added]))

    # Double the limits that ended the sweep. The sweep may already have used more than the limit.
    limits, used = progress.exhausted_limits(), progress.used()
    doubled = {f"budget.{name}": f"{2 * max(limit, used[name]):.3g}" for name, limit in limits.items()}
    doubled = {name: f"{float(value):.15g}" for name, value in doubled.items()}  # no exponent
    commands = {"extend_command": change({"retry": None, **doubled}), "ended_by": progress.describe_exhausted()}
    if statuses := {record.status for record in (*results.records, *results.remeasured)} & set(WITHOUT_RESULT):
        # Use the narrowest value that covers all these trials, without infeasible trials if possible.
        name, has_infeasible = narrowest_retry(statuses), results.counts.get(TrialStatus.INFEASIBLE)
        commands["retry_command"] = change({"retry": "failed" if name == "all" and has_infeasible else name})
    if results.front is not None and not results.plan.config.finals.top:  # else the finals remeasure the front
        commands["certify_command"] = change({"retry": None, "finals.top": str(DEFAULT_FINALISTS)})
    return commands


def is_attended() -> bool:
    """Return whether a person, rather than a batch job, is waiting for the command."""
    return sys.stdout.isatty() and "SLURM_JOB_ID" not in os.environ


def build_view(results: Results) -> SweepView:
    """Return the view of a sweep for MLflow's pages: the best trials, starting with the finalists."""
    objective, front = results.objective, results.front
    certified = front.certified if front else ()
    rows: list[FinalistResult | FrontPoint] = [*results.finalists, *certified]
    finalists = [_rank(row, objective) for row in rows if not row.exceeded]
    exceeding = [_rank(row, objective) for row in rows if row.exceeded]
    numbers = {row.trial.number for row in rows}
    others = [
        RankedTrial(trial.number, {}, format_interval(*Interval.read(trial.metrics, objective).bounds[1:]))
        for trial in results.best
        if trial.number not in numbers
    ]
    objectives = (objective, *results.other_objectives)
    varying = varying_metrics([trial.metrics for trial in results.best])
    metrics = [shown_name(objective, FINAL)] * bool(finalists) + [shown_name(name) for name in objectives]
    metrics += ["front"] * bool(front) + ["front_share"] * bool(certified)
    metrics += [shown_name(name) for name in varying if name not in objectives]
    return SweepView(
        objective=objective,
        metrics=metrics,
        parameters=trial_tables.varying_parameters(results.records),
        memory=next((name for name in MEMORY_METRICS if name in varying), ""),
        ranking=[*finalists, *others[: max(0, RANKED_TRIALS - len(numbers))], *exceeding],
        other_objectives=results.other_objectives,
    )


def describe_winner(results: Results) -> dict[str, float]:
    """Return the winner's metrics for the sweep's row in MLflow, starting with the values from the finals."""
    if (winner := results.winner) is None:
        return {}
    rows: list[FinalistResult | FrontPoint] = [*results.finalists, *(results.front.certified if results.front else ())]
    finals = next((_rank(row, results.objective).metrics for row in rows if row.trial is winner), {})
    final = {name: value for name, value in finals.items() if name.startswith(FINAL)}
    return final | shown_metrics(winner.metrics, [results.objective, *results.other_objectives, *USUAL])


def _rank(row: FinalistResult | FrontPoint, objective: str) -> RankedTrial:
    values = row.values if isinstance(row, FrontPoint) else {objective: row.value}
    metrics: dict[str, float] = {}
    for name, value in values.items():
        known = {metric: bound for metric, bound in value.to_metrics(name).items() if not math.isnan(bound)}
        metrics |= shown_metrics(known, [name], FINAL) | {f"final_{name}": bound for name, bound in known.items()}
    tags = {mlflow_store.EXCEEDED: "; ".join(row.exceeded)}
    if isinstance(row, FrontPoint):
        metrics[mlflow_store.FRONT_SHARE] = row.share
        tags[mlflow_store.FRONT_VERDICT] = row.verdict
        tags[mlflow_store.SAME_AS] = ", ".join(map(str, row.same_as))
    filled = {name: text for name, text in tags.items() if text}
    return RankedTrial(row.trial.number, metrics, format_interval(*values[objective].bounds[1:]), filled)
