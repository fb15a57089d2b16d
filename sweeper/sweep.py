"""The loop: ask, submit, collect, record. The only room that knows all the others."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

from omegaconf import OmegaConf

from sweeper import cluster, lock, metrics, progress, provenance, table
from sweeper.board import Board
from sweeper.outcome import Ending, Outcome, Record
from sweeper.plan import Plan
from sweeper.recorder import Recorder
from sweeper.search import Study, Trial
from sweeper.summary import Summary

COMPLETE, SOME_FAILED, INTERRUPTED = 0, 1, 130
RECORDER_PATIENCE_S = 20.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Sweep:
    """One sweep, from its lock to its table. `arguments` are what the user said, to say again."""

    def __init__(self, planned: Plan, arguments: Sequence[str]) -> None:
        self._plan, self._config = planned, planned.config
        self._arguments = arguments
        self._command = provenance.mask(shlex.join(arguments))
        self._lock = lock.take(planned.folder)
        said = planned.config.workload
        self._study = Study(
            planned.folder / "study.journal",
            planned.identity,
            planned.space,
            sampler=planned.config.search.sampler,
            seed=planned.config.seed,
            objective=said.objective,
            direction=said.direction,
            first=planned.first,
        )
        self._provenance = provenance.gather(planned.target, arguments)
        self._recorder = Recorder(self._opening(), planned.folder, planned.folder.parent.parent, self._lock.fileno())
        for record in self._study.records.values():
            self._recorder.add(record)
        self._board = Board(said.objective, said.direction, planned.config.budget, self._study.records.values())
        self._progress = progress.make(planned.config.progress)
        self._pool: cluster.Pool | None = None
        self._attempts: Counter[int] = Counter()
        self._stops = 0

    # ── from beginning to end ──

    def run(self) -> int:
        """Run it, or what is left of it; the exit code."""
        before = [signal.getsignal(signum) for signum in SIGNALS]
        self._heed_signals()
        try:
            self._introduce()
            trouble = self._run_on_cluster() if self._study.unfinished or self._wants_more() else ""
            return self._finish(trouble)
        except BrokenPipeError:
            raise
        except OSError as error:  # the disk is full, or gone
            what = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
            self._progress.note(f"sweeper: {what}; what had finished is kept; to resume:\n  {self._command}")
            return SOME_FAILED
        finally:
            # Another sweep may follow in this process.
            for signum, handler in zip(SIGNALS, before, strict=True):
                signal.signal(signum, handler)
            self._recorder.abandon()
            self._lock.close()

    def _run_on_cluster(self) -> str:
        """Search until the budget is used up; what stopped it before that, or nothing."""
        # Ray prints what befalls workers to standard output, which is for results.
        with (self._plan.folder / "ray.log").open("a") as log, redirect_stdout(log):
            try:
                with self._progress:
                    self._progress.update(self._state())
                    cluster.start(self._plan.target)
                    self._heed_signals()  # Ray has put its own handlers in place
                    if self._plan.target.hardware.kind == "cpu":
                        os.nice(5)  # behind the trials, which are timed on the cores that this process shares
                    self._board.start()
                    self._search()
            except cluster.ClusterTrouble as error:
                self._cancel_in_flight()
                return str(error)
            except SystemExit:  # Ray's own answer to SIGTERM, while it starts
                self._stops += 1
            finally:
                cluster.stop()
        return ""

    def _search(self) -> None:
        limits = self._config.trial
        self._pool = cluster.Pool(
            self._plan.target,
            workload=self._config.workload.name,
            constants=self._plan.space.constants,
            size=self._config.gpus,
            count=self._plan.gangs,
            timeout_s=limits.timeout_s,
        )
        stop_by_s: float | None = None
        while True:
            if self._stops and stop_by_s is None:
                stop_by_s = time.monotonic() + limits.grace_s
                self._progress.note(
                    f"stopping: {limits.grace_s:g} s for the trials in flight; Ctrl-C again leaves at once"
                )
                self._cancel_unfinished()
            self._fill()
            if not (self._pool.in_flight() or self._study.unfinished or self._wants_more()):
                break
            for trial, outcome in self._pool.wait(0.25):
                self._take(trial, outcome)
            if stop_by_s is not None and time.monotonic() > stop_by_s:
                self._cancel_in_flight()
            self._recorder.watch()
            self._progress.update(self._state())
        self._pool.close()

    def _fill(self) -> None:
        """Give every gang its next trial, while there are trials to give."""
        assert self._pool is not None
        while self._pool.room() > 0 and (self._study.unfinished or self._wants_more()):
            trial = self._study.ask()
            if trial is None:
                return
            self._pool.submit(trial)

    def _wants_more(self) -> bool:
        in_flight = len(self._pool.in_flight()) if self._pool else 0
        return not (self._stops or self._study.exhausted) and self._board.wants_more(in_flight)

    def _heed_signals(self) -> None:
        for signum in SIGNALS:
            signal.signal(signum, self._stop)

    def _stop(self, *_: object) -> None:
        """First Ctrl-C or SIGTERM: no new trials. Second: out at once; the next start puts things right."""
        self._stops += 1
        if self._stops > 1:
            show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the live block hides it
            os.write(2, f"{show_cursor}\nleft at once; to resume:\n  {self._command}\n".encode())
            os._exit(INTERRUPTED)

    # ── one trial's end ──

    def _take(self, trial: Trial, outcome: Outcome) -> None:
        """A trial has ended, or was lost and is tried again."""
        assert self._pool is not None
        self._attempts[trial.number] += 1
        attempt = self._attempts[trial.number]
        if outcome.ending is Ending.LOST and self._stops:
            outcome = replace(outcome, ending=Ending.CANCELLED)  # the next run has a try left
        if outcome.ending is Ending.LOST and attempt <= self._config.trial.retries:
            self._progress.note(
                f"trial {trial.number} lost, tried again ({attempt}/{self._config.trial.retries}): {outcome.reason}"
            )
            self._pool.submit(trial)
            return
        record = self._judge(trial, outcome, attempt)
        self._study.tell(record)
        better = self._board.add(record)
        self._recorder.add(record)
        self._progress.update(self._state(), record, better)

    def _judge(self, trial: Trial, outcome: Outcome, attempts: int) -> Record:
        """The record of a trial: its metrics, or why it has none."""
        ending, reason, derived = outcome.ending, outcome.reason, dict[str, float]()
        if ending is Ending.COMPLETE:
            derived = metrics.derive(outcome.measurements, self._plan.target.hardware.dense_peak_tflops)
            objective = self._config.workload.objective
            if not math.isfinite(derived.get(objective, math.nan)):
                ending, reason = Ending.FAILED, f"no {objective} was measured; there is {', '.join(derived)}"
        return Record(
            number=trial.number,
            params=trial.params,
            ending=ending,
            reason=reason,
            detail=outcome.detail,
            metrics=derived if ending is Ending.COMPLETE else {},
            measurements=[asdict(measurement) for measurement in outcome.measurements],
            where=outcome.where,
            started_at_s=outcome.started_at_s,
            ended_at_s=outcome.ended_at_s,
            elapsed_s=self._board.elapsed_s,
            attempts=attempts,
        )

    def _cancel_in_flight(self) -> None:
        if self._pool:
            for trial, outcome in self._pool.cancel():
                self._take(trial, outcome)

    def _cancel_unfinished(self) -> None:
        """What an earlier driver left and this one did not come to: it is tried again by the next."""
        now = time.time()
        assert self._pool is not None
        for trial in self._study.unfinished[:]:
            self._study.unfinished.remove(trial)
            self._take(trial, Outcome(Ending.CANCELLED, now, now, "the sweep was stopped"))

    # ── what is said ──

    def _state(self) -> progress.State:
        flying = self._pool.in_flight() if self._pool else []
        return progress.State(
            counts=self._board.counts,
            trials=self._config.budget.trials,
            running=len(flying),
            elapsed_s=self._board.elapsed_s,
            left_s=self._board.left_s(),
            best=self._board.best,
            objective=self._config.workload.objective,
            workers=self._pool.said() if self._pool else ["starting Ray"],
            trouble=self._recorder.trouble,
            starting=self._pool is None or self._pool.starting,
            stopping=self._stops > 0,
        )

    def _introduce(self) -> None:
        """The plan in a few lines, before anything expensive."""
        planned, note = self._plan, self._progress.note
        note(f"sweep    {planned.name}")
        note(f"device   {planned.said_devices()}")
        note(f"search   {planned.said_search()}")
        for words in planned.left_out:
            note(f"left out {words}")
        if self._board.counts or self._study.unfinished:
            left = len(self._study.unfinished)
            again = f"; {left} in flight when it was killed run again" if left else ""
            note(f"resumed  {table.said_counts(self._board.counts)}{again}")

    def _opening(self) -> dict[str, Any]:
        """What the parent run says from the beginning."""
        planned, said = self._plan, self._config
        resolved = OmegaConf.to_yaml(OmegaConf.create(asdict(said)))
        versions = {f"version.{name}": version for name, version in self._provenance["versions"].items() if version}
        return {
            "uri": said.tracking.uri or "sqlite:///mlflow.db",
            "experiment": said.tracking.experiment,
            "study": self._study.id,
            "sweep": planned.name,
            "parent": {
                "params": {
                    "sweep.gpus": said.gpus,
                    "sweep.sampler": said.search.sampler,
                    "sweep.seed": said.seed,
                    **planned.space.described(),
                },
                "tags": {
                    "workload": said.workload.name,
                    "hardware": planned.target.hardware.name,
                    "device": planned.target.model,
                    "command": self._command,
                    "git_commit": self._provenance["git"].get("commit", ""),
                    **versions,
                },
                "artifacts": {
                    "config.yaml": provenance.mask(resolved),
                    "provenance.json": json.dumps(self._provenance, indent=2),
                },
            },
        }

    def _finish(self, trouble: str) -> int:
        """End the parent run, print the table and how to go on; the exit code."""
        board, planned = self._board, self._plan
        csv = table.csv(self._study.records.values())
        best = board.best_first()
        interrupted = self._stops > 0
        summary = Summary(
            title=f"{self._config.workload.name} on {planned.target.model}",
            objective=self._config.workload.objective,
            direction=self._config.workload.direction,
            best=best,
            counts=board.counts,
            records=list(self._study.records.values()),
            command=self._command,
            command_for_more=self._command_for_more(),
        )
        if self._recorder.opened and self._recorder.behind > 20:
            self._progress.note(
                f"writing {self._recorder.behind} results to MLflow; Ctrl-C leaves them to the next start"
            )
        written = self._recorder.close(
            {
                "status": "KILLED" if interrupted else "FAILED" if trouble else "FINISHED",
                "metrics": {f"best_{name}": value for name, value in best[0].metrics.items()} if best else {},
                "tags": {"mlflow.note.content": summary.markdown(), "outcome": table.said_counts(board.counts)},
                "artifacts": {"trials.csv": csv},
            },
            RECORDER_PATIENCE_S,
        )
        (planned.folder / "trials.csv").write_text(csv)
        over = not (interrupted or self._wants_more())
        summary.print(
            planned.folder,
            self._config.tracking.uri,
            self._recorder,
            written,
            over=over,
            exhausted=self._study.exhausted,
        )
        if trouble:
            print(f"stopped  {trouble}")
        failed = any(board.counts[ending] for ending in (Ending.FAILED, Ending.LOST, Ending.TIMED_OUT))
        code = SOME_FAILED if failed or trouble or not written or not best else COMPLETE
        code = INTERRUPTED if interrupted else code
        self._progress.end(
            {
                "sweep": planned.name,
                "folder": str(planned.folder),
                "device": planned.target.model,
                "outcomes": {ending.value: count for ending, count in board.counts.items()},
                "best": {"params": dict(best[0].params), "metrics": dict(best[0].metrics)} if best else None,
                "exit_code": code,
            }
        )
        return code

    def _command_for_more(self) -> str:
        """The command with twice the trials, where it was the trials that ended the sweep; else the command."""
        trials = self._config.budget.trials
        if trials is None or self._board.ended < trials:
            return self._command
        words = [word for word in self._arguments if not word.startswith("budget.trials=")]
        return provenance.mask(shlex.join([*words, f"budget.trials={2 * trials}"]))
