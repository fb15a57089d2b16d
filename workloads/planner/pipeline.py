"""Stages of a pipeline: the layers of each rank, and what ranks wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from workloads.planner.job import V_SCHEDULES, Model, Schedule, TrainingLayout
from workloads.planner.sizes import layer_kind, layer_kinds

# The bubble relative to that of 1F1B with as many stages a rank. Zero bubble delays the weights' gradients,
# a third of the work, into the bubble (arXiv 2401.10241); V schedules fill it but for a remainder.
BUBBLE_SHARE: dict[Schedule, float] = {
    "1f1b": 1.0,
    "interleaved": 1.0,
    "zero_bubble": 1 / 3,
    "zbv": 0.1,
    "dualpipev": 0.2,
}


@dataclass(frozen=True)
class RankLayers:
    """So many layers of a pipeline rank that are equal to `layer`."""

    layer: int
    count: int


def rank_layers(model: Model, layout: TrainingLayout) -> tuple[tuple[RankLayers, ...], ...]:
    """Return the layers of each pipeline rank: its chunks of consecutive layers, as divided by `layers_per_stage`.

    Where they are evenly divided, the first and the last chunk are the first to get fewer, since they also have the
    embedding and the head.
    """
    sizes = layout.layers_per_stage
    return _rank_layers(model, layout.pp, layout.stages_per_rank, layout.schedule in V_SCHEDULES, sizes)


def peak_ranks(model: Model, layout: TrainingLayout) -> Sequence[int]:
    """Return ranks of which one needs the most memory.

    They are those with the embedding or the head, and of others with the same layers the first one: no rank holds the
    activations of more micro-batches than a rank before it (`in_flight`).
    """
    return _peak_ranks(rank_layers(model, layout), head_rank(layout))


@cache
def _peak_ranks(ranks: tuple[tuple[RankLayers, ...], ...], head: int) -> Sequence[int]:
    firsts = {layers: rank for rank, layers in reversed(list(enumerate(ranks))) if rank not in (0, head)}
    return sorted({0, head, *firsts.values()})


@cache
def _rank_layers(
    model: Model, pp: int, stages: int, is_folded: bool, sizes: tuple[int, ...] | None
) -> tuple[tuple[RankLayers, ...], ...]:
    chunks = stage_layers(model.layers, pp * stages) if sizes is None else _consecutive(sizes)
    ranks = [[layer for chunk in chunks[rank::pp] for layer in chunk] for rank in range(pp)]
    if is_folded:
        ranks = [[*chunks[rank], *chunks[-1 - rank]] for rank in range(pp)]
    samples = layer_kinds(model)
    counts = (Counter(layer_kind(model, layer) for layer in layers) for layers in ranks)
    return tuple(tuple(RankLayers(samples[kind], number) for kind, number in rank.items()) for rank in counts)


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, as evenly divided as possible.

    The first and the last stage are the first to get fewer layers, since they also have the embedding and the head.
    """
    base, remainder = divmod(layers, stages)
    longer_stages = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))[:remainder]
    return _consecutive([base + (stage in longer_stages) for stage in range(stages)])


def _consecutive(sizes: Sequence[int]) -> list[range]:
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def head_rank(layout: TrainingLayout) -> int:
    """Return the rank with the output layer: the first one of V schedules, else the last one."""
    return 0 if layout.schedule in V_SCHEDULES and layout.stages_per_rank > 1 else layout.pp - 1


def bubble_s(rank_s: list[float], layout: TrainingLayout) -> float:
    """Return the seconds that the slowest rank waits while the pipeline fills and drains.

    Args:
        rank_s: the seconds of each rank for one micro-batch, forward and backward.
    """
    others = sum(rank_s) - max(rank_s)
    return others / layout.stages_per_rank * BUBBLE_SHARE[layout.schedule]


def in_flight(rank: int, layout: TrainingLayout) -> float:
    """Return how many micro-batches' activations a rank holds at once, as a share of all its layers' for one.

    1F1B holds one for each later rank; interleaving holds those of its warm-up, chunk by chunk. PyTorch's interleaved
    zero bubble warms up with one instead of two chunks for each later rank, so that all ranks hold at most `pp`.
    """
    pp, chunks = layout.pp, layout.stages_per_rank
    if layout.schedule in V_SCHEDULES:
        return min(layout.microbatches, pp + (0.5 if layout.schedule == "dualpipev" else 0.0))
    if layout.schedule == "zero_bubble":
        return min(layout.microbatches, pp)
    if chunks == 1:
        return min(layout.microbatches, pp - rank)
    warm_up = 2 * (pp - rank - 1) + (chunks - 1) * pp + 1
    return min(warm_up, layout.microbatches * chunks) / chunks
