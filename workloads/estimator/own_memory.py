"""GiB of each pipeline rank of this project's own trainer, counted tensor by tensor.

With fp32 states a parameter takes 16 bytes for the weight, its gradient and AdamW's two states, sharded, and 2 more for
gathered weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workloads.estimator.estimate import StageMemory
from workloads.estimator.pipeline import RankLayers, head_rank, in_flight
from workloads.estimator.placed_job import PlacedJob
from workloads.estimator.weights import block_gpu_weights

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


def stage_memories(
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
