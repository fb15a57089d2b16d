"""The cost model of layouts: estimates of step times, never reported as measurements. No torch.

It orders layouts, the most promising first. `workloads.parallel.memory` excludes those that cannot fit.
"""

from __future__ import annotations

import math

from workloads.api.contract import Machine
from workloads.llama.flops import model_flops_per_token
from workloads.parallel.layout import (
    SPLIT_BACKWARD_SCHEDULES,
    Layout,
    Setting,
    rank_stages,
    uses_fsdp,
)
from workloads.planner.pipeline import stage_layers

ASSUMED_TFLOPS = 0.05  # of a processor whose rate was not measured: only the order of layouts depends on it
NON_GEMM_FACTOR = 1.19  # attention and what is between the GEMMs: one H200's step against its GEMMs alone
FP8_SPEEDUP = 1.4  # torchao's layers against bf16's, casts included (benchmarks/results/precision_h200.md)
# Fitted to two and four H200s (benchmarks/results/parallel_h200.md): tensor parallel collectives run at 0.45 of the
# link's bandwidth; FSDP's collectives run beside computation, which hides at most half of their time. Passes through
# memory run at the vendor's bandwidth: FSDP_COPY_PASSES over weights that are gathered for both passes and gradients
# that are reduce-scattered after them, which FSDP copies before and after a collective, even one of a single rank; and
# GRADIENT_ADD_PASSES over gradients that a micro-batch adds to those of the micro-batches before. All were fitted with
# bf16 state. Of the copies, GRADIENT_COPY_PASSES are of gradients: with fp32 state they have twice the bytes, by
# calculation, as those of the collectives of gradients.
LINK_EFFICIENCY = 0.45
OVERLAP_FRACTION = 0.5
FSDP_COPY_PASSES = 10
GRADIENT_COPY_PASSES = 4
GRADIENT_ADD_PASSES = 2
# What fp32 state adds to the optimizer's bytes a parameter; the fitted constants contain those of bf16 state. AdamW
# reads four tensors and writes three, with two bytes more of each; clipping reads a gradient twice and writes it once.
FP32_OPTIMIZER_BYTES = 7 * 2 + 3 * 4


def estimate_step_s(layout: Layout, setting: Setting, machine: Machine) -> float:
    """Estimate the seconds of a step: GEMMs at the machine's rate, collectives by bytes and bandwidth, the bubble."""
    stages = stage_layers(setting.shape.layers, layout.total_stages)
    stages_of_ranks = [[stages[index] for index in rank_stages(layout, rank)] for rank in range(layout.pp)]
    slowest_s = max(_microbatch_s(layout, setting, machine, stages) for stages in stages_of_ranks)
    bubble = (layout.pp - 1) / layout.stages_per_rank
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        # The weights' half of the backward pass fills the rest. In PyTorch's orders of zbv and dualpipev it is exactly
        # so where the forward pass and both halves take equal times.
        bubble /= 3
    return slowest_s * (layout.microbatches + bubble) + _once_per_step_s(layout, setting, machine)


def _microbatch_s(layout: Layout, setting: Setting, machine: Machine, stages: list[range]) -> float:
    """Return the seconds of a rank with these stages for one micro-batch."""
    shape, layers = setting.shape, sum(len(stage) for stage in stages)
    tokens = layout.micro_batch * setting.sequence_length / layout.cp
    compute_s = _compute_s(layout, setting, machine, stages)
    # Four collectives of the residual stream in a layer's forward pass, and as many in its backward pass.
    residual_bytes = tokens * shape.hidden_size * setting.element_bytes
    tp_collectives = layers * (11 if layout.checkpointing == "full" else 8)
    tp_s = tp_collectives * _collective_s(residual_bytes, layout.tp, _bandwidth_gb_s(layout.tp, layout.tp, machine))
    if layout.async_tp:  # assumed to hide as much as FSDP's collectives do; not measured
        tp_s *= 1 - OVERLAP_FRACTION
    cp_s = layers * _context_s(layout, setting, machine)
    parameters = layers * shape.layer_parameters / layout.tp
    gradient_s = GRADIENT_ADD_PASSES * _memory_pass_s(parameters * setting.state_bytes, machine)
    fsdp_s = 0.0
    if layout.reshard_after_forward:
        fsdp_s = _fsdp_collectives_s(layout, setting, machine, parameters)
        gradient_s += _fsdp_copies_s(layout, setting, machine, parameters)
    exposed_fsdp_s = max(fsdp_s - OVERLAP_FRACTION * compute_s, (1 - OVERLAP_FRACTION) * fsdp_s)
    return compute_s + tp_s + cp_s + gradient_s + exposed_fsdp_s


def _context_s(layout: Layout, setting: Setting, machine: Machine) -> float:
    """Return the seconds in which a layer waits for keys and values of other ranks, for one micro-batch.

    They are gathered in the forward pass, and their gradients are reduce-scattered in the backward pass; nothing is
    computed meanwhile. In a ring they travel in both passes, and their gradients in fp32 in the backward pass, while
    attention is computed: what takes longer than attention remains.
    """
    shape, tokens = setting.shape, layout.micro_batch * setting.sequence_length / layout.cp
    kv_bytes = tokens * 2 * shape.kv_heads * shape.head_size * layout.cp / layout.tp
    if layout.cp_method == "allgather":
        return 2 * _collective_s(kv_bytes * setting.element_bytes, layout.cp, _fsdp_gb_s(layout, machine))
    ring_s = _collective_s(kv_bytes * (2 * setting.element_bytes + 4), layout.cp, _fsdp_gb_s(layout, machine))
    attention_flops = tokens * 6 * setting.sequence_length * shape.heads * shape.head_size / layout.tp
    return max(0.0, ring_s - attention_flops / (_matrix_tflops(setting, machine) * 1e12))


def _matrix_tflops(setting: Setting, machine: Machine) -> float:
    """Return the rate of matrix products that are not in fp8."""
    dtype = "bf16" if setting.dtype.startswith("fp8") else setting.dtype
    return machine.matrix_tflops.get(dtype, ASSUMED_TFLOPS)


def _compute_s(layout: Layout, setting: Setting, machine: Machine, stages: list[range]) -> float:
    """Return the seconds of a rank's computation for one micro-batch, recomputation included."""
    shape, layers = setting.shape, sum(len(stage) for stage in stages)
    tokens = layout.micro_batch * setting.sequence_length / layout.cp
    is_fp8 = setting.dtype not in ("bf16", "fp32")  # nothing was measured of mxfp8 and nvfp4: taken as fp8
    rate = _matrix_tflops(setting, machine) * 1e12 / NON_GEMM_FACTOR
    has_last = any(stage.stop == shape.layers for stage in stages)
    flops = model_flops_per_token(shape, setting.attended_length, layers=layers, lm_head=has_last)
    block_flops = model_flops_per_token(shape, setting.attended_length, layers=layers, lm_head=False)
    recomputed_flops = {
        "none": 0.0,
        "full": block_flops / 3,
        "selective": 2 * layers * math.prod(shape.linear("gate_up")),
    }
    saved_by_fp8 = 6 * layers * shape.layer_parameters * (1 - 1 / FP8_SPEEDUP) if is_fp8 else 0.0
    return tokens * (flops + recomputed_flops[layout.checkpointing] - saved_by_fp8) / layout.tp / rate


def _once_per_step_s(layout: Layout, setting: Setting, machine: Machine) -> float:
    """Return the seconds of what a step does once.

    That is gathering weights that stay, averaging over copies, clipping and the optimizer.
    """
    parameters = setting.shape.parameters / layout.pp / layout.tp
    shard_ranks = layout.dp_shard * layout.cp
    gathering_s = 0.0
    if not layout.reshard_after_forward:
        gathering_s = _fsdp_collectives_s(layout, setting, machine, parameters, gathers=1)
        gathering_s += _fsdp_copies_s(layout, setting, machine, parameters)
    span = layout.tp * shard_ranks * layout.dp_replicate
    replicate_gb_s = _bandwidth_gb_s(layout.dp_replicate, span, machine)
    state_bytes = parameters / shard_ranks * setting.state_bytes
    averaging_s = 2 * _collective_s(state_bytes, layout.dp_replicate, replicate_gb_s)
    optimizer_bytes = FP32_OPTIMIZER_BYTES * parameters / shard_ranks if setting.state == "fp32" else 0.0
    return gathering_s + averaging_s + _memory_pass_s(optimizer_bytes, machine)


def _fsdp_collectives_s(
    layout: Layout, setting: Setting, machine: Machine, parameters: float, gathers: int = 2
) -> float:
    """Return the seconds of FSDP's all-gathers of so many parameters, and of one reduce-scatter of their gradients."""
    gathered_bytes = 1 if setting.dtype == "fp8_tensorwise" else setting.element_bytes
    total_bytes = parameters * (gathers * gathered_bytes + setting.state_bytes)
    return _collective_s(total_bytes, layout.dp_shard * layout.cp, _fsdp_gb_s(layout, machine))


def _fsdp_copies_s(layout: Layout, setting: Setting, machine: Machine, parameters: float) -> float:
    """Return the seconds of FSDP's copies before and after its collectives; 0 without FSDP."""
    if not uses_fsdp(layout, setting.state):
        return 0.0
    weight_passes = FSDP_COPY_PASSES - GRADIENT_COPY_PASSES
    total_bytes = parameters * (weight_passes * setting.element_bytes + GRADIENT_COPY_PASSES * setting.state_bytes)
    return _memory_pass_s(total_bytes, machine)


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
