"""GiB of each pipeline rank at its peak, as the framework reports it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workloads.estimator.cluster import Cluster
from workloads.estimator.estimate import StageMemory
from workloads.estimator.pipeline import RankLayers, head_rank, in_flight, peak_ranks, rank_layers
from workloads.estimator.placed_job import PlacedJob, Weights, block_gpu_weights, divided_weights, rank_weights
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
    if is_own(placed):
        return _own_memories(placed, [(rank, layers[rank]) for rank in ranks])
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


GIB = 2**30
RUNTIME_GIB = 1.5  # CUDA's context, NCCL's buffers, workspaces of the libraries
OPTIMIZER_STATES = 2  # of AdamW, in the data type of the weights
LOSS_CHUNK_TOKENS = 2048  # the loss takes so many tokens at a time, so that the full logits never exist


def is_own(placed: PlacedJob) -> bool:
    """Return whether the trainer is this project's own, and the job one that it runs."""
    job, layout = placed.job, placed.layout
    return (
        placed.trainer.name == "own"
        and job.model.activation == "swiglu"
        and not job.model.experts
        and job.state in ("fp32", "bf16")
        and (layout.sharding == "fsdp2" or (layout.sharding == "none" and layout.dp_shard * layout.cp == 1))
        and layout.checkpointing in ("none", "selective", "full")
        and not layout.offload_optimizer
    )


def _own_memories(
    placed: PlacedJob, ranks_layers: Iterable[tuple[int, tuple[RankLayers, ...]]]
) -> tuple[StageMemory, ...]:
    """Return the memory of pipeline ranks with these layers at its peak."""
    ranks = [_RankSizes.of(placed, rank, layers) for rank, layers in ranks_layers]
    return tuple(max(_at_start(placed, rank), _at_end(placed, rank), key=lambda m: m.total_gib) for rank in ranks)


@dataclass(frozen=True)
class _RankSizes:
    """Parameters of a pipeline rank, divided by the tensor parallel degree but not sharded.

    Attributes:
        layer: of one layer.
        embedding, head: 0 where the rank does not have them. A tied model's head is its embedding.
    """

    rank: int
    layers: int
    layer: float
    embedding: float
    head: float
    is_tied: bool

    @classmethod
    def of(cls, placed: PlacedJob, rank: int, layers: tuple[RankLayers, ...]) -> _RankSizes:
        """Return the sizes of a rank with these layers."""
        matrix = placed.model.head_weights / placed.layout.tp
        return cls(
            rank,
            sum(some.count for some in layers),
            block_gpu_weights(placed, 0).total,
            matrix if rank == 0 else 0.0,
            matrix if rank == head_rank(placed.layout) else 0.0,
            placed.model.tied,
        )

    @property
    def total(self) -> float:
        return self.layers * self.layer + self.embedding + (0.0 if self.is_tied else self.head)


def _at_start(placed: PlacedJob, rank: _RankSizes) -> StageMemory:
    """Return the memory at the start of the last backward pass, when all activations are saved."""
    element_bytes, state_bytes = placed.element_bytes, _state_bytes(placed)
    saved_elements = _activation_elements(placed, placed.layout.checkpointing)
    checkpointed_layers = int(rank.layers * placed.checkpointed_share)  # the fewest that a rank may have
    saved_by_all = checkpointed_layers * saved_elements
    saved_by_all += (rank.layers - checkpointed_layers) * _activation_elements(placed, "none")
    loss_bytes = _logits_bytes(placed) + rank.head * element_bytes if rank.head else 0.0
    held_layers = 3 if _gathers_per_microbatch(placed) else 1  # two layers' weights, one layer's gradients
    # The buffer in which FSDP reduces gradients, those of the head while the last layer's are computed.
    reduced = max(rank.head, rank.layer if state_bytes > element_bytes else 0.0)
    backward_bytes = placed.tokens * _backward_elements(placed, saved_elements) * element_bytes
    backward_bytes += held_layers * rank.layer * element_bytes + reduced * state_bytes
    microbatches = in_flight(rank.rank, placed.layout)
    gradients = _gradient_elements(placed, rank) if placed.layout.microbatches > 1 else 0.0
    return StageMemory(
        **_states_gib(placed, rank),
        gradients=gradients * state_bytes / GIB,
        gathered=_gathered_elements(placed, rank) * element_bytes / GIB,
        activations=microbatches * placed.tokens * saved_by_all * element_bytes / GIB,
        working=max(loss_bytes, backward_bytes) / GIB,
        runtime=RUNTIME_GIB,
    )


def _at_end(placed: PlacedJob, rank: _RankSizes) -> StageMemory:
    """Return the memory at the end of the last backward pass, when all gradients exist.

    FSDP has gathered the embedding again, and reduces its gradient.
    """
    working = rank.embedding * placed.element_bytes
    if placed.layout.uses_fsdp(placed.job.state):
        working += rank.embedding * _state_bytes(placed)
    gathered = _gathered_elements(placed, rank)
    if _gathers_per_microbatch(placed) and not rank.is_tied:
        gathered += rank.embedding
    return StageMemory(
        **_states_gib(placed, rank),
        gradients=_gradient_elements(placed, rank) * _state_bytes(placed) / GIB,
        gathered=gathered * placed.element_bytes / GIB,
        activations=0.0,
        working=working / GIB,
        runtime=RUNTIME_GIB,
    )


def _state_bytes(placed: PlacedJob) -> int:
    """Return the bytes of a weight, of its gradient, and of each of its optimizer states between steps."""
    return 4 if placed.job.state == "fp32" else placed.element_bytes


def _states_gib(placed: PlacedJob, rank: _RankSizes) -> dict[str, float]:
    """Return the GiB of weights and optimizer states between steps."""
    parameters_gib = rank.total / placed.shard_group.ranks * _state_bytes(placed) / GIB
    return {"parameters": parameters_gib, "optimizer_states": OPTIMIZER_STATES * parameters_gib}


def _gathers_per_microbatch(placed: PlacedJob) -> bool:
    """Return whether FSDP gathers each unit for each pass of a micro-batch.

    A pipeline keeps weights and gradients unsharded between micro-batches, as is done without resharding.
    """
    return placed.layout.uses_fsdp(placed.job.state) and placed.layout.reshard_after_forward and placed.layout.pp == 1


def _gathered_elements(placed: PlacedJob, rank: _RankSizes) -> float:
    """Return the weights that FSDP keeps gathered beside the layers in use: the head's at least."""
    if not placed.layout.uses_fsdp(placed.job.state):
        return 0.0
    return rank.head if _gathers_per_microbatch(placed) else rank.total


def _gradient_elements(placed: PlacedJob, rank: _RankSizes) -> float:
    """Return the gradients that are kept from one micro-batch to the next, or from the last one to the optimizer."""
    stays_whole = placed.layout.uses_fsdp(placed.job.state) and not _gathers_per_microbatch(placed)
    if stays_whole and placed.layout.microbatches > 1:
        return rank.total
    return rank.total / placed.shard_group.ranks


def _logits_bytes(placed: PlacedJob) -> float:
    """Return the bytes of the loss's chunk: logits and their gradient.

    With tensor parallel it has several more fp32 copies, since nothing is compiled.
    """
    tp = placed.layout.tp
    logit_bytes = 16 if tp > 1 else 2 * placed.element_bytes
    return min(LOSS_CHUNK_TOKENS, placed.tokens) * placed.model.vocabulary / tp * logit_bytes


def _activation_elements(placed: PlacedJob, checkpointing: str) -> float:
    """Return the elements per token and layer that are saved for the backward pass.

    A block with a manual backward pass saves what `ManualBackwardBlock.SAVED_ACTIVATIONS` names. Other blocks save a
    sequence-parallel part of the residual stream, a tensor-parallel part of what is inside attention and MLP, and the
    whole of what is gathered before a product or reduced after it, which PyTorch saves as it is.
    """
    model, layout = placed.model, placed.layout
    if checkpointing == "full":
        return model.hidden_size / layout.tp
    attention, keys_values = model.heads * model.head_size, 2 * model.kv_heads * model.head_size
    qkv, selective = attention + keys_values, checkpointing == "selective"
    if placed.job.manual_backward:
        return 2 * model.hidden_size + qkv + attention + (0 if selective else 2 * model.intermediate_size)
    if placed.job.precision.startswith("fp8") and not selective:  # measured: the inputs of products stay in fp8
        return 3 * model.hidden_size + qkv + attention + 2 * model.intermediate_size
    inside = qkv + attention if selective else 2 * qkv + attention + 3 * model.intermediate_size
    gathered = model.hidden_size
    if layout.cp > 1:  # a ring saves this rank's keys and values alone
        gathered = keys_values * (1 if layout.cp_method == "ring" else layout.cp)
    return (2 * model.hidden_size + inside + gathered) / layout.tp + 2 * model.hidden_size


def _backward_elements(placed: PlacedJob, saved_elements: float) -> float:
    """Return the elements per token of a layer's backward pass besides the saved ones: gradients and recomputation."""
    model = placed.model
    recomputed = _activation_elements(placed, "none") - saved_elements
    return recomputed + (3 * model.intermediate_size + 2 * model.hidden_size) / placed.layout.tp
