"""Find a job's fastest layouts on a cluster. Bounds exclude only layouts that cannot be among the fastest."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

from workloads.estimator.estimate import JobEstimate, StageMemory, find_band
from workloads.estimator.memory import peak_memory
from workloads.estimator.step import estimate_job, step_bound_s, step_seconds
from workloads.hardware.cluster import Cluster
from workloads.layouts.enumeration import Family, list_families
from workloads.layouts.layout import Job, Layout, vary

Options = Mapping[str, Sequence[Any]]  # the values that a search tries, by layout field


def bound_gib(memory: StageMemory, job: Job, cluster: Cluster) -> float:
    """Return a layout's memory in GiB, plus its error band. A layout fits if this much memory is usable."""
    return memory.needed_gib * (1 + find_band(job, cluster, "memory").ends.above)


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


def estimate_layout(layout: Layout, job: Job, cluster: Cluster) -> Candidate:
    return Candidate(layout, estimate_job(replace(job, layout=layout), cluster))


@dataclass(frozen=True)
class SearchResult:
    best: tuple[Candidate, ...]  # the fastest layouts that fit by their bound, or by their estimate if no bound fits
    smallest: Candidate | None  # the layout that needs the least memory; None if no layout is valid
    estimated: int  # number of layouts that fit and were among the best when they were estimated
    # number of layouts that do not fit; larger micro-batches or fewer shards do not fit either
    too_large: int
    slower: int  # number of layouts that are too slow to be among the best, by step time or by its bound
    search: Search  # to search again, with other memory


def find_layouts(
    job: Job, cluster: Cluster, options: Options, fixed: Mapping[str, Any], keep: int = 20, again: Search | None = None
) -> SearchResult:
    """Return the `keep` fastest layouts that fit. See `list_families` for `options` and `fixed`. `again` is the search
    of an earlier result, for a device that differs only in memory; it keeps the costs of layouts."""
    search = again or Search(job, cluster, options, fixed)
    for share in (1 + find_band(job, cluster, "memory").ends.above, 1.0):
        search.run(keep, cluster.usable_gib / share)
        if search.best or search.smallest is None or search.smallest_gib > cluster.usable_gib:
            break
    best = tuple(estimate_layout(layout, job, cluster) for _, _, layout in sorted(search.best, reverse=True))
    smallest = None if search.smallest is None else estimate_layout(search.smallest, job, cluster)
    return SearchResult(best, smallest, search.estimated, search.too_large, search.slower, search)


def _all_but_stages(family: Family) -> tuple[object, ...]:
    layout = family.template
    names = ("dp_shard", "dp", "tp", "cp", "pp", "ep", "sharding", "micro_batch")
    is_bounded = layout.schedule in ("1f1b", "interleaved")  # `step_bound_s` has no bound for the stages of others
    return (*(getattr(layout, name) for name in names), family.checkpointings, None if is_bounded else layout)


class Search:
    """A job's families, the costs of their layouts, and a run's heap of the best layouts so far, slowest first."""

    def __init__(self, job: Job, cluster: Cluster, options: Options, fixed: Mapping[str, Any]) -> None:
        groups = defaultdict[tuple[object, ...], list[Family]](list)
        for family in list_families(job, cluster, options, fixed):
            groups[_all_but_stages(family)].append(family)
        self._groups = list(groups.values())
        self._memory = cache(lambda layout: peak_memory(vary(job, layout=layout), cluster))
        self._step_s = cache(lambda layout: step_seconds(vary(job, layout=layout), cluster))
        self._bound_s = cache(lambda layout, most: step_bound_s(vary(job, layout=layout), cluster, any_stages=most))

    def run(self, keep: int, room_gib: float) -> None:
        """Consider layouts in order of their lower bound on step time, because the first ones rule out most others. A
        family is considered once for each value of `checkpointing`, because slower values have higher bounds. Families
        that differ only in the stages of a pipeline have a bound in common first."""
        self.best: list[tuple[float, int, Layout]] = []
        self.smallest: Layout | None = None
        self.estimated = self.too_large = self.slower = 0
        self.smallest_gib = math.inf
        self._keep, self._room_gib = keep, room_gib
        # Micro-batch sizes and shard counts that do not fit, keyed by the layout's other properties.
        self._without_room = dict[tuple[object, ...], list[tuple[int, int]]]()
        self._order = count()
        waiting = [self._next(group, 0) for group in self._groups]
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
        return self._bound_s(layout, most), next(self._order), group, way

    def _consider(self, layout: Layout) -> bool:
        """Rank a layout and return whether it fits."""
        degrees = (layout.dp, layout.tp, layout.cp, layout.pp, layout.ep, layout.stages_per_rank)
        others = (layout.schedule, layout.sharding, layout.checkpointing, layout.reshard_after_forward)
        failed = self._without_room.setdefault((*degrees, *others, *layout.less_layers), [])
        if any(layout.micro_batch >= micro_batch and layout.dp_shard <= shards for micro_batch, shards in failed):
            return False
        memory = self._memory(layout)
        if memory.needed_gib < self.smallest_gib:
            self.smallest, self.smallest_gib = layout, memory.needed_gib
        if memory.needed_gib > self._room_gib:
            failed.append((layout.micro_batch, layout.dp_shard))
            return False
        if (step_s := self._step_s(layout)) >= self._slowest_s:
            self.slower += 1
            return True
        self.estimated += 1
        push = heapq.heappush if len(self.best) < self._keep else heapq.heapreplace
        push(self.best, (-step_s, -next(self._order), layout))
        return True

    @property
    def _slowest_s(self) -> float:
        return -self.best[0][0] if len(self.best) == self._keep else math.inf
