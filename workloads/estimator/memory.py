"""GiB of each pipeline rank at its peak, as the framework reports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workloads.estimator import own_memory
from workloads.estimator.cluster import Cluster
from workloads.estimator.estimate import StageMemory
from workloads.estimator.own_memory import GIB, LOSS_CHUNK_TOKENS, RUNTIME_GIB
from workloads.estimator.pipeline import RankLayers, head_rank, in_flight, peak_ranks, rank_layers
from workloads.estimator.placed_job import PlacedJob
from workloads.estimator.weights import Weights, block_gpu_weights, divided_weights, rank_weights
from workloads.layouts.layout import Job

STATE_BYTES = {"fp32": (4, 8), "amp": (4, 8), "bf16": (2, 4), "int8": (2, 2)}  # of a weight and of its moments


@dataclass(frozen=True)
class _Activations:
    """Bytes for one micro-batch: what a block of each kind saves, and temporary tensors of a block and of the loss."""

    saved: dict[int, float]
    block: float
    loss: float


def peak_memory_gib(job: Job, cluster: Cluster) -> float:
    """Return the GiB of the pipeline rank that needs the most, the same as the largest of `stage_memories`."""
    ranks = peak_ranks(job.model, job.layout)
    return max(stage.total_gib for stage in stage_memories(PlacedJob(job, cluster), ranks))


def stage_memories(placed: PlacedJob, ranks: Sequence[int] | None = None) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline rank, or of some ranks."""
    layers = rank_layers(placed.model, placed.layout)
    ranks = range(len(layers)) if ranks is None else ranks
    if own_memory.is_own(placed):
        return own_memory.stage_memories(placed, [(rank, layers[rank]) for rank in ranks])
    kinds = placed.model.layer_kinds.values()
    activations = _Activations(
        saved={layer: saved_bytes(placed, layer) for layer in kinds},
        block=max(_recomputation_bytes(placed, layer) for layer in kinds),
        loss=_loss_bytes(placed),
    )
    return tuple(_stage_memory(placed, rank, layers[rank], activations) for rank in ranks)


def _stage_memory(
    placed: PlacedJob, rank: int, layers: tuple[RankLayers, ...], activations: _Activations
) -> StageMemory:
    weights = rank_weights(placed, rank, layers)
    parameters, gradients, moments = _states(placed, weights)
    saved = sum(activations.saved[some.layer] * some.count for some in layers) * in_flight(rank, placed.layout)
    working = max(activations.block, activations.loss if rank == head_rank(placed.layout) else 0.0)
    gathered = _gathered_bytes(placed, weights, layers[-1].layer) + placed.trainer.buffers_gib * GIB
    allocated = parameters + gathered + gradients + moments + saved + working
    return StageMemory(
        parameters=parameters / GIB,
        gathered=gathered / GIB,
        gradients=gradients / GIB,
        optimizer_states=moments / GIB,
        activations=saved / GIB,
        working=working / GIB,
        runtime=RUNTIME_GIB,
        reserved=placed.trainer.reserved_share * allocated / GIB,
    )


def _is_gathered(placed: PlacedJob) -> bool:
    """Return whether weights are gathered, or cast, for their use: not where a GPU has them whole in bf16."""
    return placed.is_sharded and (placed.shard_group.ranks > 1 or placed.job.state != "bf16")


def _states(placed: PlacedJob, weights: Weights) -> tuple[float, float, float]:
    """Return the bytes of weights with their masters, of gradients, and of the moments."""
    layout, job = placed.layout, placed.job
    weight_bytes, moment_bytes = STATE_BYTES[job.state]
    if layout.offload_optimizer:
        weight_bytes, moment_bytes = 2, 0
    gradient_bytes = 4 if placed.trainer.main_gradients or weight_bytes == 4 else 2
    owned, whole = divided_weights(placed, weights), weights.total
    if _is_gathered(placed):
        gradients = owned * (0 if layout.offload_optimizer or _has_whole_gradients(placed) else gradient_bytes)
        return owned * weight_bytes, gradients, owned * moment_bytes
    owned = whole if layout.sharding == "none" else owned
    copies = whole * 2 if weight_bytes == 4 else 0  # in the data type of the products, beside sharded masters
    gradients = (owned if layout.sharding == "zero2" else whole) * gradient_bytes
    return copies + owned * weight_bytes, gradients, owned * moment_bytes


def _has_whole_gradients(placed: PlacedJob) -> bool:
    """Return whether gradients stay whole until the last micro-batch, as FSDP2 has them in a pipeline alone."""
    return not placed.layout.reshard_after_forward and placed.layout.pp > 1


def _gathered_bytes(placed: PlacedJob, weights: Weights, layer: int) -> float:
    """Return the bytes of weights that FSDP holds whole: two blocks, and the gradients of one in their reduction.

    Weights that stay gathered are whole, and in a pipeline so are their gradients.
    """
    if not _is_gathered(placed):
        return 0.0
    if _has_whole_gradients(placed):
        return weights.total * (2 + placed.gradient_bytes)
    gathered = block_gpu_weights(placed, layer)
    block = gathered.shared + (gathered.experts if placed.expert_shard_group.ranks > 1 else 0.0)
    if not placed.layout.reshard_after_forward:
        return weights.total * 2 + placed.gradient_bytes * block
    ends = placed.model.head_weights / placed.layout.tp
    return max(2 * 2 * block + placed.gradient_bytes * block, 2 * ends + 2 * block) + 2 * ends


def saved_bytes(placed: PlacedJob, layer: int) -> float:
    """Return the bytes of activations that a block keeps for its backward pass of one micro-batch."""
    model, layout = placed.model, placed.layout
    share = placed.checkpointed_share
    kept = saved_elements(placed, layer, layout.checkpointing)
    if layout.checkpointing == "per_op" and not placed.job.compiled:
        kept += model.hidden_size / placed.residual_parts  # the last product, which nothing reads: a compiler drops it
    everything = saved_elements(placed, layer, "none") if share < 1 else kept
    values = placed.tokens * (share * kept + (1 - share) * everything) * 2
    is_unfused = placed.attention_kernel == "unfused" and layout.checkpointing in ("none", "norm_act")
    scores = placed.tokens * placed.job.sequence_length * model.heads / layout.tp * 5 if is_unfused else 0.0
    return values + scores


def saved_elements(placed: PlacedJob, layer: int, checkpointing: str) -> float:
    """Return the values of 2 bytes that a block keeps for a token."""
    model, tp = placed.model, placed.layout.tp
    residual = model.hidden_size / placed.residual_parts
    if checkpointing == "full":
        return residual
    queries, keys = model.heads * model.head_size / tp, model.kv_heads * model.head_size / tp
    copies = model.experts_per_token if model.has_experts(layer) else 0
    width = (copies * model.expert_intermediate_size + model.shared_expert_intermediate_size) / tp
    if not copies:
        width = model.intermediate_size / tp
    gated = model.mlp_matrices == 3
    routed = 2 * copies * model.hidden_size / tp
    if checkpointing == "per_op":  # the block's input, attention, and every second product
        return residual + 2 * queries + keys + width + routed
    inside = (3 if gated else 2) * width  # the products of the activation, and its result
    if checkpointing in ("norm_act", "selective"):
        return 2 * residual + 2 * queries + 2 * keys + (inside - width) + routed
    # PyTorch saves what is gathered for a tensor parallel product; Megatron gathers it again (arXiv 2205.05198).
    gathered = 2 * model.hidden_size if tp > 1 and placed.trainer.core == "pytorch" else 0.0
    return 4 * residual + 2 * queries + 2 * keys + inside + routed + gathered


def _recomputation_bytes(placed: PlacedJob, layer: int) -> float:
    """Return the bytes of a block's activations while they are computed again, with their gradients."""
    if placed.layout.checkpointing == "none":
        return 0.0
    return 2 * placed.tokens * saved_elements(placed, layer, "none") * 1.25


def _loss_bytes(placed: PlacedJob) -> float:
    """Return the bytes of logits, their gradients and the copies that the loss makes of them."""
    tp = placed.layout.tp
    tokens = min(placed.tokens, LOSS_CHUNK_TOKENS) if placed.trainer.chunked_loss else placed.tokens
    logits = tokens * placed.model.vocabulary / tp * placed.trainer.logit_bytes
    if tp > 1 and placed.layout.sequence_parallel:  # the head's input and its gradient, of the whole sequence
        logits += tokens * placed.model.hidden_size * 2 * 2
    return logits
