"""Stages of a pipeline: the layers of each rank, and what ranks wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from workloads.layouts.layout import V_SCHEDULES, Layout
from workloads.models.model import Model


@dataclass(frozen=True)
class RankLayers:
    """So many layers of a pipeline rank that are equal to `layer`."""

    layer: int
    count: int


def rank_layers(model: Model, layout: Layout) -> tuple[tuple[RankLayers, ...], ...]:
    """Return the layers of each pipeline rank: its chunks of consecutive layers, as divided by `layers_per_stage`.

    Where they are evenly divided, the first and the last chunk are the first to get fewer, since they also have the
    embedding and the head.
    """
    sizes = layout.layers_per_stage
    return _rank_layers(model, layout.pp, layout.stages_per_rank, layout.schedule in V_SCHEDULES, sizes)


def peak_ranks(model: Model, layout: Layout) -> Sequence[int]:
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
    samples = model.layer_kinds
    counts = (Counter(model.layer_kind(layer) for layer in layers) for layers in ranks)
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


def head_rank(layout: Layout) -> int:
    """Return the rank with the output layer: the first one of V schedules, else the last one."""
    return 0 if layout.schedule in V_SCHEDULES and layout.stages_per_rank > 1 else layout.pp - 1


def bubble_s(rank_s: list[float], layout: Layout, repeated_share: float = 0.0) -> float:
    """Return the seconds that the slowest rank waits while the pipeline fills and drains.

    For each other rank one forward and one backward pass of a stage (arXiv 2104.04473, section 2.2). Where backward
    passes are divided, F + I - W: the ranks that wait compute the gradients of weights (ZB-H1, arXiv 2401.10241). With
    passes of equal length that holds for ZBV and DualPipeV too (`timeline`), since the optimizer waits for the last
    rank. Published is no bubble for ZBV, whose ranks then start their optimizers one by one, without clipping the norm
    of all gradients; and for DualPipe the same as here, if its forward passes are hidden beside backward ones.

    Args:
        rank_s: the seconds of each rank for one micro-batch, forward and backward.
        repeated_share: of the forward pass, what the backward pass for inputs computes again.
    """
    others_s = (sum(rank_s) - max(rank_s)) / layout.stages_per_rank
    if layout.schedule in ("1f1b", "interleaved"):
        return others_s
    return others_s * (1 + repeated_share) / (3 + repeated_share)


def in_flight(rank: int, layout: Layout) -> float:
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
