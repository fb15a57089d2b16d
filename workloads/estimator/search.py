"""Find a job's fastest layouts on a cluster. Bounds exclude only layouts that cannot be among the fastest."""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from workloads.estimator.estimate import JobEstimate, StageMemory, find_band
from workloads.estimator.memory import peak_memory
from workloads.estimator.step import estimate_job, step_bound_s, step_seconds
from workloads.hardware.cluster import Cluster
from workloads.layouts.enumeration import Family, list_families
from workloads.layouts.layout import Job, Layout, vary


def bound_gib(memory: StageMemory, job: Job, cluster: Cluster) -> float:
    """Return a layout's memory in GiB, plus its error band. A layout fits if this much memory is usable."""
    return memory.needed_gib * (1 + find_band(job, cluster, "memory").error_share)


def fills_memory(memory: StageMemory, cluster: Cluster) -> bool:
    """Return whether the allocator has less room than it usually reserves, which can stall the step.

    In six of these layouts on two H100s, releasing segments took 18, 10, 9, 3, 2 and 1% of step time
    (benchmarks/results/parallel_h100.md). One of the six is the fastest layout measured, so the search penalizes none.
    """
    return memory.total_gib > cluster.usable_gib


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    estimate: JobEstimate


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search."""

    best: tuple[Candidate, ...]  # the fastest layouts that fit by their bound, or by their estimate if no bound fits
    smallest: Candidate | None  # the layout that needs the least memory; None if no layout is valid
    estimated: int  # number of layouts that fit and were among the best when they were estimated
    # number of layouts that do not fit; larger micro-batches or fewer shards do not fit either
    too_large: int
    slower: int  # number of layouts that are too slow to be among the best, by step time or by its bound


def find_layouts(
    job: Job, cluster: Cluster, options: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any], keep: int = 20
) -> SearchResult:
    """Return the `keep` fastest layouts that fit. See `list_families` for `options` and `fixed`."""
    for share in (1 + find_band(job, cluster, "memory").error_share, 1.0):
        search = _Search(job, cluster, keep, cluster.usable_gib / share)
        search.run(list_families(job, cluster, options, fixed))
        if search.best or search.smallest is None or search.smallest_gib > cluster.usable_gib:
            break
    best = tuple(search.candidate(layout) for _, _, layout in sorted(search.best, reverse=True))
    smallest = None if search.smallest is None else search.candidate(search.smallest)
    return SearchResult(best, smallest, search.estimated, search.too_large, search.slower)


def _all_but_stages(family: Family) -> tuple[object, ...]:
    layout = family.template
    sizes = (
        layout.dp_shard,
        layout.dp,
        layout.tp,
        layout.cp,
        layout.pp,
        layout.ep,
        layout.sharding,
        layout.micro_batch,
    )
    is_bounded = layout.schedule in ("1f1b", "interleaved")  # `step_bound_s` has no bound for the stages of others
    return (*sizes, family.checkpointings, None if is_bounded else layout)


class _Search:
    """The state of a search, with a heap of the best layouts so far, slowest first."""

    def __init__(self, job: Job, cluster: Cluster, keep: int, room_gib: float) -> None:
        self.best: list[tuple[float, int, Layout]] = []
        self.smallest: Layout | None = None
        self.estimated = self.too_large = self.slower = 0
        self.smallest_gib = math.inf
        self._job, self._cluster, self._keep, self._room_gib = job, cluster, keep, room_gib
        # Micro-batch sizes and shard counts that do not fit, keyed by the layout's other properties.
        self._without_room = dict[tuple[object, ...], list[tuple[int, int]]]()
        self._order = count()

    def run(self, families: Iterable[Family]) -> None:
        """Consider layouts in order of their lower bound on step time, because the first ones rule out most others. A
        family is considered once for each value of `checkpointing`, because slower values have higher bounds. Families
        that differ only in the stages of a pipeline have a bound in common first."""
        groups = defaultdict[tuple[object, ...], list[Family]](list)
        for family in families:
            groups[_all_but_stages(family)].append(family)
        waiting = [self._next(group, 0) for group in groups.values()]
        heapq.heapify(waiting)
        while waiting:
            bound_s, _, group, way = heapq.heappop(waiting)
            family, ways = group[0], len(group[0].checkpointings)
            if bound_s >= self._slowest_s:
                self.slower += sum(map(len, group)) // ways * (ways - way)
                continue
            if len(group) > 1:
                for family in group:
                    heapq.heappush(waiting, self._next([family], way))
                continue
            for reshard in family.reshardings:
                for place, layout in enumerate(family.list_layouts(family.checkpointings[way], reshard)):
                    if not self._consider(layout):  # layouts with fewer shards do not fit either
                        self.too_large += len(family.shards) - place
                        break
            if way + 1 < ways:
                heapq.heappush(waiting, self._next(group, way + 1))

    def _next(self, group: list[Family], way: int) -> tuple[float, int, list[Family], int]:
        layout = vary(group[0].template, checkpointing=group[0].checkpointings[way])
        most = max(family.template.stages_per_rank for family in group) if len(group) > 1 else 0
        bound_s = step_bound_s(vary(self._job, layout=layout), self._cluster, any_stages=most)
        return bound_s, next(self._order), group, way

    def _consider(self, layout: Layout) -> bool:
        """Rank a layout and return whether it fits."""
        degrees = (layout.dp, layout.tp, layout.cp, layout.pp, layout.ep, layout.stages_per_rank)
        others = (layout.schedule, layout.sharding, layout.checkpointing, layout.reshard_after_forward)
        failed = self._without_room.setdefault((*degrees, *others, *layout.less_layers), [])
        if any(layout.micro_batch >= micro_batch and layout.dp_shard <= shards for micro_batch, shards in failed):
            return False
        job = vary(self._job, layout=layout)
        memory = peak_memory(job, self._cluster)
        if memory.needed_gib < self.smallest_gib:
            self.smallest, self.smallest_gib = layout, memory.needed_gib
        if memory.needed_gib > self._room_gib:
            failed.append((layout.micro_batch, layout.dp_shard))
            return False
        if (step_s := step_seconds(job, self._cluster)) >= self._slowest_s:
            self.slower += 1
            return True
        self.estimated += 1
        push = heapq.heappush if len(self.best) < self._keep else heapq.heapreplace
        push(self.best, (-step_s, -next(self._order), layout))
        return True

    @property
    def _slowest_s(self) -> float:
        return -self.best[0][0] if len(self.best) == self._keep else math.inf

    def candidate(self, layout: Layout) -> Candidate:
        return Candidate(layout, estimate_job(replace(self._job, layout=layout), self._cluster))
