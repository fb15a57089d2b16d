"""The cost model of layouts: estimates of memory and step time, never reported as measurements. No torch.

It excludes layouts that cannot fit and orders the others, the most promising first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from workloads.api.contract import Machine
from workloads.llama.flops import model_flops_per_token
from workloads.llama.shapes import LlamaShape
from workloads.parallel.layout import LOSS_CHUNK_TOKENS, Layout, Setting, stage_layers, uses_manual_backward

GIB = 2**30
RUNTIME_GIB = 1.5  # CUDA's context, NCCL's buffers, workspaces of the libraries
ASSUMED_TFLOPS = 0.05  # of a processor whose rate was not measured: only the order of layouts depends on it
OPTIMIZER_STATES = 2  # of AdamW, in the data type of the weights
NON_GEMM_FACTOR = 1.19  # attention and what is between the GEMMs: one H200's step against its GEMMs alone
FP8_SPEEDUP = 1.4  # torchao's layers against bf16's, casts included (benchmarks/results/precision_h200.md)
# Fitted to two and four H200s (benchmarks/results/parallel_h200.md): tensor parallel collectives run at 0.45 of the
# link's bandwidth; FSDP's collectives run beside computation, which hides at most half of their time. Passes through
# memory run at the vendor's bandwidth: FSDP_COPY_PASSES over weights that are gathered for both passes and gradients
# that are reduce-scattered after them, which FSDP copies before and after a collective, even one of a single rank; and
# GRADIENT_ADD_PASSES over gradients that a micro-batch adds to those of the micro-batches before.
LINK_EFFICIENCY = 0.45
OVERLAP_FRACTION = 0.5
FSDP_COPY_PASSES = 10
GRADIENT_ADD_PASSES = 2


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB of one device, by use.

    Attributes:
        gathered: weights that FSDP holds unsharded.
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


def estimate_memory(layout: Layout, setting: Setting, element_bytes: int) -> MemoryEstimate:
    """Estimate the memory of the pipeline rank that needs the most. Weights have `element_bytes` each."""
    estimates = [_estimate_rank_memory(layout, setting, element_bytes, pp_rank) for pp_rank in range(layout.pp)]
    return max(estimates, key=lambda estimate: estimate.total)


def _estimate_rank_memory(layout: Layout, setting: Setting, element_bytes: int, pp_rank: int) -> MemoryEstimate:
    shape = setting.shape
    stages = stage_layers(shape.layers, layout.total_stages)
    rank_stages = stages[pp_rank :: layout.pp]
    layer_parameters = shape.layer_parameters / layout.tp
    layers = sum(len(stage) for stage in rank_stages)
    ends_parameters = _ends_parameters(shape, rank_stages) / layout.tp
    sharded = (layers * layer_parameters + ends_parameters) / (layout.dp_shard * layout.cp)
    # A pipeline keeps weights and gradients unsharded between micro-batches, as is done without resharding.
    stays_gathered = not layout.reshard_after_forward or layout.pp > 1
    unsharded = 0.0
    if layout.uses_fsdp:
        unsharded = ends_parameters + (layers * layer_parameters if stays_gathered else 0)
    gradients = 0.0
    if layout.microbatches > 1:  # then gradients exist when activations are at their peak, which is at the loss
        gradients = unsharded if layout.uses_fsdp and stays_gathered else sharded
    tokens = layout.micro_batch * setting.sequence_length / layout.cp
    saved_elements = activation_elements(shape, layout, setting.dtype)
    saved_elements_of_all = _microbatches_in_flight(layout, pp_rank) * layers * tokens * saved_elements
    head_parameters = shape.vocabulary * shape.hidden_size / layout.tp if stages[-1] in rank_stages else 0.0
    loss_bytes = 0.0
    if head_parameters:
        loss_bytes = _logits_bytes(layout, setting, element_bytes, tokens) + head_parameters * element_bytes
    held_layers = 3 if layout.uses_fsdp and not stays_gathered else 1  # two layers' weights, one layer's gradients
    backward_elements = tokens * _backward_elements(shape, layout, saved_elements, setting.dtype)
    backward_bytes = (head_parameters + backward_elements) * element_bytes
    backward_bytes += held_layers * layer_parameters * element_bytes
    return MemoryEstimate(
        parameters=sharded * element_bytes / GIB,
        gradients=gradients * element_bytes / GIB,
        optimizer_states=sharded * OPTIMIZER_STATES * element_bytes / GIB,
        gathered=unsharded * element_bytes / GIB,
        activations=saved_elements_of_all * element_bytes / GIB,
        working=max(loss_bytes, backward_bytes) / GIB,
    )


def _microbatches_in_flight(layout: Layout, pp_rank: int) -> float:
    """Return how many micro-batches' activations a pipeline rank holds at its peak."""
    if layout.pp == 1:
        return 1
    if layout.schedule == "interleaved":
        started_stages = (layout.stages_per_rank - 1) * layout.pp + 2 * (layout.pp - 1 - pp_rank) + 1
        return min(layout.microbatches, started_stages / layout.stages_per_rank)
    if layout.schedule == "zero_bubble":
        return min(layout.microbatches, layout.pp)
    # The first rank of a 1F1B pipeline has as many micro-batches in flight as there are ranks.
    return min(layout.microbatches, layout.pp - pp_rank)


def _logits_bytes(layout: Layout, setting: Setting, element_bytes: int, tokens: float) -> float:
    """Return the bytes of the loss's chunk: logits and their gradient.

    With tensor parallel it has several more fp32 copies, since nothing is compiled.
    """
    logit_bytes = 16 if layout.tp > 1 else 2 * element_bytes
    return min(LOSS_CHUNK_TOKENS, tokens) * setting.shape.vocabulary / layout.tp * logit_bytes


def activation_elements(shape: LlamaShape, layout: Layout, dtype: str) -> float:
    """Return the elements per token and layer that are saved for the backward pass.

    A block with a manual backward pass saves what `ManualBackwardBlock.SAVED_ACTIVATIONS` names. Other blocks save a
    sequence-parallel part of the residual stream, a tensor-parallel part of what is inside attention and MLP, and the
    whole of what is gathered before a product or reduced after it, which PyTorch saves as it is.
    """
    if layout.checkpointing == "full":
        return shape.hidden_size / layout.tp
    attention, keys_values = shape.heads * shape.head_size, 2 * shape.kv_heads * shape.head_size
    qkv, selective = attention + keys_values, layout.checkpointing == "selective"
    if uses_manual_backward(layout, dtype):
        return 2 * shape.hidden_size + qkv + attention + (0 if selective else 2 * shape.intermediate_size)
    if dtype.startswith("fp8") and layout.checkpointing == "none":  # measured: the inputs of GEMMs stay in fp8
        return 3 * shape.hidden_size + qkv + attention + 2 * shape.intermediate_size
    inside = qkv + attention if selective else 2 * qkv + attention + 3 * shape.intermediate_size
    gathered = keys_values * layout.cp if layout.cp > 1 else shape.hidden_size
    return (2 * shape.hidden_size + inside + gathered) / layout.tp + 2 * shape.hidden_size


def _backward_elements(shape: LlamaShape, layout: Layout, saved_elements: float, dtype: str) -> float:
    """Return the elements per token of a layer's backward pass besides the saved ones: gradients and recomputation."""
    recomputed = activation_elements(shape, replace(layout, checkpointing="none"), dtype) - saved_elements
    return recomputed + (3 * shape.intermediate_size + 2 * shape.hidden_size) / layout.tp


def _ends_parameters(shape: LlamaShape, stages: list[range]) -> int:
    """Return the parameters of embedding, last norm and head that are in these stages."""
    matrix = shape.vocabulary * shape.hidden_size
    has_first = any(stage.start == 0 for stage in stages)
    has_last = any(stage.stop == shape.layers for stage in stages)
    return matrix * (has_first + (has_last and not shape.tied)) + shape.hidden_size * has_last


# ── time ──


def estimate_step_s(layout: Layout, setting: Setting, element_bytes: int, machine: Machine) -> float:
    """Estimate the seconds of a step: GEMMs at the machine's rate, collectives by bytes and bandwidth, the bubble."""
    stages = stage_layers(setting.shape.layers, layout.total_stages)
    stages_of_ranks = [stages[pp_rank :: layout.pp] for pp_rank in range(layout.pp)]
    slowest_s = max(_microbatch_s(layout, setting, element_bytes, machine, stages) for stages in stages_of_ranks)
    bubble = (layout.pp - 1) / layout.stages_per_rank
    if layout.schedule == "zero_bubble":  # the weights' half of the backward pass fills it
        bubble /= 3
    return slowest_s * (layout.microbatches + bubble) + _once_per_step_s(layout, setting, element_bytes, machine)


def _microbatch_s(layout: Layout, setting: Setting, element_bytes: int, machine: Machine, stages: list[range]) -> float:
    """Return the seconds of a rank with these stages for one micro-batch."""
    shape, layers = setting.shape, sum(len(stage) for stage in stages)
    tokens = layout.micro_batch * setting.sequence_length / layout.cp
    compute_s = _compute_s(layout, setting, machine, stages)
    # Four collectives of the residual stream in a layer's forward pass, and as many in its backward pass.
    residual_bytes = tokens * shape.hidden_size * element_bytes
    tp_collectives = layers * (11 if layout.checkpointing == "full" else 8)
    tp_s = tp_collectives * _collective_s(residual_bytes, layout.tp, _bandwidth_gb_s(layout.tp, layout.tp, machine))
    kv_bytes = tokens * 2 * shape.kv_heads * shape.head_size * element_bytes * layout.cp / layout.tp
    cp_s = layers * 2 * _collective_s(kv_bytes, layout.cp, _fsdp_gb_s(layout, machine))
    weight_bytes = layers * shape.layer_parameters / layout.tp * element_bytes
    fsdp_collectives = 3 if layout.reshard_after_forward else 0  # all-gather forward and backward, reduce-scatter
    fsdp_s = fsdp_collectives * _collective_s(weight_bytes, layout.dp_shard * layout.cp, _fsdp_gb_s(layout, machine))
    copies_per_microbatch = layout.uses_fsdp and layout.reshard_after_forward
    passes = GRADIENT_ADD_PASSES + (FSDP_COPY_PASSES if copies_per_microbatch else 0)
    copies_s = passes * _memory_pass_s(weight_bytes, machine)
    exposed_fsdp_s = max(fsdp_s - OVERLAP_FRACTION * compute_s, (1 - OVERLAP_FRACTION) * fsdp_s)
    return compute_s + tp_s + cp_s + copies_s + exposed_fsdp_s


def _compute_s(layout: Layout, setting: Setting, machine: Machine, stages: list[range]) -> float:
    """Return the seconds of a rank's computation for one micro-batch, recomputation included."""
    shape, layers = setting.shape, sum(len(stage) for stage in stages)
    tokens = layout.micro_batch * setting.sequence_length / layout.cp
    is_fp8 = setting.dtype.startswith("fp8")
    rate = machine.matrix_tflops.get("bf16" if is_fp8 else setting.dtype, ASSUMED_TFLOPS) * 1e12 / NON_GEMM_FACTOR
    has_last = any(stage.stop == shape.layers for stage in stages)
    flops = model_flops_per_token(shape, setting.sequence_length, layers=layers, lm_head=has_last)
    block_flops = model_flops_per_token(shape, setting.sequence_length, layers=layers, lm_head=False)
    recomputed_flops = {
        "none": 0.0,
        "full": block_flops / 3,
        "selective": 2 * layers * math.prod(shape.linear("gate_up")),
    }
    saved_by_fp8 = 6 * layers * shape.layer_parameters * (1 - 1 / FP8_SPEEDUP) if is_fp8 else 0.0
    return tokens * (flops + recomputed_flops[layout.checkpointing] - saved_by_fp8) / layout.tp / rate


def _once_per_step_s(layout: Layout, setting: Setting, element_bytes: int, machine: Machine) -> float:
    """Return the seconds of what a step does once: gathering weights that stay, and averaging over copies."""
    weight_bytes = setting.shape.parameters / layout.pp / layout.tp * element_bytes
    shard_ranks = layout.dp_shard * layout.cp
    gathering_s = 0.0
    if not layout.reshard_after_forward:
        gathering_s = 2 * _collective_s(weight_bytes, shard_ranks, _fsdp_gb_s(layout, machine))
        gathering_s += FSDP_COPY_PASSES * _memory_pass_s(weight_bytes, machine)
    span = layout.tp * shard_ranks * layout.dp_replicate
    replicate_gb_s = _bandwidth_gb_s(layout.dp_replicate, span, machine)
    return gathering_s + 2 * _collective_s(weight_bytes / shard_ranks, layout.dp_replicate, replicate_gb_s)


def _memory_pass_s(total_bytes: float, machine: Machine) -> float:
    """Return the seconds of one pass through the device's memory; 0 where its bandwidth is unknown."""
    return total_bytes / (machine.memory_gb_s * 1e9) if machine.memory_gb_s else 0.0


def _collective_s(total_bytes: float, ranks: int, gb_s: float) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter: each rank sends all but its own part."""
    return total_bytes * (ranks - 1) / ranks / (gb_s * 1e9)


def _fsdp_gb_s(layout: Layout, machine: Machine) -> float:
    ranks = layout.cp * layout.dp_shard
    return _bandwidth_gb_s(ranks, layout.tp * ranks, machine)


def _bandwidth_gb_s(ranks: int, span: int, machine: Machine) -> float:
    """Return the bandwidth of one rank in a group of `ranks` among `span` consecutive ranks, which may share a node."""
    if span > machine.ranks_per_node:
        return machine.network_gb_s
    return LINK_EFFICIENCY * machine.group_link_gb_s(ranks)
