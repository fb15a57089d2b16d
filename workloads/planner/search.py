"""The fastest layouts of a job on a cluster. A bound leaves out those that cannot be among them; none is hidden."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from workloads.planner.cluster import Cluster
from workloads.planner.enumeration import Family, list_families
from workloads.planner.estimate import JobEstimate, StageMemory
from workloads.planner.job import Job, TrainingLayout

USABLE_MEMORY = 0.97  # of what the device's driver reports, by one process


@dataclass(frozen=True)
class Estimator:
    """The functions that estimate a job on a cluster.

    Attributes:
        estimate: time and memory.
        memory: of each pipeline rank, the same as in `estimate`, without the time.
    """

    estimate: Callable[[Job, Cluster], JobEstimate]
    memory: Callable[[Job, Cluster], tuple[StageMemory, ...]]


@dataclass(frozen=True)
class Candidate:
    """A layout with its estimate."""

    layout: TrainingLayout
    estimate: JobEstimate


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        best: the fastest layouts that fit into memory, the fastest first.
        smallest: the layout that needs the least memory; None if no layout is valid.
        estimated: layouts whose step time was estimated.
        too_large: layouts that do not fit. Where one does not, neither does the same with larger micro-batches or
            fewer shards.
        slower: layouts that were left out because a faster version of them is too slow to be among the best.
    """

    best: tuple[Candidate, ...]
    smallest: Candidate | None
    estimated: int
    too_large: int
    slower: int


def find_layouts(
    job: Job,
    cluster: Cluster,
    estimator: Estimator,
    options: Mapping[str, Sequence[Any]],
    fixed: Mapping[str, Any],
    keep: int = 20,
) -> SearchResult:
    """Return the `keep` fastest layouts of the job that fit into the GPUs' memory.

    `options` and `fixed` are those of `workloads.planner.enumeration.list_families`.
    """
    search = _Search(job, cluster, estimator, keep)
    search.run(list_families(job, cluster, options, fixed))
    best = sorted((candidate for _, _, candidate in search.best), key=lambda item: item.estimate.step.total_s)
    smallest = None if search.smallest is None else search.candidate(search.smallest)
    return SearchResult(tuple(best), smallest, search.estimated, search.too_large, search.slower)


class _Search:
    """The state of a search: the best layouts so far, as a heap with the slowest of them first."""

    def __init__(self, job: Job, cluster: Cluster, estimator: Estimator, keep: int) -> None:
        self.best: list[tuple[float, int, Candidate]] = []
        self.smallest: TrainingLayout | None = None
        self.estimated = self.too_large = self.slower = 0
        self._job, self._cluster, self._estimator, self._keep = job, cluster, estimator, keep
        self._limit_gib = USABLE_MEMORY * cluster.device.memory_gib
        self._smallest_gib = math.inf
        # By division, the micro-batches and shards that do not fit, whatever is recomputed.
        self._without_room = dict[TrainingLayout, list[tuple[int, int]]]()
        self._bounds_s = dict[TrainingLayout, float]()
        self._order = count()

    def run(self, families: Iterable[Family]) -> None:
        for family in families:
            layouts = (family.fastest, *family.others)
            if not self._has_room(family):
                self.too_large += len(layouts)
            elif (fastest := self._estimate_unless_slow(family.fastest)) is None:
                self.slower += len(layouts)
            else:
                self._consider(fastest)
                for layout in family.others:
                    self._try(layout)

    def _estimate_unless_slow(self, layout: TrainingLayout) -> Candidate | None:
        """Return the layout with its estimate; None if it is too slow to be among the best.

        How data parallel ranks divide into replicas and shards changes nothing of the other parts of a step, so what
        one division takes without these parts is a bound for all.
        """
        key = replace(layout, dp_replicate=1, dp_shard=layout.dp)
        if self._bounds_s.get(key, 0.0) >= self._slowest_s:
            return None
        candidate = self.candidate(layout)
        step = candidate.estimate.step
        self._bounds_s[key] = step.total_s - step.data_parallel - step.optimizer - step.copies
        return candidate if step.total_s < self._slowest_s else None

    def candidate(self, layout: TrainingLayout) -> Candidate:
        """Return the layout with its estimate."""
        return Candidate(layout, self._estimator.estimate(replace(self._job, layout=layout), self._cluster))

    @property
    def _slowest_s(self) -> float:
        """The step time that a layout has to beat."""
        return -self.best[0][0] if len(self.best) == self._keep else math.inf

    def _has_room(self, family: Family) -> bool:
        """Return whether the layout of the family that saves the most memory fits."""
        layout = (family.fastest, *family.others)[-1]
        failed = self._without_room.setdefault(replace(layout, micro_batch=1, dp_replicate=1, dp_shard=layout.dp), [])
        if any(layout.micro_batch >= micro_batch and layout.dp_shard <= shards for micro_batch, shards in failed):
            return False
        fits = self._memory_gib(layout) <= self._limit_gib
        if not fits:
            failed.append((layout.micro_batch, layout.dp_shard))
        return fits

    def _memory_gib(self, layout: TrainingLayout) -> float:
        stages = self._estimator.memory(replace(self._job, layout=layout), self._cluster)
        memory_gib = max(stage.total_gib for stage in stages)
        if memory_gib < self._smallest_gib:
            self.smallest, self._smallest_gib = layout, memory_gib
        return memory_gib

    def _try(self, layout: TrainingLayout) -> None:
        if self._memory_gib(layout) > self._limit_gib:
            self.too_large += 1
        else:
            self._consider(self.candidate(layout))

    def _consider(self, candidate: Candidate) -> None:
        """Keep a layout that fits, if it is among the best so far."""
        if candidate.estimate.memory.total_gib > self._limit_gib:
            self.too_large += 1
            return
        self.estimated += 1
        if candidate.estimate.step.total_s < self._slowest_s:
            entry = (-candidate.estimate.step.total_s, next(self._order), candidate)
            push = heapq.heappush if len(self.best) < self._keep else heapq.heapreplace
            push(self.best, entry)
