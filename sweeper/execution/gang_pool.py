"""Schedule the trials of a sweep on gangs of Ray workers.

A gang has one worker for each rank of a trial, and its workers are placed together. A gang holds a running and a
queued trial, so its devices do not wait for the driver. A gang is reused while its trials succeed. After a failure, its
workers are killed and a new gang replaces it. If trials differ in their environment variables, a new gang is started
for the first waiting trial, and a gang whose own environment has no waiting trials makes room.
"""

import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sweeper.common.trials import Trial, TrialResult, TrialStatus
from sweeper.config.environment import process_values, without_variables
from sweeper.config.hardware import Target
from sweeper.config.space import Parameters
from sweeper.execution.cluster import ClusterError, summarize_ray_error
from sweeper.execution.gang import TRIALS_PER_GANG, Environment, Gang, RunningTrial
from sweeper.execution.gang_launcher import GangLauncher, GangSpec, kill_gang
from sweeper.execution.worker import Job, StepCollector

MAX_FAILED_STARTS = 3  # consecutive failures while no gang is up
LAST_REPORTS_TIMEOUT_S = 10.0
PATIENCE_S = 0.25  # how long to wait for the next step of any trial
SELF_TERMINATION_S = 15.0  # time after the timeout for a program and its child processes to exit


class GangsByLoad:
    """Heaps of the gangs that can take a trial, one heap for each environment.

    An entry records the gang's load at the time of the push and is skipped if the load has changed since. Without
    heaps, a search through thousands of gangs would take longer than the rest of the driver's work for a trial.
    """

    def __init__(self) -> None:
        self._heaps: dict[Environment, list[tuple[int, int, Gang]]] = {}
        self._pushes = 0

    def push(self, gang: Gang) -> None:
        """Add a gang with its current load, unless the gang is full."""
        if len(gang.trials) < TRIALS_PER_GANG:
            self._pushes += 1
            heapq.heappush(self._heaps.setdefault(gang.environment, []), (len(gang.trials), self._pushes, gang))

    def pop(self, environment: Environment) -> Gang | None:
        """Return the gang in this environment that would start a new trial first, or None if all gangs are full."""
        heap = self._heaps.get(environment, [])
        while heap:
            load, _, gang = heapq.heappop(heap)
            if gang.accepts_trials and not gang.killed and load == len(gang.trials):
                return gang
        return None


def find_unserved(waiting: Sequence[Environment], gangs: Sequence[Gang], trials_per_gang: int) -> list[Environment]:
    """Return the environments of the gangs to start, in the order of the waiting trials.

    `waiting` lists the environment of each waiting trial. Gangs that are already starting will take some of these
    trials."""
    starting = [gang.environment for gang in gangs if not gang.ready and not gang.draining]
    places = Counter({environment: trials_per_gang * count for environment, count in Counter(starting).items()})
    unserved = []
    for environment in waiting:
        if not places[environment]:
            unserved.append(environment)
            places[environment] += trials_per_gang
        places[environment] -= 1
    return unserved


def choose_retiring(environment: Environment, gangs: Sequence[Gang]) -> Gang | None:
    """Return the gang to make room for this environment: of the others, the one with the fewest trials, if any."""
    others = [gang for gang in gangs if gang.accepts_trials and gang.environment != environment]
    return min(others, key=lambda gang: len(gang.trials), default=None)


class StepReports:
    """The driver's interface to the step collector, the actor to which workers report their trials' steps."""

    def __init__(self) -> None:
        self.collector = _start_collector()
        self.trials: dict[int, Trial] = {}  # by sequence number
        self.pending: Any = None  # a reference to the collector's next reports

    def take(self, *, wait: bool = False) -> list[tuple[Trial, int, float, dict[str, float]]]:
        """Return the steps reported since the last call, as tuples of trial, step, time and metrics. With `wait`, wait
        up to 10 s for all reports. Otherwise a later call returns reports that are still on the way."""
        reports = []
        try:
            if self.pending and (wait or ray.wait([self.pending], timeout=0)[0]):
                reports, self.pending = ray.get(self.pending), None
            if self.pending is None:
                self.pending = self.collector.take.remote(0.0 if wait else PATIENCE_S)
            if wait:
                reports, self.pending = reports + ray.get(self.pending, timeout=LAST_REPORTS_TIMEOUT_S), None
        except RayError:  # the collector died, and its reports are lost
            self.collector, self.pending = _start_collector(), None
        return [(self.trials[number], step, at_s, metrics) for number, step, at_s, metrics in reports]


def _start_collector() -> Any:
    on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(StepCollector).options(num_cpus=0, scheduling_strategy=on_this_node).remote()


class GangPool:
    """A pool of at most `count` gangs. Call `submit` while there is `capacity`, and `wait` to get results."""

    def __init__(self, target: Target, spec: GangSpec, count: int) -> None:
        self._target = target
        self._spec = spec
        self._kill_after_s = spec.timeout_s + (SELF_TERMINATION_S if spec.reports_steps else 0.0)
        self._launcher = GangLauncher(target, spec.resources, spec.cpu_shares or count)
        self._failed_starts = 0
        self._start_error = ""
        self._sequence_number = 0
        self._reports = StepReports() if spec.reports_steps else None
        self._backlog: deque[Trial] = deque()  # trials without a gang, for example because their gang failed
        self._in_flight: dict[int, Trial] = {}  # by number; there may be thousands, so avoid loops over them
        self._by_load = GangsByLoad()
        self._running: tuple[int, float] | None = None  # the number of running trials, and the sum of their start times
        self._count = count
        self.gangs: list[Gang] = []
        self._fill()

    def capacity(self) -> int:
        """Return how many more trials can be submitted now. Gangs that are still starting accept no trials."""
        free = sum(TRIALS_PER_GANG - len(gang.trials) for gang in self.gangs if gang.accepts_trials)
        return free + TRIALS_PER_GANG * self._vacancies() - len(self._backlog)

    def nodes_with_capacity(self) -> set[str]:
        """Return the ids of the nodes where a single-node gang can take a trial."""
        return {gang.node_ids[0] for gang in self.gangs if gang.has_capacity and len(gang.node_ids) == 1}

    def gangs_on(self, node_id: str, params: Parameters) -> list[Gang]:
        """Return the gangs that run only on this node and can take a trial with these parameters."""
        environment = self._environment_of(params)
        on_node = [gang for gang in self.gangs if gang.has_capacity and gang.node_ids == [node_id]]
        return [gang for gang in on_node if gang.environment == environment]

    @property
    def starting(self) -> bool:
        """Whether no gang is up yet."""
        return bool(self.gangs) and not any(gang.ready for gang in self.gangs)

    def count_in_flight(self) -> int:
        return len(self._in_flight)

    def count_running(self) -> int:
        """Return the number of running trials. The other trials in flight are waiting."""
        return self._sum_running()[0]

    def running_s(self) -> float:
        """Return how long the running trials have run so far, in total."""
        count, started_s = self._sum_running()
        return count * time.monotonic() - started_s

    def _sum_running(self) -> tuple[int, float]:
        """Count the running trials and sum their start times. There may be 8,000 gangs, so cache the result."""
        if self._running is None:
            starts_s = [gang.trials[0].started_s for gang in self.gangs if gang.ready and gang.trials]
            self._running = len(starts_s), sum(starts_s)
        return self._running

    def describe_workers(self, limit: int, steps: Mapping[int, str]) -> list[str]:
        """Describe the first `limit` gangs, one string each: node, GPU and trial, with the step on a second line."""
        now = time.monotonic()
        lines = []
        for gang in self.gangs[:limit]:
            if not gang.ready:
                lines.append(f"{gang.name}: starting, or waiting for {self._target.unit} that are in use")
                continue
            node, gpus = gang.locations[0]["node"], gang.locations[0]["gpus"]
            trial = next(iter(gang.trials), None)
            again = (trial and trial.trial.remeasurement) or ""
            activity = f"trial {trial.trial.number}{again} for {now - trial.started_s:.0f} s" if trial else "idle"
            step = f"\n  {steps[trial.trial.number]}" if trial and trial.trial.number in steps else ""
            lines.append(f"{gang.name} on {node}{f' GPU {gpus}' if gpus else ''}: {activity}{step}")
        return lines

    def use_workload(self, name: str, *, waits_for_all: bool) -> None:
        """Switch the workers to another workload. No trial may be in flight."""
        assert not self._in_flight
        self._spec = replace(self._spec, workload=name, waits_for_all=waits_for_all)

    def submit(self, trial: Trial, node_id: str | None = None) -> None:
        """Give a trial to the least loaded gang, preferring gangs with capacity that run only on `node_id`."""
        self._in_flight[trial.number] = trial
        if candidates := self.gangs_on(node_id, trial.params) if node_id else []:
            self._start_trial(min(candidates, key=lambda gang: len(gang.trials)), trial)
        else:
            self._backlog.append(trial)
            self._assign_backlog()

    def _assign_backlog(self) -> None:
        waiting, full = deque[Trial](), set[Environment]()
        for trial in self._backlog:
            environment = self._environment_of(trial.params)
            gang = None if environment in full else self._by_load.pop(environment)
            if gang is None:
                full.add(environment)
                waiting.append(trial)
            else:
                self._start_trial(gang, trial)
        self._backlog = waiting
        if not self._spec.searches_environment:
            return
        needed = [self._environment_of(trial.params) for trial in self._backlog]
        unserved = find_unserved(needed, self.gangs, trials_per_gang=1)  # one trial per gang leaves no device idle
        self.gangs += [self._launcher.launch(environment) for environment in unserved[: self._vacancies()]]
        retiring = sum(gang.retiring for gang in self.gangs)
        for environment in find_unserved(needed, self.gangs, TRIALS_PER_GANG)[retiring:]:
            if gang := choose_retiring(environment, self.gangs):
                gang.retiring = True  # the gang takes no more trials
                if not gang.trials:
                    self._replace(gang)
                    self.gangs.append(self._launcher.launch(environment))

    def _environment_of(self, params: Parameters) -> Environment:
        values = process_values({**self._spec.constants, **params})
        return tuple(sorted((name, value) for name, value in values.items() if value is not None))

    def _start_trial(self, gang: Gang, trial: Trial) -> None:
        spec = self._spec
        parameters = {**spec.constants, **trial.params}
        variables = process_values(parameters)
        device = "cuda" if self._target.hardware.kind == "gpu" else "cpu"
        self._sequence_number += 1
        if self._reports:
            self._reports.trials[self._sequence_number] = trial
        collector = self._reports.collector if self._reports else None
        ranks = gang.build_ranks(device, self._sequence_number, spec.timeout_s, trial.clock_mhz)
        values = without_variables(parameters)
        jobs = [Job(spec.workload, values, variables, rank, spec.settings, collector) for rank in ranks]
        refs = {worker.run.remote(job): job.rank.rank for worker, job in zip(gang.workers, jobs, strict=True)}
        running = RunningTrial(
            trial,
            refs,
            started_s=time.monotonic(),
            sequence_number=self._sequence_number,
            timeout_s=spec.timeout_s,
            kill_after_s=self._kill_after_s,
            waits_for_all=spec.waits_for_all,
        )
        gang.trials.append(running)
        if self._running and len(gang.trials) == 1:
            self._running = self._running[0] + 1, self._running[1] + running.started_s
        self._by_load.push(gang)

    def wait(self, timeout_s: float) -> list[tuple[Trial, TrialResult]]:
        """Wait up to `timeout_s` and return the trials that have ended. Raises ClusterError if no worker starts."""
        if self._failed_starts >= MAX_FAILED_STARTS and self.starting:
            raise ClusterError(f"no worker starts: {self._start_error}")
        refs = [ref for gang in self.gangs for ref in gang.pending_refs()]
        if not refs:
            time.sleep(timeout_s)
            return []
        deadlines_s = (gang.trials[0].deadline_s for gang in self.gangs if gang.ready and gang.trials)
        timeout_s = min(timeout_s, min(deadlines_s, default=math.inf) - time.monotonic())
        steps = [self._reports.pending] if self._reports and self._reports.pending else []
        ray.wait([*refs, *steps], num_returns=1, timeout=max(0.0, timeout_s))
        arrived = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        self._running = None
        ended = []
        for gang in list(self.gangs):
            if not gang.ready:
                self._accept_handshakes(gang, arrived)
            elif result := gang.collect_result(arrived):
                trial = gang.trials.popleft().trial
                del self._in_flight[trial.number]
                ended.append((trial, result))
                if not result.reusable:
                    self._replace(gang)
                    continue
                if gang.trials:
                    gang.trials[0].started_s = time.monotonic()
                self._by_load.push(gang)
            if (gang.draining or gang.retiring) and not gang.trials and gang in self.gangs:
                self._replace(gang)
        self._assign_backlog()
        return ended

    def time_out(self) -> list[tuple[Trial, TrialResult]]:
        """End the running trials as too slow. Return those that have ended, with the results of ranks that are done."""
        for running in (gang.trials[0] for gang in self.gangs if gang.ready and gang.trials):
            running.kill_after_s = running.timeout_s = time.monotonic() - running.started_s
        return self.wait(0.0)

    def collect_reports(self, *, wait: bool = False) -> list[tuple[Trial, int, float, dict[str, float]]]:
        """Return the steps that running trials reported since the last call (see `StepReports.take`)."""
        return self._reports.take(wait=wait) if self._reports else []

    def prune(self, trial: Trial) -> None:
        """Ask a running trial to stop after its next step."""
        for gang in self.gangs:
            if self._reports and gang.trials and gang.trials[0].trial == trial:
                self._reports.collector.prune.remote(gang.trials[0].sequence_number)

    def set_target(self, target: Target, count: int) -> None:
        """Use only these nodes from now on, with `count` gangs.

        A gang on any other node finishes the trials that it holds and then ends. If nodes were removed, gangs that are
        still starting are replaced because they may be waiting for a removed node.
        """
        ids = {node.id for node in target.nodes}
        nodes_removed = not ids >= {node.id for node in self._target.nodes}
        self._target = target
        self._launcher.set_target(target)
        self._count = count
        for gang in list(self.gangs):
            if gang.ready:
                gang.draining = not ids >= {*gang.node_ids}
                if gang.accepts_trials:  # the gang may have been draining before
                    self._by_load.push(gang)
            elif nodes_removed:
                kill_gang(gang)
                self.gangs.remove(gang)
        self._fill()

    def withdraw_backlog(self) -> list[Trial]:
        """Return the trials that no gang holds, and remove them from the trials in flight."""
        trials = list(self._backlog)
        self._backlog.clear()
        for trial in trials:
            del self._in_flight[trial.number]
        return trials

    def cancel(self) -> list[tuple[Trial, TrialResult]]:
        """Return every trial in flight with the status CANCELLED. Gangs keep running their trials until `close`."""
        now = time.time()
        trials = list(self._in_flight.values())
        self._backlog.clear()
        self._in_flight.clear()
        return [(trial, TrialResult(TrialStatus.CANCELLED, now, now, "the sweep was stopped")) for trial in trials]

    def close(self, start_timeout_s: float = 0.0) -> None:
        """Kill every gang, even while it runs a trial. First wait up to `start_timeout_s` for gangs that are starting.

        If a worker is killed while it is starting, Ray may never release its resources, in which case the next worker
        would wait forever.
        """
        starting = [handshake for gang in self.gangs for handshake in gang.pending_handshakes]
        if starting and start_timeout_s:
            ray.wait(starting, num_returns=len(starting), timeout=start_timeout_s)
        for gang in self.gangs:
            kill_gang(gang)
        self.gangs, self._count, self._running = [], 0, None
        if self._reports:
            ray.kill(self._reports.collector, no_restart=True)
            self._reports = None

    def _accept_handshakes(self, gang: Gang, arrived: set[Any]) -> None:
        for handshake in [handshake for handshake in gang.pending_handshakes if handshake in arrived]:
            try:
                ray.get(handshake)
            except RayError as error:
                return self._restart(gang, summarize_ray_error(error))
            gang.pending_handshakes.remove(handshake)
        if gang.ready:
            gang.assign_ranks()
            if not self._launcher.starts_on(gang.node_ids):  # the selector matched a node that joined later
                self._launcher.set_target(self._target)
                self._replace(gang)
            elif reason := gang.misplacement:  # trials would be recorded with the wrong layout
                self._restart(gang, reason)
            else:
                self._failed_starts = 0
                self._by_load.push(gang)

    def _restart(self, gang: Gang, reason: str) -> None:
        self._failed_starts += 1
        self._start_error = reason
        self._replace(gang)

    def _replace(self, gang: Gang) -> None:
        """Kill a gang, return its remaining trials to the front of the backlog, and launch another gang in its place.
        A gang that was draining is not replaced, nor is any gang if trials differ in their environments."""
        self._backlog.extendleft(reversed([running.trial for running in gang.trials]))
        gang.trials.clear()
        self._running = None
        kill_gang(gang)
        index = self.gangs.index(gang)
        is_replaced = not (gang.draining or self._spec.searches_environment)
        self.gangs[index : index + 1] = [self._launcher.launch(gang.environment)] if is_replaced else []

    def _vacancies(self) -> int:
        """Return how many gangs may be launched. Draining gangs do not count toward the limit."""
        return max(0, self._count - sum(not gang.draining for gang in self.gangs))

    def _fill(self) -> None:
        """Launch all gangs. If environments differ, do nothing, because gangs are then started for waiting trials."""
        if not self._spec.searches_environment:
            environment = self._environment_of({})
            self.gangs += [self._launcher.launch(environment) for _ in range(self._vacancies())]
