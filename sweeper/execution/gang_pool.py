"""The gangs that run trials on a Ray cluster.

A gang is one worker for each rank of a trial, placed together. It holds up to two trials, the one that runs
and the next, so that its devices do not wait for the driver. It is kept as long as it succeeds; after any
failure its workers are killed and a new gang takes its place.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from sweeper.common.trials import TrialResult, TrialStatus
from sweeper.config.hardware import Target
from sweeper.execution.cluster import ClusterTrouble, brief
from sweeper.execution.gang import Gang, Running
from sweeper.execution.worker import Job, StepCollector, Worker
from sweeper.search.study import Trial
from workloads.api.contract import Scalar

DEPTH = 2  # trials that a gang holds: one running, one next
STARTS_BEFORE_GIVING_UP = 3
ENDING_ITSELF_S = 15.0  # what a program and all that it started may take to end once its time is over


class GangPool:
    """All the gangs of one sweep. `submit` trials while there is `room`, `wait` for what ends.

    `size` ranks a gang, `count` gangs, each with the share of a CPU's cores that it has beside `share` - 1 others;
    `constants` are the parameters that every trial has, `settings` those of the workload; `collects_steps`: of running
    trials; `whole_nodes`: no two gangs on one node; `host_gib`: of its node's memory, for each rank.
    """

    def __init__(
        self,
        target: Target,
        *,
        workload: str,
        constants: Mapping[str, Scalar],
        settings: Mapping[str, Any] | None,
        collects_steps: bool,
        whole_nodes: bool = False,
        host_gib: float = 0.0,
        size: int,
        count: int,
        timeout_s: float,
        share: int | None = None,
    ) -> None:
        self._target, self._workload, self._constants, self._settings = target, workload, constants, settings
        self._whole_nodes, self._memory = whole_nodes, int(host_gib * 2**30)
        self._size, self._timeout_s = size, timeout_s
        self._limit_s = timeout_s + (ENDING_ITSELF_S if collects_steps else 0.0)
        self._share = share or count
        self._made = self._failed_starts = self._sequence_number = 0
        self._why_no_start = ""
        self._collector = _new_collector() if collects_steps else None
        self._by_sequence_number: dict[int, Trial] = {}
        self._news: Any = None  # a reference to what the ear has heard
        self._backlog: deque[Trial] = deque()  # trials whose gang failed before their turn came
        self._in_flight: dict[int, Trial] = {}  # by number: thousands, of which only the count is asked for each trial
        self._with_room: list[tuple[int, int, Gang]] = []  # a heap by what they held then; see _least_loaded
        self._noted = 0
        self.gangs = [self._new_gang() for _ in range(count)]

    # ── trials ──

    def room(self) -> int:
        """How many more trials can be submitted now: none to gangs that have not started."""
        return sum(DEPTH - len(gang.jobs) for gang in self.gangs if gang.open) - len(self._backlog)

    def nodes_with_room(self) -> set[str]:
        """The nodes on which a gang could take a trial, of those that are on one node."""
        return {gang.nodes[0] for gang in self.gangs if gang.open and len(gang.jobs) < DEPTH and len(gang.nodes) == 1}

    @property
    def starting(self) -> bool:
        """Whether no gang is up."""
        return bool(self.gangs) and not any(gang.ready for gang in self.gangs)

    def in_flight(self) -> list[Trial]:
        """The trials that were submitted and have not ended."""
        return list(self._in_flight.values())

    def count_in_flight(self) -> int:
        """How many those are."""
        return len(self._in_flight)

    def said(self, most: int) -> list[str]:
        """What each of the first `most` gangs is at, in a line."""
        now, lines = time.monotonic(), []
        for gang in self.gangs[:most]:
            if not gang.ready:
                lines.append(f"{gang.name}: starting, or waiting for {self._target.unit} that are in use")
                continue
            place = gang.where[0]
            gpu = f" GPU {place['gpus']}" if place["gpus"] else ""
            job = f"trial {gang.jobs[0].trial.number} for {now - gang.jobs[0].since_s:.0f} s" if gang.jobs else "idle"
            lines.append(f"{gang.name} on {place['node']}{gpu}: {job}")
        return lines

    def submit(self, trial: Trial, node: str | None = None) -> None:
        """Hand a trial to the gang that will come to it first, of those on one node if that is named and has room."""
        self._in_flight[trial.number] = trial
        there = [g for g in self.gangs if g.open and len(g.jobs) < DEPTH and g.nodes == [node]] if node else []
        if there:
            self._give(min(there, key=lambda gang: len(gang.jobs)), trial)
        else:
            self._backlog.append(trial)
            self._hand_out()

    def _hand_out(self) -> None:
        while self._backlog and (gang := self._least_loaded()):
            self._give(gang, self._backlog.popleft())

    def _give(self, gang: Gang, trial: Trial) -> None:
        parameters = {**self._constants, **trial.params}
        device = "cuda" if self._target.hardware.kind == "gpu" else "cpu"
        self._sequence_number += 1
        number = self._sequence_number
        if self._collector is not None:
            self._by_sequence_number[self._sequence_number] = trial
        refs = {
            worker.run.remote(Job(self._workload, parameters, rank, self._settings, self._collector)): rank.rank
            for worker, rank in zip(gang.workers, gang.ranks(device, number, self._timeout_s), strict=True)
        }
        now = time.monotonic()
        gang.jobs.append(
            Running(
                trial,
                refs,
                since_s=now,
                sequence_number=self._sequence_number,
                timeout_s=self._timeout_s,
                limit_s=self._limit_s,
            )
        )
        self._note_room(gang)

    def _note_room(self, gang: Gang) -> None:
        """A gang that is up holds another number of trials than before."""
        if len(gang.jobs) < DEPTH:
            self._noted += 1
            heapq.heappush(self._with_room, (len(gang.jobs), self._noted, gang))

    def _least_loaded(self) -> Gang | None:
        """The gang that will come to a trial first, None where none has room. What was noted of one and has changed is
        passed over: to look through thousands of them would take longer than all else that a trial costs."""
        while self._with_room:
            held, _, gang = heapq.heappop(self._with_room)
            if gang.open and not gang.ended and held == len(gang.jobs):
                return gang
        return None

    def wait(self, timeout_s: float) -> list[tuple[Trial, TrialResult]]:
        """The trials that ended, after waiting up to `timeout_s` for the first of them."""
        if self._failed_starts >= STARTS_BEFORE_GIVING_UP and self.starting:
            raise ClusterTrouble(f"no worker starts: {self._why_no_start}")
        awaited = [ref for gang in self.gangs for ref in gang.awaited()]
        if not awaited:
            time.sleep(timeout_s)
            return []
        ray.wait(
            awaited,
            num_returns=1,
            timeout=max(0.0, min(timeout_s, self._next_deadline_s() - time.monotonic())),
        )
        arrived = set(ray.wait(awaited, num_returns=len(awaited), timeout=0)[0])
        ended = []
        for gang in list(self.gangs):
            if not gang.ready:
                self._welcome(gang, arrived)
            elif outcome := gang.outcome(arrived):
                trial = gang.jobs.popleft().trial
                del self._in_flight[trial.number]
                ended.append((trial, outcome))
                if not outcome.reusable:
                    self._replace(gang)
                    continue
                if gang.jobs:
                    gang.jobs[0].since_s = time.monotonic()
                self._note_room(gang)
            if gang.leaving and not gang.jobs and gang in self.gangs:
                self._replace(gang)
        self._hand_out()
        return ended

    def use(self, target: Target, count: int) -> None:
        """Use these nodes and no others from now on, with as many gangs. One that is elsewhere runs what it holds and
        goes; one that has not started may be waiting for a node that is gone, and starts anew."""
        ids = {node.id for node in target.nodes}
        fewer = not ids >= {node.id for node in self._target.nodes}
        self._target = target
        for gang in list(self.gangs):
            if gang.ready:
                gang.leaving = not ids >= {*gang.nodes}
                if gang.open:  # it may have been leaving
                    self._note_room(gang)
            elif fewer:
                self._end(gang)
                self.gangs.remove(gang)
        self.gangs += [self._new_gang() for _ in range(count - sum(not gang.leaving for gang in self.gangs))]

    def reported(self, *, all_of_it: bool = False) -> list[tuple[Trial, int, float, dict[str, float]]]:
        """Steps of trials that were over since this was last asked: which one, when, and its figures. What is not there
        yet comes another time, unless `all_of_it` is wanted."""
        if self._collector is None:
            return []
        found = []
        try:
            if self._news and (all_of_it or ray.wait([self._news], timeout=0)[0]):
                found, self._news = ray.get(self._news), None
            if self._news is None:
                self._news = self._collector.take.remote()
            if all_of_it:
                found, self._news = found + ray.get(self._news, timeout=10), None
        except RayError:  # it is gone, with what it had heard
            self._collector, self._news = _new_collector(), None
        return [
            (self._by_sequence_number[sequence_number], step, at_s, metrics)
            for sequence_number, step, at_s, metrics in found
        ]

    def end_early(self, trial: Trial) -> None:
        """Ask a running trial to end after its next step."""
        for gang in self.gangs:
            if self._collector is not None and gang.jobs and gang.jobs[0].trial == trial:
                self._collector.prune.remote(gang.jobs[0].sequence_number)

    def cancel(self) -> list[tuple[Trial, TrialResult]]:
        """Say of each trial in flight that it was cancelled. Its gang is at it still, until `close`."""
        now = time.time()
        trials = self.in_flight()
        self._backlog.clear()
        self._in_flight.clear()
        return [(trial, TrialResult(TrialStatus.CANCELLED, now, now, "the sweep was stopped")) for trial in trials]

    def close(self, patience_s: float = 0.0) -> None:
        """End every gang, whatever it is at. One that is starting gets `patience_s` to have started: Ray may hold what
        a worker that was killed before had reserved, and the next one then waits for it in vain."""
        starting = [handshake for gang in self.gangs for handshake in gang.handshake]
        if starting and patience_s:
            ray.wait(starting, num_returns=len(starting), timeout=patience_s)
        for gang in self.gangs:
            self._end(gang)
        self.gangs = []
        if self._collector is not None:
            ray.kill(self._collector, no_restart=True)
            self._collector = None

    def _next_deadline_s(self) -> float:
        return min((gang.jobs[0].until_s for gang in self.gangs if gang.ready and gang.jobs), default=math.inf)

    # ── gangs ──

    def _new_gang(self) -> Gang:
        self._made += 1
        options, group = self._options(), None
        if self._size > 1:
            bundle = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": self._memory}
            bundle = {resource: amount for resource, amount in bundle.items() if amount}
            place = options.pop("label_selector")
            group = placement_group([bundle] * self._size, strategy="PACK", bundle_label_selector=[place] * self._size)
        workers = []
        for rank in range(self._size):
            place = {} if group is None else {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank)}
            workers.append(ray.remote(Worker).options(max_restarts=0, **options, **place).remote())
        greetings = [worker.handshake.remote() for worker in workers]
        return Gang(f"worker {self._made}", workers, group, greetings, list(greetings))

    def _options(self) -> dict[str, Any]:
        """What Ray reserves for one rank, and on which nodes: a label alone does not tell an H100 from an H100 PCIe."""
        ids = [node.id for node in self._target.nodes if node.id]
        place = {"ray.io/node-id": f"in({','.join(ids)})"} if ids else {}
        if self._target.hardware.kind == "gpu":
            cores = self._target.cores_of_whole_nodes(self._size) if self._whole_nodes else 1
            memory = {"memory": self._memory} if self._memory else {}
            return {"num_cpus": cores, "num_gpus": 1, "label_selector": place, **memory}
        cores = self._target.cores_per_rank(self._share * self._size)
        return {"num_cpus": cores, "num_gpus": 0, "label_selector": place}

    def _welcome(self, gang: Gang, arrived: set[Any]) -> None:
        """Take a gang into service once all its ranks are up; one that does not start is replaced."""
        for handshake in [handshake for handshake in gang.handshake if handshake in arrived]:
            try:
                ray.get(handshake)
            except RayError as error:
                self._failed_starts += 1
                self._why_no_start = brief(error)
                self._replace(gang)
                return
            gang.handshake.remove(handshake)
        if gang.ready:
            self._failed_starts = 0
            gang.number()
            self._note_room(gang)

    def _replace(self, gang: Gang) -> None:
        """A new gang in the place of one that failed, unless that was to go; what it had not begun goes back to be
        handed out first."""
        self._backlog.extendleft(reversed([job.trial for job in gang.jobs]))
        gang.jobs.clear()
        self._end(gang)
        place = self.gangs.index(gang)
        self.gangs[place : place + 1] = [] if gang.leaving else [self._new_gang()]

    def _end(self, gang: Gang) -> None:
        gang.ended = True
        for worker in gang.workers:
            ray.kill(worker, no_restart=True)
        if gang.group is not None:
            remove_placement_group(gang.group)


def _new_collector() -> Any:
    """On this node, which has to stay anyhow."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(StepCollector).options(num_cpus=0, scheduling_strategy=here).remote()
