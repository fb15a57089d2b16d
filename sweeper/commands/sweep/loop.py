"""Run the loop of a sweep: ask for trials, submit them, collect the results, and record them."""

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace

from sweeper.cli.exits import SOME_FAILED, StopRequests
from sweeper.commands.sweep.closing import FinishedRun
from sweeper.commands.sweep.opening import open_sweep
from sweeper.commands.sweep.rounds import choose_again
from sweeper.common.clock import PhaseClock
from sweeper.common.format import name_some, one_line
from sweeper.common.trials import LEFT, Remeasurement, Trial, TrialRecord, TrialResult, TrialStatus, run_name
from sweeper.config.environment import is_variable
from sweeper.execution import cluster, gang_pool, head
from sweeper.execution.gang_launcher import GangResources, GangSpec
from sweeper.execution.judge import TrialJudge
from sweeper.execution.node_monitor import NodeMonitor
from sweeper.metrics.derivation import Prices
from sweeper.pages import plan_view
from sweeper.pages.progress import ProgressState, describe_step, make_progress
from sweeper.preflight.sweep_plan import SweepPlan
from sweeper.preflight.work import WorkIdentifier
from sweeper.search.finals import pending_remeasurements
from sweeper.search.front import select_finalists
from workloads.api.errors import describe_os_error
from workloads.api.secrets import mask

START_PATIENCE_S = 20.0
SHOWN_DISTURBED = 10  # number of trials named in the line about remeasured trials


class Sweep:
    """One run of a sweep, from the lock to the summary. `arguments` is the command line that resumes the sweep."""

    def __init__(self, plan: SweepPlan, arguments: Sequence[str]) -> None:
        self._plan, self._config = plan, plan.config
        self._clock = PhaseClock()
        self._opened = opened = open_sweep(plan, arguments)
        self._study, self._progress, self._tracking = opened.study, opened.progress, opened.tracking
        self._stop = StopRequests(opened.command)
        self._display = make_progress(plan.config.progress)
        self._judge = TrialJudge(
            criteria=plan.criteria,
            hardware=plan.target.hardware,
            achieved_tflops=plan.achieved_tflops,
            predict=plan.estimates.predict if plan.estimates else lambda _: {},
            work=WorkIdentifier(plan.resolved.workload, plan.space),
            files=plan.folder / "files",
            prices=Prices(plan.config.price_per_hour, plan.config.price_per_kwh),
        )
        self._pool: gang_pool.GangPool | None = None
        self._attempts: Counter[int] = Counter()
        resources = plan.resources
        self._gang_resources = GangResources(resources.gpus, resources.whole_nodes, resources.host_gib)
        self._nodes = NodeMonitor(plan.target, plan.config, self._gang_resources, self._study.records)
        self._finals_ended = self._finals_planned = 0
        self._finals: deque[tuple[TrialRecord, Remeasurement]] = deque()
        self._steps: dict[int, str] = {}  # the last step of each running trial

    def run(self) -> int:
        """Run the sweep, or the remaining part of a resumed sweep, and return the exit code."""
        self._stop.install()
        try:
            for line in plan_view.describe_start(self._plan, self._progress.counts, len(self._study.unfinished)):
                self._display.note(line)
            if self._opened.retry_note:
                self._display.note(f"retry    {self._opened.retry_note}")
            if self._has_trials() and (estimate := plan_view.describe_duration(self._plan)):
                self._display.note(estimate)
            error = self._run_on_cluster() if self._has_trials() or self._pending_finals() else ""
            return self._finish(error)
        except BrokenPipeError:
            raise
        except OSError as error:  # the disk is full or unavailable
            reason = describe_os_error(error)
            self._display.note(f"sweeper: {reason}; finished trials are kept; to resume:\n  {self._opened.command}")
            return SOME_FAILED
        finally:
            self._stop.restore()
            self._tracking.detach()
            self._opened.lock.close()

    def _run_on_cluster(self) -> str:
        # Ray prints worker events to standard output, which is reserved for results.
        with (self._plan.folder / "ray.log").open("a") as log, redirect_stdout(log):
            try:
                with self._display:
                    self._display.update(self._state())
                    space = self._plan.space
                    has_variables = any(map(is_variable, (*space.constants, *space.dimensions)))
                    cluster.start(self._plan.target, has_variables=has_variables)
                    self._stop.install()
                    if not self._plan.target.is_gpu:
                        os.nice(5)  # this process shares cores with timed trials
                    self._progress.start()
                    with head.on_head_lost(self._leave_without_head):
                        if self._has_trials():
                            self._run_trials(self._plan.resources.gangs, self._has_trials, self._study.ask)
                        self._run_finals()
            except cluster.ClusterError as error:
                self._cancel_in_flight()
                if self._pool:
                    self._pool.close()
                return str(error)
            except SystemExit:  # raised by Ray on SIGTERM during startup
                self._stop.add()
            finally:
                cluster.stop()
        return ""

    def _run_trials(self, gangs: int, has_more: Callable[[], bool], ask: Callable[[], Trial | None]) -> None:
        plan = self._plan
        spec = GangSpec(
            workload=self._config.workload.name,
            constants=plan.space.constants,
            settings=plan.resolved.worker_settings,
            resources=self._gang_resources,
            timeout_s=self._config.trial.timeout_s,
            reports_steps=plan.resolved.workload.reports_steps,
            cpu_shares=plan.resources.gangs,  # a finalist runs alone, but uses as many cores as in the search
            searches_environment=any(map(is_variable, plan.space.dimensions)),
        )
        self._pool = gang_pool.GangPool(plan.target, spec, gangs)
        stop_by_s: float | None = None
        while True:
            if self._stop.requested and stop_by_s is None:
                stop_by_s = self._begin_stopping()
            self._compare_nodes()
            for _ in range(self._pool.capacity()):
                if not (has_more() and (trial := ask())):
                    break
                self._pool.submit(trial)
            self._study.sync()
            if not (self._pool.count_in_flight() or has_more() or self._queue_disturbed()):
                break
            for trial, result in self._pool.wait(0.25):
                self._take(trial, result)
            if self._progress.stop_reason:  # a resumed sweep runs these trials first
                self._study.unfinished[:0] = self._pool.withdraw_backlog()
            self._collect_steps()
            if not self._pool.starting:
                self._clock.enter("finals" if self._finals_planned else "trials")
            if stop_by_s is not None and time.monotonic() > stop_by_s:
                self._cancel_in_flight()
                self._pool.close()
            self._update_nodes()
            self._note_left("a trial whose worker died", "; ".join(cluster.end_orphans()))
            self._tracking.restart_if_dead()
            self._display.update(self._state())
        self._collect_steps(wait=True)
        # Wait for a gang that is still starting only if the finals need its resources.
        self._pool.close(START_PATIENCE_S if self._pending_finals() else 0)

    def _queue_disturbed(self) -> bool:
        """Queue disturbed trials again after all other trials have ended. Return whether any trial was queued."""
        if self._stop.requested or self._progress.stop_reason:
            return False
        if {"time_s", "gpu_hours", "cost"} & set(self._progress.exhausted_limits()):
            return False
        in_finals = bool(self._finals_planned)
        records = {
            number: record
            for number, record in self._study.records.items()
            if (bool(record.remeasurement and record.remeasurement.group) if in_finals else not record.remeasurement)
        }
        disturbed = [
            record
            for record in self._study.current_records
            if record.number in records and record.number not in self._study.retried
            if record.status is TrialStatus.INCONCLUSIVE
        ]
        gangs = 1 if in_finals else self._plan.resources.gangs
        chosen = choose_again(disturbed, records, self._study.again, gangs)
        disturbed = self._study.queue_again(chosen)
        for record in [] if in_finals else disturbed:
            self._progress.forget(record)
        if in_finals:
            self._finals.extend(again := self._pending_finals())
            self._finals_planned += len(again)
        if disturbed:
            numbers = name_some([str(record.number) for record in disturbed], SHOWN_DISTURBED)
            self._display.note(f"again    trials {numbers}, which other processes disturbed")
        return bool(disturbed)

    def _begin_stopping(self) -> float:
        """Cancel trials that have not started. Return the time at which to cancel the running trials as well."""
        grace_s = self._config.trial.grace_s
        self._display.note(f"stopping: {grace_s:g} s for the running trials; press Ctrl-C again to leave at once")
        now = time.time()
        for trial in self._study.unfinished[:]:  # left by an earlier run; the next run tries these trials again
            self._study.unfinished.remove(trial)
            self._take(trial, TrialResult(TrialStatus.CANCELLED, now, now, "the sweep was stopped"))
        return time.monotonic() + grace_s

    def _has_trials(self) -> bool:
        if self._stop.requested or self._progress.stop_reason:
            return False
        return bool(self._study.unfinished or self._study.retry_points) or self._has_budget()

    def _has_budget(self) -> bool:
        pool, is_over = self._pool, self._stop.requested or self._progress.stop_reason or self._study.exhausted
        in_flight, running_s = (pool.count_in_flight(), pool.running_s()) if pool else (0, 0.0)
        return not is_over and self._progress.has_budget_for_more(in_flight, running_s)

    def _run_finals(self) -> None:
        self._finals = pending = deque(self._pending_finals())
        if not pending:
            return
        finalists = dict.fromkeys(remeasurement.trial for _, remeasurement in pending)
        # All finalists use the same reference clock, so that differences between clocks do not affect the comparison.
        clock_mhz = max(record.metrics.get("sm_clock_mhz", 0.0) for record, _ in pending)
        numbers, rounds = ", ".join(map(str, finalists)), self._config.finals.rounds
        self._display.note(f"finals   remeasuring trials {numbers}, interleaved, {rounds} rounds, in a fresh worker")
        self._finals_ended, self._finals_planned = 0, len(pending)
        self._clock.enter("finals")

        def ask() -> Trial:
            record, remeasurement = pending.popleft()
            return self._study.ask_remeasurement(dict(record.params), remeasurement, clock_mhz)

        self._run_trials(1, lambda: bool(pending) and not self._stop.requested, ask)

    def _pending_finals(self) -> list[tuple[TrialRecord, Remeasurement]]:
        if self._stop.requested or self._progress.stop_reason:
            return []
        finals, ranked = self._config.finals, self._progress.ranked_trials()
        if len(ranked) < 2:  # there is nothing to compare
            return []
        finalists = select_finalists(ranked, self._plan.criteria, finals.top)
        measured = [record for record in self._study.current_records if record.number not in self._study.retried]
        return pending_remeasurements(finalists, finals.rounds, measured)

    def _update_nodes(self) -> None:
        assert self._pool is not None
        if self._stop.requested:
            return
        for line in self._nodes.poll_changes(may_join=not self._finals_planned):
            resources = replace(self._plan.resources, target=self._nodes.target, gangs=self._nodes.count_gangs())
            self._plan = replace(self._plan, resources=resources)
            self._pool.set_target(resources.target, 1 if self._finals_planned else resources.gangs)
            self._display.note(f"{line}; {plan_view.describe_gangs(self._plan)}")

    def _compare_nodes(self) -> None:
        assert self._pool is not None
        if self._finals_planned or not self._has_budget():
            return
        for record, remeasurement, node in self._nodes.plan_comparisons(
            self._progress.best, self._progress.finished_trials, self._pool.nodes_with_capacity()
        ):
            if not self._pool.gangs_on(node, dict(record.params)):
                continue  # wait until a gang on the node has the trial's environment
            trial = self._study.ask_remeasurement(dict(record.params), remeasurement)
            self._nodes.add_comparison(trial, node)
            self._pool.submit(trial, node)

    def _collect_steps(self, *, wait: bool = False) -> None:
        assert self._pool is not None
        for trial, step, at_s, step_metrics in self._pool.collect_reports(wait=wait):
            step_metrics = self._judge.derive_step(trial, step_metrics, self._plan.resources.gpus)
            name = run_name(trial.number, trial.params, trial.remeasurement)
            self._tracking.log_step(trial.number, name, step, at_s, step_metrics)
            self._steps[trial.number] = describe_step(step, step_metrics)
            value = step_metrics.get(self._config.workload.objective)
            if value is not None and self._study.should_prune(trial.number, step, value):
                self._pool.prune(trial)

    def _take(self, trial: Trial, result: TrialResult) -> None:
        assert self._pool is not None
        self._steps.pop(trial.number, None)
        self._attempts[trial.number] += 1
        attempt, retries = self._attempts[trial.number], self._config.trial.retries
        if result.status is TrialStatus.LOST and self._stop.requested:
            result = replace(result, status=TrialStatus.CANCELLED)  # the next run retries a cancelled trial
        if result.status is TrialStatus.LOST and attempt <= retries:
            self._display.note(f"trial {trial.number} lost, retrying ({attempt}/{retries}): {result.reason}")
            self._nodes.observe(result, trial.params, trial.remeasurement)
            self._pool.submit(trial)
            return
        self._note_left(f"trial {trial.number}", str(result.where.get(LEFT, "")))
        record = self._judge.build_record(trial, result, attempts=attempt, elapsed_s=self._progress.elapsed_s)
        earlier = self._study.records.get(trial.retry.trial) if trial.retry else None
        record = record.weighed_against(earlier)
        self._nodes.add_record(record)
        self._study.tell(record)
        self._finals_ended += record.remeasurement is not None
        is_best = not record.remeasurement and self._progress.add(record)
        if earlier and record.superseded == record.number:
            self._progress.forget(record)
            self._progress.add(earlier, was_forgotten=True)
        self._tracking.log_trial(record)
        if is_best and self._plan.criteria.has_front:
            self._tracking.log_front([trial.number for trial in self._progress.front])
        self._display.update(self._state(), record, is_best)

    def _note_left(self, owner: str, left: str) -> None:
        if left:
            self._display.note(f"ended    what {owner} left behind: {one_line(mask(left))}")

    def _cancel_in_flight(self) -> None:
        """Record running trials as cancelled before ending their gangs, because without Ray, ending a gang may hang."""
        for trial, result in self._pool.cancel() if self._pool else []:
            self._take(trial, result)

    def _leave_without_head(self, address: str) -> None:
        """End the process from a thread, because Ray blocks the main thread. A sweep that is already stopping shuts
        down gracefully, because `timeout` and batch systems also send SIGTERM to the sweep's own Ray processes."""
        if self._stop.requested and self._pool:
            self._cancel_in_flight()
            with redirect_stdout(sys.__stdout__):
                code = self._finish("")
            os._exit(code)
        reason = f"the cluster's head {address} does not respond; finished trials are kept. Start it again"
        self._stop.leave(f"stopped  {reason}", SOME_FAILED)

    def _state(self) -> ProgressState:
        pool, trials = self._pool, self._plan.budget_trials
        return ProgressState(
            counts=self._progress.counts,
            trials=trials,
            running=pool.count_running() if pool else 0,
            waiting=pool.count_in_flight() - pool.count_running() if pool else 0,
            elapsed_s=self._clock.elapsed_s,
            remaining_s=self._remaining_s(),
            varying=self._progress.varying,
            limit=self._progress.binding_limit(trials),
            best=self._progress.best,
            front=self._progress.front,
            objectives=self._plan.criteria.metrics,
            describe_workers=lambda limit: pool.describe_workers(limit, self._steps) if pool else ["starting Ray"],
            gangs=len(pool.gangs) if pool else 1,
            tracking_error=self._tracking.last_error,
            is_starting=pool is None or pool.starting,
            is_stopping=self._stop.requested,
            finals=(self._finals_ended, self._finals_planned) if self._finals_planned else None,
        )

    def _remaining_s(self) -> float | None:
        if not self._finals_planned:
            return self._progress.estimated_remaining_s(self._plan.budget_trials)
        ended, elapsed_s = self._finals_ended, self._clock.seconds().get("finals", 0.0)
        seconds = elapsed_s / ended if ended else self._progress.mean_trial_s
        return seconds * (self._finals_planned - ended)

    def _finish(self, error: str) -> int:
        self._clock.enter("recording")
        error = error or self._progress.stop_reason
        is_interrupted, drained = self._stop.requested, self._nodes.describe_drained()
        is_over = not (is_interrupted or error or self._has_budget() or self._pending_finals())
        run = FinishedRun(self._plan, self._opened, drained, self._clock, error, self._stop, is_interrupted, is_over)
        return run.close(self._display)
