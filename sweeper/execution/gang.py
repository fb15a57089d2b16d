"""A gang of workers runs one trial after another. The ranks' results are merged into the trial's result."""

import math
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from sweeper.common.grouping import group_values
from sweeper.common.trials import LEFT, LOST_NODE, Trial, TrialResult, TrialStatus, rank_file_name
from sweeper.execution.cluster import summarize_ray_error
from sweeper.execution.ray_internals import LOW_MEMORY
from sweeper.execution.worker import RankResult
from workloads.api.contract import Rank, Scalar
from workloads.api.secrets import mask

# The environment variables with which a gang's workers were started, sorted by name.
Environment = tuple[tuple[str, str], ...]

TRIALS_PER_GANG = 2  # one running and one queued
ROOT_CAUSE_GRACE_S = 3.0  # after the first rank's failure, the wait for a report from the rank that caused it
MAX_LEFT = 300  # characters of leftover processes' command lines to keep
MAX_DRIFT = 1e-4  # relative drift between machines' monotonic clocks; crystals are accurate to 100 ppm
# A rank never reports one of these statuses merely because another rank died.
ROOT_CAUSES = (TrialStatus.INFEASIBLE, TrialStatus.PRUNED, TrialStatus.INCONCLUSIVE, TrialStatus.TIMED_OUT)


@dataclass
class RunningTrial:
    """A trial that a gang is running or will run next. Times use the driver's monotonic clock."""

    trial: Trial
    pending: dict[Any, int]  # ranks that have not reported, keyed by the reference to the result
    results: list[RankResult] = field(default_factory=list)  # results of the ranks with a measurement
    failures: list[TrialResult] = field(default_factory=list)  # one for each rank without a measurement
    failure_deadline_s: float = math.inf  # the trial then fails without waiting for the remaining ranks
    started_s: float = 0.0  # start of the trial; before that, the time when the gang received it
    sequence_number: int = 0
    timeout_s: float = math.inf  # trial.timeout_s
    kill_after_s: float = math.inf  # the run time after which the driver ends the trial
    waits_for_all: bool = False  # if one rank fails, the results of the other ranks are kept

    @property
    def deadline_s(self) -> float:
        """The time at which to check the trial even if no rank has reported."""
        return min(self.failure_deadline_s, self.started_s + self.kill_after_s)


class NodeClocks:
    """Uses arriving results to estimate how far the driver's monotonic clock is ahead of each node's.

    The nodes' wall clocks may be wrong, but monotonic clocks differ only in their zero points. A result cannot arrive
    before it is created, so the smallest observed difference is the best estimate. Times are late by the smallest
    delay, never early."""

    def __init__(self) -> None:
        self._offsets: dict[str, tuple[float, float]] = {}  # offset and time of observation, by node id

    def observe(self, node_id: str, ended_s: float, now_s: float | None = None) -> None:
        """Record the arrival of a result that the node created at `ended_s` on the node's monotonic clock."""
        now_s = time.monotonic() if now_s is None else now_s
        offset_s = now_s - ended_s
        if node_id in self._offsets:
            earlier_s, at_s = self._offsets[node_id]
            offset_s = min(offset_s, earlier_s + MAX_DRIFT * (now_s - at_s))
        self._offsets[node_id] = offset_s, now_s

    def to_driver(self, node_id: str, at_s: float) -> float:
        """Convert a node's monotonic time to the driver's. Requires an earlier call of `observe` for the node."""
        return at_s + self._offsets[node_id][0]


@dataclass
class Gang:
    """The workers that run one trial after another."""

    name: str
    workers: list[Any]  # the actors, in rank order once the gang is ready
    group: PlacementGroup | None  # None for a single rank
    handshakes: list[Any]  # references to the results of `Worker.handshake`, in creation order
    pending_handshakes: list[Any]
    environment: Environment = ()
    locations: list[dict[str, Any]] = field(default_factory=list)  # handshake results, by rank
    trials: deque[RunningTrial] = field(default_factory=deque)  # the running trial, then the queued trial
    planned_ranks_per_node: int | None = None  # None if any placement will do
    killed: bool = False
    draining: bool = False  # the gang ends after its trials because its nodes are no longer used
    retiring: bool = False  # the gang ends after its trials to make room for another environment
    clocks: NodeClocks = field(default_factory=NodeClocks)

    @property
    def ready(self) -> bool:
        return not self.pending_handshakes

    @property
    def accepts_trials(self) -> bool:
        return self.ready and not self.draining and not self.retiring

    @property
    def has_capacity(self) -> bool:
        return self.accepts_trials and len(self.trials) < TRIALS_PER_GANG

    @property
    def node_ids(self) -> list[str]:
        """Ray's node ids, in rank order."""
        return list(dict.fromkeys(location["node_id"] for location in self.locations))

    @property
    def misplacement(self) -> str:
        """How a ready gang's placement differs from the plan, or an empty string if it does not."""
        counts = Counter(location["node_id"] for location in self.locations).values()
        if self.planned_ranks_per_node is None or {*counts} == {self.planned_ranks_per_node}:
            return ""
        placed = " + ".join(map(str, sorted(counts, reverse=True)))
        return f"Ray placed {placed} ranks on {len(counts)} nodes, and {self.planned_ranks_per_node} a node are planned"

    @property
    def location(self) -> dict[str, Scalar]:
        """The location stored with a trial: rank 0's location without the rendezvous, and the ids of all nodes."""
        hidden = ("address", "port", "node_id")
        stored = {name: value for name, value in self.locations[0].items() if name not in hidden}
        return stored | {"node_ids": " ".join(self.node_ids)}

    def build_ranks(self, device: str, sequence_number: int, timeout_s: float, clock_mhz: float = 0.0) -> list[Rank]:
        addresses = [location["address"] for location in self.locations]
        nodes = list(dict.fromkeys(addresses))
        devices = group_values((location["address"], location["gpus"]) for location in self.locations)
        first_ranks = {address: addresses.index(address) for address in nodes}
        node_ranks = {address: number for number, address in enumerate(nodes)}
        # The size of the groups of consecutive ranks that share a node.
        ranks_per_node = math.gcd(*Counter(addresses).values())
        host = "127.0.0.1" if ranks_per_node == len(addresses) else addresses[0]
        return [
            Rank(
                rank=number,
                world_size=len(addresses),
                device=device,
                ranks_per_node=ranks_per_node,
                rendezvous=f"{host}:{self.locations[0]['port']}",
                sequence_number=sequence_number,
                local_rank=number - first_ranks[address],
                node_rank=node_ranks[address],
                nodes=len(nodes),
                node_devices=",".join(filter(None, devices[address])),
                timeout_s=timeout_s,
                clock_mhz=clock_mhz,
            )
            for number, address in enumerate(addresses)
        ]

    def assign_ranks(self) -> None:
        """Order the workers by node and GPU so that consecutive ranks are neighbors."""

        def place(entry: tuple[dict[str, Any], Any]) -> tuple[str, int]:
            first_gpu = entry[0]["gpus"].split(",")[0]
            return entry[0]["address"], int(first_gpu) if first_gpu.isdigit() else 0

        ordered = sorted(zip(ray.get(self.handshakes), self.workers, strict=True), key=place)
        self.locations = [location for location, _ in ordered]
        self.workers = [worker for _, worker in ordered]

    def pending_refs(self) -> list[Any]:
        """Return the references that the gang waits for: handshakes at first, then the running trial's results."""
        if not self.ready:
            return self.pending_handshakes
        return list(self.trials[0].pending) if self.trials else []

    def collect_result(self, arrived: set[Any]) -> TrialResult | None:
        """Return the running trial's result, or None if the trial has not ended. If any rank fails, the trial fails."""
        if not self.trials:
            return None
        running, now = self.trials[0], time.monotonic()
        for ref in [ref for ref in running.pending if ref in arrived]:
            rank = running.pending.pop(ref)
            try:
                result: RankResult = ray.get(ref)
                self.clocks.observe(self.locations[rank]["node_id"], result.ended_s)
            except RayTaskError as error:  # a bug in the worker's code; a trial's exceptions arrive in the result
                result = RankResult(rank, reason=summarize_ray_error(error))
            except RayError as error:
                result = RankResult(rank, status="lost", reason=f"the worker died: {summarize_ray_error(error)}")
                if isinstance(error, OutOfMemoryError) or LOW_MEMORY in str(error):  # a retry would fail again
                    reason = "out of memory: the node was running low on memory and Ray ended the worker"
                    result = RankResult(rank, status="infeasible", reason=reason)
            if result.measurement is None:
                running.failures.append(self._build_failure(running, result))
            else:
                running.results.append(result)
        is_late = bool(running.pending) and now - running.started_s > running.kill_after_s
        if is_late and (running.waits_for_all or not running.failures):
            why = f"took longer than trial.timeout_s={running.timeout_s:g}"
            for rank in running.pending.values():
                running.failures.append(self._build_failure(running, RankResult(rank, status="timed_out", reason=why)))
            return _merge_failures(running.failures, running.results)
        if running.failures:
            # A rank may fail because another rank died, and the report with the cause may arrive a little later.
            if not running.waits_for_all:
                running.failure_deadline_s = min(running.failure_deadline_s, now + ROOT_CAUSE_GRACE_S)
            known = not running.waits_for_all and TrialStatus.INFEASIBLE in {one.status for one in running.failures}
            complete = known or not running.pending or now >= running.failure_deadline_s
            return _merge_failures(running.failures, running.results) if complete else None
        return None if running.pending else self._build_measured(running.results)

    def _build_measured(self, results: list[RankResult]) -> TrialResult:
        results.sort(key=lambda result: result.rank)
        nodes = [(self.locations[result.rank]["node_id"], result) for result in results]
        started_s = min(self.clocks.to_driver(node, result.started_s) for node, result in nodes)
        ended_s = max(self.clocks.to_driver(node, result.ended_s) for node, result in nodes)
        ended_at_s = time.time() - (time.monotonic() - ended_s)
        return TrialResult(
            TrialStatus.COMPLETE,
            ended_at_s - (ended_s - started_s),
            ended_at_s,
            measurements=tuple(result.measurement for result in results if result.measurement),
            where=self.location | _name_left(*results),
            reusable=not any(result.left for result in results),  # a later trial may rely on the ended processes
        )

    def _build_failure(self, running: RunningTrial, result: RankResult) -> TrialResult:
        now = time.time()
        where, location = self.location | _name_left(result), self.locations[result.rank]
        detail = result.detail or _read_log_tail(location.get("log"))
        if detail and len(self.workers) > 1:
            detail = f"rank {result.rank} on {location['node']}:\n{detail}"
        if result.status == "lost":
            where[LOST_NODE] = location["node_id"]
        return TrialResult(
            TrialStatus(result.status),
            now - (time.monotonic() - running.started_s),
            now,
            result.reason,
            detail,
            where=where,
            # With several ranks, the other ranks may still wait for the failed rank in a collective operation.
            reusable=result.reusable and len(self.workers) == 1 and not result.left,
            of_ranks={result.rank: f"{result.status}: {result.reason}"},
            files={rank_file_name(result.rank, name): content for name, content in result.files.items()},
        )


def _name_left(*results: RankResult) -> dict[str, Scalar]:
    left = dict.fromkeys(command for result in results for command in result.left)
    return {LEFT: mask("; ".join(left))[:MAX_LEFT]} if left else {}


def _merge_failures(failures: Sequence[TrialResult], results: Sequence[RankResult]) -> TrialResult:
    """Return the failure with the root cause, or else the first failure, with the last lines and files of all ranks."""
    order = {status: place for place, status in enumerate(ROOT_CAUSES)}
    cause = min(failures, key=lambda failure: order.get(failure.status, len(order)))
    detail = "\n\n".join(dict.fromkeys(failure.detail for failure in failures if failure.detail))
    files = {name: content for failure in failures for name, content in failure.files.items()}
    of_ranks = {rank: one for failure in failures for rank, one in failure.of_ranks.items()}
    of_ranks |= {result.rank: result.measurement for result in results if result.measurement}
    return replace(cause, detail=detail, files=files, of_ranks=of_ranks)


def _read_log_tail(log: Scalar, lines: int = 30) -> str:
    if not isinstance(log, str) or not Path(log).is_file():
        return ""
    with Path(log).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
