"""A simulated Ray cluster whose nodes fail at random and come back under new ids, with gangs of whole nodes.

A node fails after an exponential time, with all of its GPUs. Ray notices that `DETECTION_S` later: then calls of the
workers on it fail, and it is no longer listed as up. The other ranks of its gang never reply, as in a collective
operation. A failed node joins again after an exponential time. Gangs get nodes in the order in which they ask.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError

from benchmarks.scale.simulated_ray import GPUS_PER_NODE, Ref, SimulatedRay
from sweeper.execution.gang_launcher import ACCELERATOR_TYPE, NODE_ID

DETECTION_S = (
    30.0  # about what Ray's default health checks take when a node's link is cut (docs/concepts/reliability.md)
)
START_S = 10.0  # assumed: from a gang's nodes being free to its workers being up
SPREAD = 1 / 6  # a trial's duration is uniform within this part of its mean
IDLE_ROUND_S = 0.25  # the loop waits so long for a reply
IDLE_STEP_S = 5.0  # rounds without a reply are left out up to this time, since they are all alike


class Event(Ref):
    """What happens in the cluster at a time; `value` does it."""


@dataclass(frozen=True)
class Failures:
    """How nodes fail."""

    per_node_s: float  # the rate of a node that is up
    repair_s: float  # the mean time until a failed node is back, at least until Ray has noticed that it failed
    seed: int = 0


@dataclass(eq=False)
class SimulatedNode:
    """A node from one start to its next failure. Ray gives it another id after that."""

    id: str
    address: str
    group: Group | None = None
    has_failed: bool = False


@dataclass(eq=False)
class Worker:
    """An actor: a rank of a gang, on one of its nodes. Has the methods of `sweeper.execution.worker.Worker`."""

    group: Group
    bundle: int
    gpu: int
    handshake: Any = None
    run: Any = None

    @property
    def node(self) -> SimulatedNode:
        return self.group.nodes[self.bundle]


@dataclass(eq=False)
class Attempt:
    """One trial on one gang, with the ranks' replies."""

    started_s: float
    ended_s: float
    replies: list[tuple[Worker, Ref]] = field(default_factory=list)
    is_running: bool = False


@dataclass(eq=False)
class Group:
    """A placement group with its gang: the nodes it has, if it has them, and the trials that it was given."""

    bundles: int
    selector: Mapping[str, str]
    nodes: list[SimulatedNode] = field(default_factory=list)
    handshakes: list[tuple[Worker, Ref]] = field(default_factory=list)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    is_broken: bool = False
    is_removed: bool = False

    def admits(self, node: SimulatedNode) -> bool:
        ids = self.selector.get(NODE_ID, "!in()")
        return (node.id in ids) != ids.startswith("!")


@dataclass
class Usage:
    """GPU-seconds since `since_s`, and what happened meanwhile."""

    since_s: float = 0.0
    busy_s: float = 0.0  # of GPUs that ran trials, those that a failure ended included
    rerun_s: float = 0.0  # of the latter alone, up to the failure
    down_s: float = 0.0  # of GPUs of failed nodes
    failures: int = 0
    interrupted: int = 0  # trials that a failure ended


class SimulationEnded(Exception):
    """Ends the sweep at the end of the simulated time."""


class FailingCluster(SimulatedRay):
    """Replaces `ray` and `time` as `SimulatedRay` does, and the discovery of nodes.

    Args:
        gpus: of a gang, a multiple of a node's.
        trial_s: the mean duration of a trial.
        count_from_s, end_s: the simulated time in which `usage` is counted.
    """

    def __init__(
        self,
        pickled_measurement: bytes,
        nodes: int,
        gpus: int,
        trial_s: float,
        failures: Failures,
        count_from_s: float,
        end_s: float,
    ) -> None:
        super().__init__(pickled_measurement)
        self._gpus, self._trial_s, self._failures = gpus, trial_s, failures
        self._rng = random.Random(failures.seed)
        self._up: dict[str, SimulatedNode] = {}  # as Ray lists them
        self._free: dict[str, SimulatedNode] = {}
        self._waiting: list[Group] = []
        self._starts = self._busy_gpus = self._down_gpus = 0
        self._counted_s = 0.0
        self.usage = Usage()
        self.skipped_rounds = 0.0
        for number in range(nodes):
            self._join(f"n{number}", 0.0)
        self._at(count_from_s, lambda: self._begin_to_count(count_from_s))
        self._at(end_s, lambda: self._end(end_s))

    def _at(self, at_s: float, act: Callable[[], Any]) -> None:
        self._push(Event(at_s, act))

    def _arrive(self, ref: Ref) -> None:
        if isinstance(ref, Event):
            ref.value()
        else:
            super()._arrive(ref)

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        if timeout > 0:
            self._unread = 0  # the loop fetches all that has arrived before it waits again
        if timeout == IDLE_ROUND_S:
            timeout, waited_s = IDLE_STEP_S, self.waited_s
            result = super().wait(refs, num_returns, timeout)
            self.skipped_rounds += max(0.0, (self.waited_s - waited_s) / IDLE_ROUND_S - 1)
            return result
        return super().wait(refs, num_returns, timeout)

    # ── the count ──

    def _count(self, now_s: float) -> None:
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        self.usage.busy_s += passed_s * self._busy_gpus
        self.usage.down_s += passed_s * self._down_gpus

    def _begin_to_count(self, now_s: float) -> None:
        self._count(now_s)
        self.usage = Usage(since_s=now_s)

    def _end(self, now_s: float) -> None:
        self._count(now_s)
        raise SimulationEnded

    # ── nodes ──

    def nodes(self) -> list[Any]:
        return [{"NodeID": node_id, "Alive": True, "Labels": {ACCELERATOR_TYPE: "H200"}} for node_id in self._up]

    def list_up(self) -> dict[str, str]:
        """Return the addresses of the nodes that Ray lists as up, by id."""
        return {node.id: node.address for node in self._up.values()}

    def _join(self, address: str, now_s: float) -> None:
        node = SimulatedNode(f"{self._starts:056x}", address)
        self._starts += 1
        self._up[node.id] = self._free[node.id] = node
        fails_s = now_s + self._rng.expovariate(self._failures.per_node_s)
        self._at(fails_s, lambda: self._fail(node, fails_s))
        self._place(now_s)

    def _fail(self, node: SimulatedNode, now_s: float) -> None:
        self._count(now_s)
        node.has_failed = True
        self.usage.failures += 1
        self._down_gpus += GPUS_PER_NODE
        self._free.pop(node.id, None)
        if node.group and not node.group.is_broken:
            self._break(node.group, now_s)
        back_s = now_s + max(DETECTION_S, self._rng.expovariate(1 / self._failures.repair_s))
        self._at(now_s + DETECTION_S, lambda: self._notice(node))
        self._at(back_s, lambda: self._repair(node.address, back_s))

    def _repair(self, address: str, now_s: float) -> None:
        self._count(now_s)
        self._down_gpus -= GPUS_PER_NODE
        self._join(address, now_s)

    def _break(self, group: Group, now_s: float) -> None:
        """End the trial that a gang runs. Its driver does not know yet."""
        group.is_broken = True
        for attempt in group.attempts.values():
            if attempt.is_running:
                self._busy_gpus -= self._gpus
                self.usage.interrupted += 1
                self.usage.rerun_s += self._gpus * (now_s - max(attempt.started_s, self.usage.since_s))

    def _notice(self, node: SimulatedNode) -> None:
        """Let Ray list a node as down, and the calls fail that its workers had not answered."""
        del self._up[node.id]
        group = node.group
        if group is None or group.is_removed:
            return
        pending = group.handshakes[:] if not group.attempts else next(iter(group.attempts.values())).replies
        for worker, reply in pending:
            if worker.node is node and not reply.arrived:
                reply.value = _raise_actor_died
                self._arrive(reply)

    # ── gangs ──

    def placement_group(self, bundles: Sequence[Any], bundle_label_selector: Sequence[Any], **_: Any) -> Group:
        group = Group(len(bundles), bundle_label_selector[0])
        self._waiting.append(group)
        self._place(self.monotonic())
        return group

    def remove_placement_group(self, group: Group) -> None:
        if group in self._waiting:
            self._waiting.remove(group)
        if not group.is_broken and any(attempt.is_running for attempt in group.attempts.values()):
            self._count(self.monotonic())
            self._busy_gpus -= self._gpus
        group.is_removed = True
        for node in group.nodes:
            node.group = None
            if not node.has_failed:
                self._free[node.id] = node
        self._place(self.monotonic())

    def _place(self, now_s: float) -> None:
        """Give free nodes to the gangs that wait, in their order."""
        for group in self._waiting[:]:
            if group.bundles > len(self._free):
                continue
            admitted = [node for node in self._free.values() if group.admits(node)][: group.bundles]
            if len(admitted) == group.bundles:
                self._waiting.remove(group)
                group.nodes = admitted
                for node in admitted:
                    node.group = group
                    del self._free[node.id]
                self._at(now_s + START_S, lambda group=group: self._start(group))

    def _start(self, group: Group) -> None:
        """Let the workers of a gang report that they are up, unless a node has failed meanwhile."""
        for worker, reply in group.handshakes:
            if not (group.is_removed or worker.node.has_failed):
                self._arrive(reply)

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, *, scheduling_strategy: tuple[Group, int], **_: Any) -> Any:
        group, bundle = scheduling_strategy
        return SimpleNamespace(remote=lambda: self._start_actor(group, bundle))

    def _start_actor(self, group: Group, bundle: int) -> Worker:
        worker = Worker(group, bundle, len(group.handshakes) % GPUS_PER_NODE)
        reply = Ref(math.inf, lambda: self._location_of(worker))
        group.handshakes.append((worker, reply))
        worker.handshake = SimpleNamespace(remote=lambda: reply)
        worker.run = SimpleNamespace(remote=lambda job: self._run(worker, job))
        return worker

    def _location_of(self, worker: Worker) -> dict[str, Any]:
        node = worker.node
        number = int(node.address[1:])
        location = {"address": f"10.0.{number // 250}.{number % 250}", "port": 4242, "node": node.address, "pid": 1}
        return location | {"log": "", "gpus": str(worker.gpu), "node_id": node.id}

    def _run(self, worker: Worker, job: Any) -> Ref:
        group, number = worker.group, job.rank.sequence_number
        if worker.node.has_failed and worker.node.id not in self._up:
            return self._reply_at(self.monotonic(), _raise_actor_died)
        if number not in group.attempts:
            now_s = self.monotonic()
            started_s = max([now_s, *(attempt.ended_s for attempt in group.attempts.values())])
            trial_s = self._trial_s * random.Random(number).uniform(1 - SPREAD, 1 + SPREAD)
            attempt = group.attempts[number] = Attempt(started_s, started_s + trial_s)
            self._at(started_s, lambda: self._begin(group, attempt))
            self._at(attempt.ended_s, lambda: self._finish(group, number))
        reply = Ref(math.inf, lambda: self._build_result(job))
        group.attempts[number].replies.append((worker, reply))
        return reply

    def _begin(self, group: Group, attempt: Attempt) -> None:
        if not (group.is_broken or group.is_removed):
            self._count(attempt.started_s)
            self._busy_gpus += self._gpus
            attempt.is_running = True

    def _finish(self, group: Group, number: int) -> None:
        if not (group.is_broken or group.is_removed):
            attempt = group.attempts.pop(number)
            self._count(attempt.ended_s)
            self._busy_gpus -= self._gpus
            for _, reply in attempt.replies:
                self._arrive(reply)


def _raise_actor_died() -> None:
    raise ActorDiedError
