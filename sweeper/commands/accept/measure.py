"""Run the acceptance experiments: all nodes in parallel, then pairs of nodes in rounds, then the whole cluster."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean
from typing import Any

from sweeper.commands.accept.expected import choose_parameters
from sweeper.commands.accept.experiments import END_OVER_START, Experiment, Reading, Scope, name_place
from sweeper.common.format import format_number
from sweeper.common.grouping import group_values
from sweeper.common.trials import LOST_NODE, Trial, TrialResult, TrialStatus
from sweeper.config.hardware import Target
from sweeper.execution.cluster import ClusterError
from sweeper.execution.gang_launcher import GangResources, GangSpec
from sweeper.execution.gang_pool import GangPool
from sweeper.metrics.derivation import derive, step_times_s
from sweeper.metrics.intervals import Interval, interval_of_steps
from workloads.api.contract import Measurement

CPU_RANKS = 2  # processes that stand in for a node's devices on a CPU
TRIAL_TIMEOUT_S = 300.0  # excludes the sustained run
START_TIMEOUT_S = 120.0  # extra time for the first trial, during which the workers start
LAST_S = 45.0  # time limit of a trial, without its sustained run, once half of the jobs have finished that trial
ENDS_JOB = (TrialStatus.LOST, TrialStatus.TIMED_OUT)
POLL_S = 0.05
REPORT_S = 20.0
UNITS = {"tflops": "TFLOP/s", "tflops_sustained": "TFLOP/s", "tokens_per_s": "tokens/s"} | dict.fromkeys(
    ("gb_per_s", "bus_gb_s"), "GB/s"
)
READ_BESIDE = ("sm_clock_mhz", "power_w", "temperature_c", "sm_clock_drift_mhz", "power_drift_w", "temperature_drift_c")
SHOWN_BESIDE = (*READ_BESIDE, "power_limit_w", "slowed_by", "gpu_uuid", "device")
DRIFT_S = 10.0  # a sustained run of at least this length gets a test that compares its end with its start


@dataclass
class Job:
    """Experiments that one gang runs in sequence on all devices of the job's nodes."""

    target: Target
    names: tuple[str, ...]  # the names of the nodes
    ranks: int
    experiments: deque[Experiment]
    pool: GangPool | None = None
    started_s: float = 0.0  # when the running experiment started on the monotonic clock, or 0 if none has
    deadline_s: float = 0.0  # the running experiment's deadline on the same clock
    is_lost: bool = False  # a node of the job was lost, or a test of the job never ended

    @property
    def place(self) -> str:
        return name_place(self.names)

    def without(self, lost: Collection[str]) -> Job:
        """Return the job without the lost nodes: a smaller whole-cluster job, or any other job marked as lost."""
        if not {*self.names} & {*lost}:
            return self
        left = [n for n, name in enumerate(self.names) if name not in lost]
        if len(self.names) == 2 or len(left) < 2:
            return replace(self, is_lost=True)
        target = replace(self.target, nodes=tuple(self.target.nodes[number] for number in left))
        ranks = self.ranks * len(left) // len(self.names)
        return replace(self, target=target, names=tuple(self.names[number] for number in left), ranks=ranks)

    def find_lost(self, result: TrialResult) -> set[str]:
        """Return the nodes that a result reports as lost: the job's only node, or the node named in the result."""
        if len(self.names) == 1:
            return {*self.names} if result.status in ENDS_JOB else set()
        by_id = dict(zip((node.id for node in self.target.nodes), self.names, strict=True))
        lost_id = str(result.where.get(LOST_NODE, ""))
        return {by_id[lost_id]} if lost_id in by_id else set()

    def start(self) -> None:
        """Start the workers and queue the first experiment."""
        first = self.experiments[0]
        spec = GangSpec(first.workload, {}, None, GangResources(self.ranks), max(map(timeout_s, self.experiments)))
        self.pool = GangPool(self.target, spec, count=1)
        self._submit(START_TIMEOUT_S)

    def _submit(self, further_s: float = 0.0) -> None:
        assert self.pool
        self.pool.use_workload(self.experiments[0].workload, waits_for_all=self.experiments[0].scope == "device")
        self.pool.submit(Trial(0, choose_parameters(self.target, self.experiments[0], self.ranks)))
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + timeout_s(self.experiments[0]) + further_s

    def poll(self, end_s: float) -> tuple[Experiment, TrialResult] | None:
        """Return the experiment that has ended, if any, and start the next experiment. Losing a node ends the job.

        After `end_s`, on the monotonic clock, experiments are cancelled. If one device takes too long, the results of
        the others are kept."""
        if self.is_lost or self.pool is None or time.monotonic() > end_s:
            cut = f"the time of this profile ended after it had run for {time.monotonic() - self.started_s:.0f} s"
            reason = cut if self.started_s else "no time was left for it in this profile"
            reason = "a node of it was lost" if self.is_lost else reason
            self.started_s = 0.0  # the next experiment never starts
            return self.experiments.popleft(), _failure(TrialStatus.CANCELLED, reason)
        try:
            ended = self.pool.wait(0.0)
            if not ended and time.monotonic() > self.deadline_s:
                late = _failure(TrialStatus.TIMED_OUT, "no worker responded in time")
                ended = self.pool.time_out() or [(Trial(0, {}), late)]
        except ClusterError as error:
            ended = [(Trial(0, {}), _failure(TrialStatus.LOST, str(error)))]
        if not ended:
            return None
        experiment, result = self.experiments.popleft(), ended[0][1]
        self.is_lost = result.status in ENDS_JOB
        if self.experiments and not self.is_lost:
            self._submit(0.0 if result.reusable else START_TIMEOUT_S)
        return experiment, result


def timeout_s(experiment: Experiment, without_load_s: float = TRIAL_TIMEOUT_S) -> float:
    return without_load_s + float(experiment.parameters.get("sustained_s", 0))


def _failure(status: TrialStatus, reason: str) -> TrialResult:
    now = time.time()
    return TrialResult(status, now, now, reason)


def plan_phases(target: Target, names: Sequence[str], experiments: Sequence[Experiment]) -> list[list[Job]]:
    """Return the jobs of each phase: single nodes, rounds of node pairs, all nodes. Jobs of a phase run in parallel."""

    def build(nodes: Sequence[int], scopes: set[Scope]) -> Job | None:
        of_nodes = replace(target, nodes=tuple(target.nodes[number] for number in nodes))
        # A GPU has one rank. A CPU has one rank for all its cores, or two if the ranks communicate.
        on_cpu = 1 if "device" in scopes else max(min(CPU_RANKS, of_nodes.devices), len(of_nodes.nodes))
        ranks = of_nodes.devices if target.is_gpu else on_cpu
        fits = {"device": True, "pair": ranks > 2 and ranks % 2 == 0}  # other scopes need two ranks
        fitting = [e for e in experiments if e.scope in scopes and fits.get(e.scope, ranks > 1)]
        own = deque(e for e in fitting if choose_parameters(of_nodes, e, ranks))
        return Job(of_nodes, tuple(names[number] for number in nodes), ranks, own) if own else None

    count = len(target.nodes)
    alone: list[set[Scope]] = [{"device", "pair", "node"}] if target.is_gpu else [{"device"}, {"pair", "node"}]
    plans: list[tuple[list[list[int]], set[Scope]]] = [([[n] for n in range(count)], scopes) for scopes in alone]
    plans += [(pairs, {"link"}) for pairs in pair_rounds(count)]
    plans += [([list(range(count))], {"whole"})] if count > 1 else []
    phases = [[job for nodes in groups if (job := build(nodes, scopes))] for groups, scopes in plans]
    return [phase for phase in phases if phase]


def pair_rounds(count: int) -> list[list[list[int]]]:
    """Return about log2(count) rounds of a round-robin tournament. A round has disjoint node pairs; no pair repeats."""
    fixed = count - 1 + count % 2  # this node does not exist if the count is odd
    rounds = []
    for turn in range(max(0, (count - 1).bit_length())):
        pairs = [(turn, fixed), *(((turn + n) % fixed, (turn - n) % fixed) for n in range(1, (fixed + 1) // 2))]
        rounds.append([sorted(pair) for pair in pairs if max(pair) < count])
    return rounds


def run_phases(
    phases: Sequence[Sequence[Job]],
    deadline_s: float,
    is_stopped: Callable[[], bool] = lambda: False,
    report: Callable[[Sequence[Job]], None] = lambda jobs: None,
) -> Generator[tuple[Job, Experiment, TrialResult], None, None]:
    """Run the phases and yield each result as it arrives. A test that is still running at the deadline has no result,
    and neither has any test that has not ended once `is_stopped`. If there is no result for REPORT_S, `report` gets the
    running jobs.

    A node is excluded from later phases if it is lost, if a single-node test on it does not end, or if its tests with
    two different partners do not end. The deadline is in seconds on the monotonic clock.
    """
    lost, late = set[str](), Counter[str]()
    for phase in phases:
        running = [job.without(lost) for job in phase if job.experiments]
        started, reported_s = list(running), time.monotonic()
        try:
            for job in running:
                if not is_stopped() and time.monotonic() < deadline_s and not job.is_lost:
                    job.start()
            while running:
                if is_stopped():
                    return
                ended = [(job, one) for job in running if (one := job.poll(deadline_s))]
                for job, (experiment, result) in ended:
                    late.update(job.names if result.status is TrialStatus.TIMED_OUT else ())
                    lost |= job.find_lost(result) | {name for name, times in late.items() if times > 1}
                    yield job, experiment, result
                running = [job for job in running if job.experiments]
                if ended and len(started) > 1:
                    _limit_last(running, len(started) // 2)
                reported_s = time.monotonic() if ended else reported_s
                if running and not ended:
                    time.sleep(POLL_S)
                if time.monotonic() > reported_s + REPORT_S:
                    reported_s = time.monotonic()
                    report(running)
        finally:
            for pool in (job.pool for job in started if job.pool):
                pool.close()


def _limit_last(running: Sequence[Job], most: int) -> None:
    """If at most `most` jobs have yet to finish a trial, limit the time of the trial, because it may never end."""
    left = Counter(test for job in running for experiment in job.experiments for test in experiment.tests)
    for job in running:
        experiment = job.experiments[0]
        if left[next(iter(experiment.tests))] <= most:
            job.deadline_s = min(job.deadline_s, time.monotonic() + timeout_s(experiment, LAST_S))


def skip_measured(phases: Sequence[Sequence[Job]], readings: Iterable[Reading]) -> None:
    """Remove experiments from the jobs if an earlier, interrupted run has already measured them."""
    measured = {(reading.place, reading.test) for reading in readings}
    for job in chain(*phases):
        job.experiments = deque(e for e in job.experiments if any((job.place, t) not in measured for t in e.tests))


def read_result(job: Job, experiment: Experiment, result: TrialResult) -> Iterator[Reading]:
    """Yield a reading for each test and part of an experiment. A reading has a problem if its rate is not positive."""
    hardware = job.target.hardware
    of_ranks = {**dict(enumerate(result.measurements)), **result.of_ranks}
    for test, metric in experiment.tests.items():
        for part, ranks in parts_of(job, experiment).items():
            own = [of_ranks.get(rank, f"{result.status.value}: {result.reason}") for rank in ranks]
            measurements = [one for one in own if isinstance(one, Measurement)]
            if problem := next((one for one in own if isinstance(one, str)), ""):
                yield Reading(test, experiment.scope, part, job.names, UNITS[metric], problem=problem)
                continue
            metrics = derive(measurements, hardware.dense_peak_tflops, None, hardware.bandwidth_tb_s)
            rate = _interval(metric, metrics, measurements)
            rate, problem = (rate, "") if 0 < rate[0] < math.inf else ((math.nan,) * 3, "no value")
            beside = _beside(metric, measurements)
            yield Reading(test, experiment.scope, part, job.names, UNITS[metric], *rate, beside, problem)
            if metric == "tflops_sustained" and float(experiment.parameters["sustained_s"]) >= DRIFT_S:
                times_s = measurements[0].sustained_step_times_s
                fifth = len(times_s) // 5
                kept = mean(times_s[:fifth]) / mean(times_s[-fifth:])
                yield Reading(f"{test}{END_OVER_START}", experiment.scope, part, job.names, "", kept, beside=beside)


def leave_out_unsupported(readings: Sequence[Reading]) -> list[Reading]:
    """If no part could run a test, drop its readings that are infeasible for a reason other than memory."""
    measured = {reading.test for reading in readings if not reading.problem}
    unsupported = re.compile(f"{TrialStatus.INFEASIBLE}: (?!.*out of memory)", re.DOTALL)
    return [reading for reading in readings if reading.test in measured or not unsupported.match(reading.problem)]


def parts_of(job: Job, experiment: Experiment) -> dict[str, Sequence[int]]:
    """Map each part's name to the part's ranks in the experiment. Ranks follow the order of GPU numbers."""
    if experiment.scope == "device" and job.target.is_gpu:
        return {f"{job.place} GPU {n}": [n] for n in range(job.ranks)}
    if experiment.scope == "pair":
        return {f"{job.place} GPU {n} + {n + 1}": [n, n + 1] for n in range(0, job.ranks, 2)}
    return {f"the whole, {len(job.names)} nodes" if experiment.scope == "whole" else job.place: range(job.ranks)}


def _interval(metric: str, metrics: Mapping[str, float], ranks: Sequence[Measurement]) -> tuple[float, float, float]:
    """Return a rate with its 95% interval, which for a bus bandwidth is derived from the step times."""
    value, low, high = Interval.read(metrics, metric).bounds
    if metric == "bus_gb_s" and (times := interval_of_steps(step_times_s(ranks), "median")):
        low, high = value * times.value / times.high, value * times.value / times.low
    return value, low, high


def _beside(metric: str, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return the first rank's device readings during the steps, or during the sustained run for a sustained metric."""
    first = measurements[0]
    prefix = "sustained_" if metric.endswith("_sustained") else ""
    read = {**first.machine_info, **{name: first.metrics.get(f"{prefix}{name}") for name in READ_BESIDE}}
    return {name: value for name in SHOWN_BESIDE if (value := read.get(name)) not in (None, "")}


def summarize(title: str, readings: Sequence[Reading]) -> Iterator[str]:
    """Yield the rates of each test's slowest and fastest part, or the tests that have the same reason for no rate."""
    shown = list[tuple[str, str]]()
    for test, own in group_values((reading.test, reading) for reading in readings).items():
        ends = sorted({min(reading.value for reading in own), max(reading.value for reading in own)})
        rates = f"{' to '.join(map(format_number, ends))} {own[0].unit}"
        shown.append((next((reading.problem for reading in own if reading.problem), rates), test))
    yield from (f"{title}: {', '.join(tests)}: {text}" for text, tests in group_values(shown).items())
