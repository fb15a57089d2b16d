"""The fastest layouts of a job on a cluster. A bound leaves out those that cannot be among them; none is hidden."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from workloads.planner.cluster import Cluster
from workloads.planner.enumeration import Family, list_families
from workloads.planner.estimate import JobEstimate
from workloads.planner.job import Job, TrainingLayout

Estimator = Callable[[Job, Cluster], JobEstimate]
USABLE_MEMORY = 0.97  # of what the device's driver reports, by one process


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
        smallest: the layout that needs the least memory of those that do not fit; None if all fit.
        estimated: layouts that were estimated.
        too_large: of these, layouts that do not fit.
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
    estimate: Estimator,
    options: Mapping[str, Sequence[Any]],
    fixed: Mapping[str, Any],
    keep: int = 20,
) -> SearchResult:
    """Return the `keep` fastest layouts of the job that fit into the GPUs' memory.

    `options` and `fixed` are those of `workloads.planner.enumeration.list_families`.
    """
    search = _Search(job, cluster, estimate, keep)
    search.run(list_families(job, cluster, options, fixed))
    best = sorted((candidate for _, _, candidate in search.best), key=lambda item: item.estimate.step.total_s)
    return SearchResult(tuple(best), search.smallest, search.estimated, search.too_large, search.slower)


class _Search:
    """The state of a search: the best layouts so far, as a heap with the slowest of them first."""

    def __init__(self, job: Job, cluster: Cluster, estimate: Estimator, keep: int) -> None:
        self.best: list[tuple[float, int, Candidate]] = []
        self.smallest: Candidate | None = None
        self.estimated = self.too_large = self.slower = 0
        self._job, self._cluster, self._estimate, self._keep = job, cluster, estimate, keep
        self._limit_gib = USABLE_MEMORY * cluster.device.memory_gib
        self._order = count()

    def run(self, families: Iterable[Family]) -> None:
        for family in families:
            first = self._try(family.fastest)
            if first.estimate.step.total_s >= self._slowest_s:
                self.slower += len(family.others)
                continue
            for layout in family.others:
                self._try(layout)

    @property
    def _slowest_s(self) -> float:
        """The step time that a layout has to beat."""
        return -self.best[0][0] if len(self.best) == self._keep else float("inf")

    def _try(self, layout: TrainingLayout) -> Candidate:
        candidate = Candidate(layout, self._estimate(replace(self._job, layout=layout), self._cluster))
        self.estimated += 1
        if candidate.estimate.memory.total_gib > self._limit_gib:
            self.too_large += 1
            smallest = self.smallest
            if smallest is None or candidate.estimate.memory.total_gib < smallest.estimate.memory.total_gib:
                self.smallest = candidate
        elif candidate.estimate.step.total_s < self._slowest_s:
            entry = (-candidate.estimate.step.total_s, next(self._order), candidate)
            push = heapq.heappush if len(self.best) < self._keep else heapq.heapreplace
            push(self.best, entry)
        return candidate
