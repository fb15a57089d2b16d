"""The memory of layouts: estimates, never reported as measurements. No torch.

The data types of `Setting` are counted: with fp32 state 16 bytes a parameter for the weight, its gradient and AdamW's
two states, sharded, and 2 more for gathered weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workloads.parallel.layout import LOSS_CHUNK_TOKENS, Layout, Setting, rank_stages, uses_fsdp
from workloads.planner.pipeline import stage_layers

GIB = 2**30
RUNTIME_GIB = 1.5  # CUDA's context, NCCL's buffers, workspaces of the libraries
OPTIMIZER_STATES = 2  # of AdamW, in the data type of the weights


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB of one device at the peak of a step, by use.

    Attributes:
        gathered: weights that FSDP holds unsharded.
        activations: those that are saved for the backward pass.
        working: temporary tensors of the loss or of a layer's backward pass, whichever are larger.
    """

    parameters: float
    gradients: float
    optimizer_states: float
    gathered: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """The sum with what CUDA, NCCL and the libraries take."""
        parts = (self.parameters, self.gradients, self.optimizer_states, self.gathered, self.activations, self.working)
        return sum(parts) + RUNTIME_GIB


def estimate_memory(layout: Layout, setting: Setting) -> MemoryEstimate:
    """Estimate the memory of the pipeline rank that needs the most."""
    sizes = [_rank_sizes(layout, setting, pp_rank) for pp_rank in range(layout.pp)]
    estimates = [estimate(layout, setting, rank) for rank in sizes for estimate in (_estimate_start, _estimate_end)]
    return max(estimates, key=lambda estimate: estimate.total)


@dataclass(frozen=True)
class _RankSizes:
    """Parameters of a pipeline rank, divided by the tensor parallel degree but not sharded.

    Attributes:
        layer: of one layer.
        embedding, head: 0 where the rank does not have them. A tied model's head is its embedding.
    """

    pp_rank: int
    layers: int
    layer: float
    embedding: float
    head: float
    is_tied: bool

    @property
    def total(self) -> float:
        return self.layers * self.layer + self.embedding + (0.0 if self.is_tied else self.head)


def _rank_sizes(layout: Layout, setting: Setting, pp_rank: int) -> _RankSizes:
    shape = setting.shape
    layers_of_stages = stage_layers(shape.layers, layout.total_stages)
    stages = [layers_of_stages[index] for index in rank_stages(layout, pp_rank)]
    matrix = shape.vocabulary * shape.hidden_size / layout.tp
    return _RankSizes(
        pp_rank,
        sum(map(len, stages)),
        shape.layer_parameters / layout.tp,
        matrix if any(stage.start == 0 for stage in stages) else 0.0,
        matrix if any(stage.stop == shape.layers for stage in stages) else 0.0,
        shape.tied,
    )


def _estimate_start(layout: Layout, setting: Setting, rank: _RankSizes) -> MemoryEstimate:
    """Estimate the memory at the start of the last backward pass, when all activations are saved."""
    element_bytes = setting.element_bytes
    tokens = layout.micro_batch * setting.sequence_length / layout.cp
    saved_elements = activation_elements(layout, setting)
    loss_bytes = _logits_bytes(layout, setting, tokens) + rank.head * element_bytes if rank.head else 0.0
    held_layers = 3 if _gathers_per_microbatch(layout, setting) else 1  # two layers' weights, one layer's gradients
    # The buffer in which FSDP reduces gradients, those of the head while the last layer's are computed.
    reduced = max(rank.head, rank.layer if setting.state_bytes > element_bytes else 0.0)
    backward_bytes = tokens * _backward_elements(layout, setting, saved_elements) * element_bytes
    backward_bytes += held_layers * rank.layer * element_bytes + reduced * setting.state_bytes
    in_flight = _microbatches_in_flight(layout, rank.pp_rank)
    gradients = _gradient_elements(layout, setting, rank) if layout.microbatches > 1 else 0.0
    return MemoryEstimate(
        **_state_gib(layout, setting, rank),
        gradients=gradients * setting.state_bytes / GIB,
        gathered=_gathered_elements(layout, setting, rank) * element_bytes / GIB,
        activations=in_flight * rank.layers * tokens * saved_elements * element_bytes / GIB,
        working=max(loss_bytes, backward_bytes) / GIB,
    )


def _estimate_end(layout: Layout, setting: Setting, rank: _RankSizes) -> MemoryEstimate:
    """Estimate the memory at the end of the last backward pass, when all gradients exist.

    FSDP has gathered the embedding again, and reduces its gradient.
    """
    working = rank.embedding * setting.element_bytes
    if uses_fsdp(layout, setting.state):
        working += rank.embedding * setting.state_bytes
    gathered = _gathered_elements(layout, setting, rank)
    if _gathers_per_microbatch(layout, setting) and not rank.is_tied:
        gathered += rank.embedding
    return MemoryEstimate(
        **_state_gib(layout, setting, rank),
        gradients=_gradient_elements(layout, setting, rank) * setting.state_bytes / GIB,
        gathered=gathered * setting.element_bytes / GIB,
        activations=0.0,
        working=working / GIB,
    )


def _state_gib(layout: Layout, setting: Setting, rank: _RankSizes) -> dict[str, float]:
    """Return the GiB of weights and optimizer states between steps."""
    parameters_gib = rank.total / (layout.dp_shard * layout.cp) * setting.state_bytes / GIB
    return {"parameters": parameters_gib, "optimizer_states": OPTIMIZER_STATES * parameters_gib}


def _gathers_per_microbatch(layout: Layout, setting: Setting) -> bool:
    """Return whether FSDP gathers each unit for each pass of a micro-batch.

    A pipeline keeps weights and gradients unsharded between micro-batches, as is done without resharding.
    """
    return uses_fsdp(layout, setting.state) and layout.reshard_after_forward and layout.pp == 1


def _gathered_elements(layout: Layout, setting: Setting, rank: _RankSizes) -> float:
    """Return the weights that FSDP keeps gathered beside the layers in use: the head's at least."""
    if not uses_fsdp(layout, setting.state):
        return 0.0
    return rank.head if _gathers_per_microbatch(layout, setting) else rank.total


def _gradient_elements(layout: Layout, setting: Setting, rank: _RankSizes) -> float:
    """Return the gradients that are kept from one micro-batch to the next, or from the last one to the optimizer."""
    stays_whole = uses_fsdp(layout, setting.state) and not _gathers_per_microbatch(layout, setting)
    if stays_whole and layout.microbatches > 1:
        return rank.total
    return rank.total / (layout.dp_shard * layout.cp)


def _microbatches_in_flight(layout: Layout, pp_rank: int) -> float:
    """Return how many micro-batches' activations a pipeline rank holds at its peak."""
    if layout.pp == 1:
        return 1
    if layout.schedule == "interleaved":
        started_stages = (layout.stages_per_rank - 1) * layout.pp + 2 * (layout.pp - 1 - pp_rank) + 1
        return min(layout.microbatches, started_stages / layout.stages_per_rank)
    if layout.schedule in ("zero_bubble", "zbv"):
        return min(layout.microbatches, layout.pp)
    if layout.schedule == "dualpipev":  # counted in PyTorch's order: each rank holds a forward pass of one stage more
        return layout.pp + 0.5
    # The first rank of a 1F1B pipeline has as many micro-batches in flight as there are ranks.
    return min(layout.microbatches, layout.pp - pp_rank)


def _logits_bytes(layout: Layout, setting: Setting, tokens: float) -> float:
    """Return the bytes of the loss's chunk: logits and their gradient.

    With tensor parallel it has several more fp32 copies, since nothing is compiled.
    """
    logit_bytes = 16 if layout.tp > 1 else 2 * setting.element_bytes
    return min(LOSS_CHUNK_TOKENS, tokens) * setting.shape.vocabulary / layout.tp * logit_bytes


def activation_elements(layout: Layout, setting: Setting) -> float:
    """Return the elements per token and layer that are saved for the backward pass.

    A block with a manual backward pass saves what `ManualBackwardBlock.SAVED_ACTIVATIONS` names. Other blocks save a
    sequence-parallel part of the residual stream, a tensor-parallel part of what is inside attention and MLP, and the
    whole of what is gathered before a product or reduced after it, which PyTorch saves as it is.
    """
    shape = setting.shape
    if layout.checkpointing == "full":
        return shape.hidden_size / layout.tp
    attention, keys_values = shape.heads * shape.head_size, 2 * shape.kv_heads * shape.head_size
    qkv, selective = attention + keys_values, layout.checkpointing == "selective"
    if setting.block == "manual":
        return 2 * shape.hidden_size + qkv + attention + (0 if selective else 2 * shape.intermediate_size)
    if setting.dtype.startswith("fp8") and layout.checkpointing == "none":  # measured: the inputs of GEMMs stay in fp8
        return 3 * shape.hidden_size + qkv + attention + 2 * shape.intermediate_size
    inside = qkv + attention if selective else 2 * qkv + attention + 3 * shape.intermediate_size
    gathered = shape.hidden_size
    if layout.cp > 1:  # a ring saves this rank's keys and values alone
        gathered = keys_values * (1 if layout.cp_method == "ring" else layout.cp)
    return (2 * shape.hidden_size + inside + gathered) / layout.tp + 2 * shape.hidden_size


def _backward_elements(layout: Layout, setting: Setting, saved_elements: float) -> float:
    """Return the elements per token of a layer's backward pass besides the saved ones: gradients and recomputation."""
    shape = setting.shape
    recomputed = activation_elements(replace(layout, checkpointing="none"), setting) - saved_elements
    return recomputed + (3 * shape.intermediate_size + 2 * shape.hidden_size) / layout.tp
