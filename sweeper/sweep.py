"""The loop: ask, submit, collect, record. The only room that knows all the others."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

from omegaconf import OmegaConf

from sweeper.cli.multirun import INTERRUPTED
from sweeper.common import metrics, secrets
from sweeper.common.errors import describe_os_error
from sweeper.common.trials import Remeasurement, TrialRecord, TrialResult, TrialStatus
from sweeper.config.resolution import settings_of, workload_of
from sweeper.execution import cluster, gang_pool, lock
from sweeper.execution.node_monitor import NodeMonitor
from sweeper.planning.plan import Plan
from sweeper.search.finals import still_wanted
from sweeper.search.state import SweepProgress
from sweeper.search.study import Study, Trial
from sweeper.tracking import provenance
from sweeper.tracking.client import TrackingClient
from sweeper.ui import progress, tables
from sweeper.ui.results import Results
from sweeper.ui.summary import Summary

COMPLETE, SOME_FAILED = 0, 1
RECORDER_PATIENCE_S = 20.0
STARTING_PATIENCE_S = 20.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Sweep:
    """One sweep, from its lock to its table. `arguments` are what the user said, to say again."""

    def __init__(self, planned: Plan, arguments: Sequence[str]) -> None:
        self._plan, self._config = planned, planned.config
        self._arguments = arguments
        self._command = shlex.join(secrets.masked_arguments(arguments))
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
            pruner=planned.config.search.pruner,
        )
        self._provenance = provenance.gather(planned.target, arguments)
        self._recorder = TrackingClient(self._opening(), planned.folder, planned.directory, self._lock.fileno())
        for record in self._study.records.values():
            self._recorder.add(record)
        searched = [record for record in self._study.records.values() if not record.remeasurement]
        self._board = SweepProgress(said.objective, said.direction, planned.config.budget, searched)
        self._progress = progress.make(planned.config.progress)
        self._pool: gang_pool.GangPool | None = None
        self._attempts: Counter[int] = Counter()
        self._stops = 0
        self._finishing = False
        self._nodes = NodeMonitor(planned, self._study.records)
        self._finals_ended = self._finals_asked = 0

    # ── from beginning to end ──

    def run(self) -> int:
        """Run it, or what is left of it; the exit code."""
        before = [signal.getsignal(signum) for signum in SIGNALS]
        self._heed_signals()
        try:
            self._introduce()
            trouble = self._run_on_cluster() if self._has_trials() or self._finals_wanted() else ""
            return self._finish(trouble)
        except BrokenPipeError:
            raise
        except OSError as error:  # the disk is full, or gone
            self._progress.note(
                f"sweeper: {describe_os_error(error)}; what had finished is kept; to resume:\n  {self._command}"
            )
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
                    with cluster.head_watched(self._leave_without_head):
                        if self._has_trials():
                            self._run_trials(self._plan.gangs, self._has_trials, self._study.ask)
                        self._run_finals()
            except cluster.ClusterTrouble as error:
                self._cancel_in_flight()
                if self._pool:
                    self._pool.close()
                return str(error)
            except SystemExit:  # Ray's own answer to SIGTERM, while it starts
                self._stops += 1
            finally:
                cluster.stop()
        return ""

    def _run_trials(self, count: int, wants: Callable[[], bool], ask: Callable[[], Trial | None]) -> None:
        """Run what `ask` gives on `count` gangs, for as long as `wants` says that there is more."""
        limits = self._config.trial
        self._pool = gang_pool.GangPool(
            self._plan.target,
            workload=self._config.workload.name,
            constants=self._plan.space.constants,
            settings=settings_of(self._config),
            whole_nodes=self._plan.whole_nodes,
            host_gib=self._plan.host_gib,
            collects_steps=workload_of(self._config).reports_steps,
            size=self._plan.gpus,
            count=count,
            share=self._plan.gangs,  # a finalist alone computes on as many cores as it did in the search
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
            self._compare_nodes()
            for _ in range(self._pool.room()):
                if not (wants() and (trial := ask())):
                    break
                self._pool.submit(trial)
            if not (self._pool.count_in_flight() or wants()):
                break
            for trial, outcome in self._pool.wait(0.25):
                self._take(trial, outcome)
            self._collect_steps()
            if stop_by_s is not None and time.monotonic() > stop_by_s:
                self._cancel_in_flight()
                self._pool.close()
            self._tend_nodes()
            self._recorder.watch()
            self._progress.update(self._state())
        self._collect_steps(all_of_it=True)
        self._pool.close(0 if self._stops else STARTING_PATIENCE_S)

    def _tend_nodes(self) -> None:
        """Use what joined, and no longer what is lost or set aside."""
        assert self._pool is not None
        if self._stops:
            return
        for line in self._nodes.news(may_join=not self._finals_asked):
            self._plan = replace(self._plan, target=self._nodes.target, gangs=self._nodes.gangs())
            self._pool.use(self._plan.target, 1 if self._finals_asked else self._plan.gangs)
            self._progress.note(f"{line}; {self._plan.said_gangs()}")

    def _compare_nodes(self) -> None:
        """From time to time the best trial again, on every node, while the search goes on."""
        assert self._pool is not None
        if self._finals_asked or not self._wants_more():
            return
        for record, remeasurement, node in self._nodes.to_compare(
            self._board.best, self._board.ended, self._pool.nodes_with_room()
        ):
            trial = self._study.ask_again(dict(record.params), remeasurement)
            self._nodes.compares(trial, node)
            self._pool.submit(trial, node)

    def _run_finals(self) -> None:
        """Measure the best trials again, beside each other on the same devices."""
        wanted = deque(self._finals_wanted())
        if not wanted:
            return
        finalists, rounds = (
            dict.fromkeys(remeasurement.trial for _, remeasurement in wanted),
            self._config.finals.rounds,
        )
        self._progress.note(
            f"finals   trials {', '.join(map(str, finalists))} again, in turns, {rounds} rounds, in a fresh worker"
        )

        self._finals_ended, self._finals_asked = 0, len(wanted)

        def ask() -> Trial:
            record, remeasurement = wanted.popleft()
            return self._study.ask_again(dict(record.params), remeasurement)

        self._run_trials(1, lambda: bool(wanted) and not self._stops, ask)

    def _finals_wanted(self) -> list[tuple[TrialRecord, Remeasurement]]:
        finals = self._config.finals
        if self._stops:
            return []
        return still_wanted(self._board.best_first(), finals.top, finals.rounds, self._study.records.values())

    def _has_trials(self) -> bool:
        return bool(self._study.unfinished) or self._wants_more()

    def _wants_more(self) -> bool:
        in_flight = self._pool.count_in_flight() if self._pool else 0
        return not (self._stops or self._study.exhausted) and self._board.wants_more(in_flight)

    def _heed_signals(self) -> None:
        for signum in SIGNALS:
            signal.signal(signum, self._stop)

    def _stop(self, *_: object) -> None:
        """First Ctrl-C or SIGTERM: no new trials. Second, or when there are none: out at once; the next start puts
        things right."""
        self._stops += 1
        if self._stops > 1 or self._finishing:
            self._leave("left at once", INTERRUPTED)

    def _leave_without_head(self, address: str) -> None:
        """From a thread, since Ray holds the main one. A sweep that was being stopped, as when a SIGTERM went to its
        own Ray too (`timeout`, a batch system), ends as it would have."""
        if self._stops and self._pool:
            self._cancel_in_flight()
            with redirect_stdout(sys.__stdout__):
                code = self._finish("")
            os._exit(code)
        self._leave(
            f"stopped  the cluster's head {address} does not answer; what had finished is kept. Start it again",
            SOME_FAILED,
        )

    def _leave(self, why: str, code: int) -> None:
        """From wherever this process is, at once."""
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the live block hides it
        os.write(2, f"{show_cursor}\n{why}; to resume:\n  {self._command}\n".encode())
        os._exit(code)

    # ── one trial's steps, and its end ──

    def _collect_steps(self, *, all_of_it: bool = False) -> None:
        """Steps of running trials are over."""
        assert self._pool is not None
        for trial, step, at_s, figures in self._pool.reported(all_of_it=all_of_it):
            name = tables.run_name(trial.number, trial.params, trial.remeasurement)
            self._recorder.step(trial.number, name, step, at_s, figures)
            value = figures.get(self._config.workload.objective)
            if value is not None and self._study.should_prune(trial.number, step, value):
                self._pool.end_early(trial)

    def _take(self, trial: Trial, outcome: TrialResult) -> None:
        """A trial has ended, or was lost and is tried again."""
        assert self._pool is not None
        self._attempts[trial.number] += 1
        attempt = self._attempts[trial.number]
        if outcome.status is TrialStatus.LOST and self._stops:
            outcome = replace(outcome, status=TrialStatus.CANCELLED)  # the next run has a try left
        if outcome.status is TrialStatus.LOST and attempt <= self._config.trial.retries:
            self._progress.note(
                f"trial {trial.number} lost, tried again ({attempt}/{self._config.trial.retries}): {outcome.reason}"
            )
            self._nodes.tried(trial, outcome)
            self._pool.submit(trial)
            return
        record = self._judge(trial, outcome, attempt)
        self._nodes.seen(record)
        self._study.tell(record)
        self._finals_ended += record.remeasurement is not None
        better = not record.remeasurement and self._board.add(record)
        self._recorder.add(record)
        self._progress.update(self._state(), record, better)
        if not record.remeasurement and (why := self._board.ended_alike()) and self._wants_more():
            self._progress.note(f"all trials so far ended alike, the last: {why}; Ctrl-C stops the sweep")

    def _judge(self, trial: Trial, outcome: TrialResult, attempts: int) -> TrialRecord:
        """The record of a trial: its metrics, or why it has none."""
        status, reason, derived = outcome.status, outcome.reason, dict[str, float]()
        hardware = self._plan.target.hardware
        if status is TrialStatus.COMPLETE:
            derived = metrics.derive(
                outcome.measurements, hardware.dense_peak_tflops, self._plan.reached_tflops, hardware.bandwidth_tb_s
            )
            objective = self._config.workload.objective
            if self._plan.foresight:
                derived |= self._plan.foresight.figures_of(trial.params)
            unranked = next((m.unranked for m in outcome.measurements if m.unranked), "")
            if unranked:
                derived.pop(objective, None)
                reason = unranked
            elif not math.isfinite(derived.get(objective, math.nan)):
                status, reason = TrialStatus.FAILED, f"no {objective} was measured; there is {', '.join(derived)}"
        return TrialRecord(
            number=trial.number,
            params=trial.params,
            status=status,
            reason=secrets.mask(reason),
            detail=secrets.mask(outcome.detail),
            metrics=derived if status is TrialStatus.COMPLETE else {},
            measurements=[asdict(replace(measurement, files={})) for measurement in outcome.measurements],
            files=self._keep_files(trial, outcome),
            where=outcome.where,
            started_at_s=outcome.started_at_s,
            ended_at_s=outcome.ended_at_s,
            elapsed_s=self._board.elapsed_s,
            attempts=attempts,
            remeasurement=trial.remeasurement,
        )

    def _keep_files(self, trial: Trial, outcome: TrialResult) -> list[str]:
        """Write what the ranks left into the sweep's folder; the paths."""
        paths = []
        for rank, measurement in enumerate(outcome.measurements):
            for name, content in measurement.files.items():
                path = self._plan.folder / "files" / f"{trial.number:04d}" / (f"rank{rank}_{name}" if rank else name)
                path.parent.mkdir(parents=True, exist_ok=True)
                text = path.suffix == ".txt"  # a program's log may say what it was told
                path.write_bytes(secrets.mask(content.decode(errors="replace")).encode() if text else content)
                paths.append(str(path.absolute()))
        if outcome.detail:
            words = self._plan.last_lines_of(trial.number)
            words.parent.mkdir(parents=True, exist_ok=True)
            words.write_text(secrets.mask(outcome.detail))
        return paths

    def _cancel_in_flight(self) -> None:
        """Keep that they were cancelled. Their gangs are ended after: where Ray is gone, that may not come back."""
        for trial, outcome in self._pool.cancel() if self._pool else []:
            self._take(trial, outcome)

    def _cancel_unfinished(self) -> None:
        """What an earlier driver left and this one did not come to: it is tried again by the next."""
        now = time.time()
        assert self._pool is not None
        for trial in self._study.unfinished[:]:
            self._study.unfinished.remove(trial)
            self._take(trial, TrialResult(TrialStatus.CANCELLED, now, now, "the sweep was stopped"))

    # ── what is said ──

    def _state(self) -> progress.State:
        budget = self._config.budget.trials
        trials = budget if budget is None else int(min(budget, self._plan.space.size))
        return progress.State(
            counts=self._board.counts,
            trials=trials,
            running=self._pool.count_in_flight() if self._pool else 0,
            elapsed_s=self._board.elapsed_s,
            left_s=self._board.left_s(trials),
            best=self._board.best,
            objective=self._config.workload.objective,
            workers=self._pool.said if self._pool else lambda _: ["starting Ray"],
            gangs=len(self._pool.gangs) if self._pool else 1,
            trouble=self._recorder.trouble,
            starting=self._pool is None or self._pool.starting,
            stopping=self._stops > 0,
            finals=(self._finals_ended, self._finals_asked) if self._finals_asked else None,
        )

    def _introduce(self) -> None:
        """The plan in a few lines, before anything expensive."""
        planned, note = self._plan, self._progress.note
        note(f"sweep    {planned.name}")
        note(f"device   {planned.said_devices()}")
        note(f"search   {planned.said_search()}")
        for words in planned.excluded:
            note(f"left out {words}")
        for words in planned.target.in_use():
            note(f"in use   {words}")
        if self._board.counts or self._study.unfinished:
            left = len(self._study.unfinished)
            remeasurement = f"; {left} in flight when it was killed run again" if left else ""
            note(f"resumed  {tables.said_counts(self._board.counts)}{remeasurement}")

    def _opening(self) -> dict[str, Any]:
        """What the parent run says from the beginning."""
        planned, said = self._plan, self._config
        resolved = OmegaConf.to_yaml(OmegaConf.create(secrets.masked(asdict(said))))
        versions = {f"version.{name}": version for name, version in self._provenance["versions"].items() if version}
        return {
            "uri": said.tracking.uri or "sqlite:///mlflow.db",
            "experiment": said.tracking.experiment,
            "study": self._study.id,
            "sweep": planned.name,
            "parent": {
                "began": time.strftime("%Y-%m-%d %H-%M-%S UTC", time.gmtime()),
                "params": {
                    "sweep.gpus": planned.gpus,
                    "sweep.sampler": said.search.sampler,
                    "sweep.seed": said.seed,
                    **planned.space.described(),
                },
                "tags": {
                    "workload": said.workload.name,
                    "hardware": planned.target.hardware.name,
                    "device": planned.target.model,
                    "machine": planned.said_devices(),
                    "command": self._command,
                    "git_commit": self._provenance["git"].get("commit", ""),
                    **versions,
                },
                "artifacts": {
                    "config.yaml": resolved,
                    "provenance.json": json.dumps(self._provenance, indent=2),
                },
            },
        }

    def _finish(self, trouble: str) -> int:
        """Keep what was found, end the parent run, print the table and how to go on; the exit code."""
        interrupted = self._stops > 0
        self._finishing = True
        results = Results.of(self._plan, self._study, self._board)
        over = not (interrupted or trouble or self._wants_more() or self._finals_wanted())
        texts = results.texts()
        for name, text in texts.items():
            (self._plan.folder / name).write_text(text)
        if over:
            results.keep_rates()
        aside = self._nodes.said_aside()
        summary = Summary(results, self._command, self._command_for_more(), aside)
        if self._recorder.opened and self._recorder.behind > 20:
            self._progress.note(
                f"writing {self._recorder.behind} results to MLflow; Ctrl-C leaves them to the next start"
            )
        written = self._recorder.close(
            {
                "status": "KILLED" if interrupted else "FAILED" if trouble else "FINISHED",
                "metrics": results.metrics(),
                "tags": {
                    "mlflow.note.content": summary.markdown(),
                    "outcome": tables.said_counts(self._board.counts),
                    "winner": summary.verdict(),
                    **results.projection(),
                    **({"set_aside": "\n".join(aside)} if aside else {}),
                },
                "artifacts": texts,
                "pictures": [] if interrupted else self._pictures(results),
                "abandoned": self._study.abandoned,
            },
            RECORDER_PATIENCE_S,
        )
        exhausted = self._study.exhausted
        summary.print(self._config.tracking.uri, self._recorder, written, over=over, exhausted=exhausted)
        if trouble:
            print(f"stopped  {trouble}")
        none = not self._board.counts[TrialStatus.COMPLETE]
        code = SOME_FAILED if results.failed or trouble or not written or none else COMPLETE
        code = INTERRUPTED if interrupted else code
        self._progress.end({**results.plain(), "exit_code": code})
        return code

    def _pictures(self, results: Results) -> list[str]:
        try:
            return [str(path) for path in results.pictures(self._study)]
        except Exception as error:  # whatever it is, a picture is not worth losing a table for
            self._progress.note(f"no pictures: {type(error).__name__}: {error}")
            return []

    def _command_for_more(self) -> str:
        """The command with twice of what ended the sweep, which may have had more before."""
        used_up = {f"budget.{name}": limit for name, limit in self._board.used_up().items()}
        if "budget.trials" in used_up:
            used_up["budget.trials"] = self._board.ended
        words = [word for word in self._arguments if word.partition("=")[0] not in used_up]
        words += [f"{name}={2 * limit:.15g}" for name, limit in used_up.items()]
        return shlex.join(secrets.masked_arguments(words))
