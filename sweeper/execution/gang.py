"""A gang: the workers of one trial after another, and how a trial ended that they ran."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from sweeper.common.trials import TrialResult, TrialStatus
from sweeper.execution.cluster import brief
from sweeper.execution.worker import RankResult
from sweeper.search.study import Trial
from workloads.api.contract import Rank, Scalar

PATIENCE_FOR_THE_REASON_S = 3.0
KNOWING = (
    TrialStatus.INFEASIBLE,
    TrialStatus.PRUNED,
    TrialStatus.TIMED_OUT,
)  # what no rank says because another was gone


@dataclass
class Running:
    """A trial that a gang holds. Its clock starts when its turn comes."""

    trial: Trial
    waiting: dict[Any, int]  # the ranks that have not replied, by the references to what they will say
    replies: list[RankResult] = field(default_factory=list)
    bad: list[TrialResult] = field(default_factory=list)  # how it ended for the ranks that did badly
    bad_until_s: float = math.inf  # from when on the others are not waited for
    since_s: float = 0.0
    sequence_number: int = 0
    timeout_s: float = math.inf  # as it was said
    limit_s: float = math.inf  # from where on it is ended from outside

    @property
    def until_s(self) -> float:
        """When it is to be looked at again, whatever it says until then."""
        return min(self.bad_until_s, self.since_s + self.limit_s)


@dataclass
class Gang:
    """The workers of one trial after another, rank by rank."""

    name: str
    workers: list[Any]
    group: PlacementGroup | None
    greetings: list[Any]  # references to what each worker says of itself
    handshake: list[Any]  # those of them that have not come
    where: list[dict[str, Scalar]] = field(default_factory=list)  # what they said, by rank, once all have
    jobs: deque[Running] = field(default_factory=deque)
    ended: bool = False
    leaving: bool = False  # its nodes are no longer used: it ends with what it holds

    @property
    def open(self) -> bool:
        """Whether it takes trials."""
        return self.ready and not self.leaving

    @property
    def nodes(self) -> list[str]:
        """Ray's ids, in the order of ranks."""
        return list(dict.fromkeys(str(place["node_id"]) for place in self.where))

    @property
    def ready(self) -> bool:
        return not self.handshake

    @property
    def ranks_per_node(self) -> int:
        """As many as neighbours in number are on one node wherever they begin."""
        return math.gcd(*Counter(place["address"] for place in self.where).values())

    @property
    def rendezvous(self) -> str:
        """Where rank 0 listens for the others: on no outer interface where all are on one node."""
        address = "127.0.0.1" if self.ranks_per_node == len(self.workers) else self.where[0]["address"]
        return f"{address}:{self.where[0]['port']}"

    @property
    def said_place(self) -> dict[str, Scalar]:
        """Rank 0's, for the books: what it was met by is nobody's business."""
        kept = {name: value for name, value in self.where[0].items() if name not in ("address", "port", "node_id")}
        return kept | {"node_ids": " ".join(self.nodes)}

    def headed(self, rank: int, lines: str) -> str:
        """A rank's last lines; of one of several below where that was."""
        if len(self.workers) == 1 or not lines:
            return lines
        return f"rank {rank} on {self.where[rank]['node']}:\n{lines}"

    def ranks(self, device: str, sequence_number: int, timeout_s: float) -> list[Rank]:
        """What each rank is told of its place."""
        addresses = [str(place["address"]) for place in self.where]
        nodes, found = list(dict.fromkeys(addresses)), list[Rank]()
        for number, address in enumerate(addresses):
            there = [str(place["gpus"]) for place in self.where if place["address"] == address]
            found.append(
                Rank(
                    *(number, len(addresses), device, self.ranks_per_node, self.rendezvous, sequence_number),
                    local_rank=number - addresses.index(address),
                    node_rank=nodes.index(address),
                    nodes=len(nodes),
                    node_devices=",".join(filter(None, there)),
                    timeout_s=timeout_s,
                )
            )
        return found

    def number(self) -> None:
        """Ranks by node and GPU, so that neighbours in number are neighbours in place."""
        places = zip(ray.get(self.greetings), self.workers, strict=True)
        ordered = sorted(places, key=lambda each: (str(each[0]["address"]), _gpu(each[0])))
        self.where, self.workers = [where for where, _ in ordered], [worker for _, worker in ordered]

    def awaited(self) -> list[Any]:
        """What the next news of this gang will come from."""
        if not self.ready:
            return self.handshake
        return list(self.jobs[0].waiting) if self.jobs else []

    # ── how a trial ended ──

    def outcome(self, arrived: set[Any]) -> TrialResult | None:
        """How the running trial ended, now that these have come, or None while it runs. One rank's failure ends it for
        all."""
        if not self.jobs:
            return None
        job, now = self.jobs[0], time.monotonic()
        job.bad += self._take_replies(job, [ref for ref in job.waiting if ref in arrived])
        if job.bad:
            # What one rank says may be that another is gone: the one that knows why speaks soon.
            job.bad_until_s = min(job.bad_until_s, now + PATIENCE_FOR_THE_REASON_S)
            known = any(bad.status is TrialStatus.INFEASIBLE for bad in job.bad)
            return _of_all(job.bad) if known or not job.waiting or now >= job.bad_until_s else None
        if not job.waiting:
            job.replies.sort(key=lambda reply: reply.rank)
            return TrialResult(
                TrialStatus.COMPLETE,
                min(reply.started_at_s for reply in job.replies),
                max(reply.ended_at_s for reply in job.replies),
                measurements=tuple(reply.measurement for reply in job.replies if reply.measurement),
                where=self.said_place,
                reusable=True,
            )
        if now - job.since_s > job.limit_s:
            silent = next(iter(job.waiting.values()))
            return self._bad(job, TrialStatus.TIMED_OUT, f"took longer than trial.timeout_s={job.timeout_s:g}", silent)
        return None

    def _take_replies(self, job: Running, refs: Sequence[Any]) -> list[TrialResult]:
        """Note what these ranks reply; how the trial ended for those that did badly."""
        found = list[TrialResult]()
        for ref in refs:
            rank = job.waiting.pop(ref)
            try:
                reply: RankResult = ray.get(ref)
            except RayTaskError as error:  # the worker's own code: what a trial raises comes as a reply
                found.append(self._bad(job, TrialStatus.FAILED, brief(error), rank))
                continue
            except RayError as error:
                found.append(self._bad(job, *_death(error), rank))
                continue
            if reply.measurement is None:
                bad = self._bad(job, _ending(reply), reply.reason, rank, reply.detail)
                # Of several ranks, the others may wait for the one that refused.
                found.append(replace(bad, reusable=reply.reusable and len(self.workers) == 1))
            else:
                job.replies.append(reply)
        return found

    def _bad(self, job: Running, status: TrialStatus, reason: str, rank: int = 0, detail: str = "") -> TrialResult:
        """How it ended for a rank, with that rank's last lines."""
        now = time.time()
        started = now - (time.monotonic() - job.since_s)
        detail = self.headed(rank, detail or _tail(self.where[rank].get("log")))
        return TrialResult(status, started, now, reason, detail, where=self.said_place)


def _ending(reply: RankResult) -> TrialStatus:
    """Of a rank that has measured nothing."""
    if reply.infeasible:
        return TrialStatus.INFEASIBLE
    return TrialStatus.PRUNED if reply.pruned else TrialStatus.TIMED_OUT if reply.timed_out else TrialStatus.FAILED


def _of_all(found: Sequence[TrialResult]) -> TrialResult:
    """How a trial ended in which these ranks did badly: as one says that knows, else as the first says, with the last
    lines of all. What one has seen is often only that another was gone."""
    first = min(found, key=lambda bad: KNOWING.index(bad.status) if bad.status in KNOWING else len(KNOWING))
    return replace(first, detail="\n\n".join(dict.fromkeys(bad.detail for bad in found if bad.detail)))


def _death(error: RayError) -> tuple[TrialStatus, str]:
    """A worker that is gone: lost, unless it was ended for its memory, which would happen again."""
    text = str(error)
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return TrialStatus.INFEASIBLE, "out of memory: the node was running low on memory and Ray ended the worker"
    return TrialStatus.LOST, f"the worker is gone: {brief(error)}"


def _gpu(place: Mapping[str, Scalar]) -> int:
    first = str(place["gpus"]).split(",")[0]
    return int(first) if first.isdigit() else 0


def _tail(log: Scalar, lines: int = 30) -> str:
    """The last lines of a worker's log, where it is on this machine."""
    if not isinstance(log, str) or not Path(log).is_file():
        return ""
    with Path(log).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
