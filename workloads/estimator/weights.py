"""The weights of one GPU: shared by its data parallel ranks, and of the experts that it has."""

from __future__ import annotations

from dataclasses import dataclass

from workloads.estimator.pipeline import RankLayers, head_rank
from workloads.estimator.placed_job import PlacedJob


@dataclass(frozen=True)
class Weights:
    """The weights of one GPU, unsharded: `shared` by all its data parallel ranks, and of the experts that it has."""

    shared: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.shared + self.experts

    def __add__(self, rest: Weights) -> Weights:
        return Weights(self.shared + rest.shared, self.experts + rest.experts)

    def __mul__(self, count: float) -> Weights:
        return Weights(self.shared * count, self.experts * count)


def block_gpu_weights(placed: PlacedJob, layer: int) -> Weights:
    """Return a block's weights on one GPU."""
    model, layout = placed.model, placed.layout
    experts = model.expert_weights(layer) / layout.ep
    return Weights(model.shared_weights(layer) / layout.tp, experts)


def rank_weights(placed: PlacedJob, rank: int, layers: tuple[RankLayers, ...]) -> Weights:
    """Return the weights of a pipeline rank on one GPU, with the embedding and the head where it has them."""
    model, ends = placed.model, 0
    if rank == 0:
        ends += model.embedding_weights
    if rank == head_rank(placed.layout) and not (model.tied and rank == 0):
        ends += model.head_weights
    total = Weights(ends / placed.layout.tp)
    for some in layers:
        total += block_gpu_weights(placed, some.layer) * some.count
    return total


def divided_weights(placed: PlacedJob, weights: Weights) -> float:
    """Return the part of a GPU's weights, or of their states, that it keeps where data parallel ranks divide them."""
    return weights.shared / placed.shard_group.ranks + weights.experts / placed.expert_shard_group.ranks
