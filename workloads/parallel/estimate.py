"""What a layout needs and how fast it should be, on paper: to leave out what cannot fit and to try the best first,
never to report. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from workloads.api.contract import Machine
from workloads.llama.flops import model_flops_per_token
from workloads.llama.shapes import LlamaShape
from workloads.parallel.layout import LOSS_TOKENS, Layout, Setting, is_written, stage_layers

GIB = 2**30
RUNTIME_GIB = 1.5  # a context, NCCL's buffers, workspaces of the libraries
ASSUMED_TFLOPS = 0.05  # of a processor whose rate nobody has measured: only the order of layouts depends on it
OPTIMIZER_BYTES = 2  # times the width of a number: AdamW's two states
BESIDE_PRODUCTS = 1.19  # attention and what is between products: the step of one H200 against its products alone
FP8_LAYERS = 1.4  # torchao's layers against bf16's, casts included (benchmarks/results/precision_h200.md)
# Fitted to two and four H200s (benchmarks/results/parallel_h200.md): tensor parallel collectives run at 0.45 of the
# link; of FSDP's, which run beside computation, half of the time is lost. Passes through memory at the vendor's
# bandwidth: over weights gathered for both passes and gradients divided after them, which FSDP copies before and after
# a collective, even one of a single rank; and over gradients that a micro-batch adds to those before.
LINK_SHARE = 0.45
HIDDEN = 0.5
COPYING_PASSES = 10
ADDING_PASSES = 2


@dataclass(frozen=True)
class Memory:
    """GiB of one device, of the stage that needs most."""

    parameters: float
    gradients: float
    states: float
    gathered: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        parts = (self.parameters, self.gradients, self.states, self.gathered, self.activations, self.working)
        return sum(parts) + RUNTIME_GIB


def memory(layout: Layout, setting: Setting, element_bytes: int) -> Memory:
    """The pipeline rank that needs most; `width` is the bytes of a number."""
    found = [_memory_of(layout, setting, element_bytes, rank) for rank in range(layout.pipeline)]
    return max(found, key=lambda each: each.total)


def _memory_of(layout: Layout, setting: Setting, element_bytes: int, rank: int) -> Memory:
    shape, each = setting.shape, stage_layers(setting.shape.layers, layout.total_stages)
    mine = each[rank :: layout.pipeline]
    layer = shape.layer_parameters / layout.tensor
    layers = sum(len(stage) for stage in mine)
    ends = _ends_parameters(shape, mine) / layout.tensor
    kept = (layers * layer + ends) / (layout.shard * layout.context)
    # A pipeline keeps weights and gradients undivided from one micro-batch to the next, as is done without resharding.
    divided, stay = layout.is_wrapped, not layout.reshard or layout.pipeline > 1
    whole = (ends + (layers * layer if stay else 0)) if divided else 0.0
    summed = layout.microbatches > 1  # there are gradients when activations are at their peak, which is at the loss
    gradients = (whole if divided and stay else kept) if summed else 0.0
    tokens = layout.micro_batch * setting.sequence_length / layout.context
    # A pipeline's first rank has as many micro-batches on their way as there are ranks.
    waiting: float = min(layout.microbatches, layout.pipeline - rank) if layout.pipeline > 1 else 1
    if layout.schedule == "interleaved":
        begun = (layout.stages - 1) * layout.pipeline + 2 * (layout.pipeline - 1 - rank) + 1
        waiting = min(layout.microbatches, begun / layout.stages)
    elif layout.schedule == "zero_bubble":
        waiting = min(layout.microbatches, layout.pipeline)
    each_layer = activation_numbers(shape, layout, setting.dtype)
    lm_head = shape.vocabulary * shape.hidden_size / layout.tensor if each[-1] in mine else 0.0
    return Memory(
        parameters=kept * element_bytes / GIB,
        gradients=gradients * element_bytes / GIB,
        states=kept * OPTIMIZER_BYTES * element_bytes / GIB,
        gathered=whole * element_bytes / GIB,
        activations=waiting * layers * tokens * each_layer * element_bytes / GIB,
        working=max(
            (_logits_bytes(layout, setting, element_bytes, tokens) + lm_head * element_bytes) if lm_head else 0.0,
            (lm_head + tokens * _backward_numbers(shape, layout, each_layer, setting.dtype)) * element_bytes
            + (3 if divided and not stay else 1) * layer * element_bytes,  # two layers' weights, a layer's gradients
        )
        / GIB,
    )


def _logits_bytes(layout: Layout, setting: Setting, element_bytes: int, tokens: float) -> float:
    """Of the loss's chunk: logits and their gradient, several more where ranks have parts and nothing is compiled."""
    each = 16 if layout.tensor > 1 else 2 * element_bytes
    return min(LOSS_TOKENS, tokens) * setting.shape.vocabulary / layout.tensor * each


def activation_numbers(shape: LlamaShape, layout: Layout, dtype: str) -> float:
    """Of a token and layer, what waits for the backward pass. In a written-out block what its `KEPT` names; else a
    sequence-parallel part of the residual stream, a tensor-parallel part of what is inside attention and MLP, and whole
    what is gathered before a product or summed after it, which PyTorch keeps as it is."""
    if layout.checkpointing == "full":
        return shape.hidden_size / layout.tensor
    attention, keys_values = shape.heads * shape.head_size, 2 * shape.kv_heads * shape.head_size
    qkv, selective = attention + keys_values, layout.checkpointing == "selective"
    if is_written(layout, dtype):
        return 2 * shape.hidden_size + qkv + attention + (0 if selective else 2 * shape.intermediate_size)
    if dtype.startswith("fp8") and layout.checkpointing == "none":  # measured: the inputs of products stay in fp8
        return 3 * shape.hidden_size + qkv + attention + 2 * shape.intermediate_size
    inside = qkv + attention if selective else 2 * qkv + attention + 3 * shape.intermediate_size
    gathered = keys_values * layout.context if layout.context > 1 else shape.hidden_size
    return (2 * shape.hidden_size + inside + gathered) / layout.tensor + 2 * shape.hidden_size


def _backward_numbers(shape: LlamaShape, layout: Layout, kept: float, dtype: str) -> float:
    """Of a token, what a layer's backward pass has beside what was kept: gradients, and what it computes again."""
    again = activation_numbers(shape, replace(layout, checkpointing="none"), dtype) - kept
    return again + (3 * shape.intermediate_size + 2 * shape.hidden_size) / layout.tensor


def _ends_parameters(shape: LlamaShape, stages: list[range]) -> int:
    matrix = shape.vocabulary * shape.hidden_size
    first = any(stage.start == 0 for stage in stages)
    last = any(stage.stop == shape.layers for stage in stages)
    return matrix * (first + (last and not shape.tied)) + shape.hidden_size * last


# ── time ──


def step_s(layout: Layout, setting: Setting, element_bytes: int, machine: Machine) -> float:
    """Seconds of a step: matrix work at the machine's rate, collectives by bytes and bandwidth, the bubble."""
    each = stage_layers(setting.shape.layers, layout.total_stages)
    ranks = [each[rank :: layout.pipeline] for rank in range(layout.pipeline)]
    slowest = max(_rank_s(layout, setting, element_bytes, machine, stages) for stages in ranks)
    bubble = (layout.pipeline - 1) / layout.stages
    if layout.schedule == "zero_bubble":  # the weights' half of the backward pass fills it
        bubble /= 3
    return slowest * (layout.microbatches + bubble) + _once_s(layout, setting, element_bytes, machine)


def _rank_s(layout: Layout, setting: Setting, element_bytes: int, machine: Machine, stages: list[range]) -> float:
    """Seconds that a rank takes for one micro-batch."""
    shape, layers = setting.shape, sum(len(stage) for stage in stages)
    tokens = layout.micro_batch * setting.sequence_length / layout.context
    fp8 = setting.dtype.startswith("fp8")
    rate = machine.matrix_tflops.get("bf16" if fp8 else setting.dtype, ASSUMED_TFLOPS) * 1e12 / BESIDE_PRODUCTS
    last = any(stage.stop == shape.layers for stage in stages)
    flops = model_flops_per_token(shape, setting.sequence_length, layers=layers, lm_head=last)
    block = model_flops_per_token(shape, setting.sequence_length, layers=layers, lm_head=False)
    again = {"none": 0.0, "full": block / 3, "selective": 2 * layers * math.prod(shape.linear("gate_up"))}
    faster = 6 * layers * shape.layer_parameters * (1 - 1 / FP8_LAYERS) if fp8 else 0.0
    compute = tokens * (flops + again[layout.checkpointing] - faster) / layout.tensor / rate
    # Four collectives of the residual stream in a layer's forward pass, and as many in its backward pass.
    stream = tokens * shape.hidden_size * element_bytes
    count = layers * (11 if layout.checkpointing == "full" else 8)
    tensor = count * _ring_s(stream, layout.tensor, _within(layout.tensor, machine))
    keys_values = tokens * 2 * shape.kv_heads * shape.head_size * element_bytes * layout.context / layout.tensor
    context = layers * 2 * _ring_s(keys_values, layout.context, _data_gb_s(layout, machine))
    weights = layers * shape.layer_parameters / layout.tensor * element_bytes
    times = 3 if layout.reshard else 0  # gathered forward and backward, gradients divided
    sharded = times * _ring_s(weights, layout.shard * layout.context, _data_gb_s(layout, machine))
    passes = ADDING_PASSES + (COPYING_PASSES if layout.is_wrapped and layout.reshard else 0)
    copies = passes * _pass_s(weights, machine)
    return compute + tensor + context + copies + max(sharded - HIDDEN * compute, (1 - HIDDEN) * sharded)


def _once_s(layout: Layout, setting: Setting, element_bytes: int, machine: Machine) -> float:
    """What a step does once: gathering what stays gathered, averaging over copies."""
    weights = setting.shape.parameters / layout.pipeline / layout.tensor * element_bytes
    ranks = layout.shard * layout.context
    gathered = 0.0
    if not layout.reshard:
        gathered = 2 * _ring_s(weights, ranks, _data_gb_s(layout, machine))
        gathered += COPYING_PASSES * _pass_s(weights, machine)
    copies = _within(layout.tensor * ranks * layout.replicate, machine)
    return gathered + 2 * _ring_s(weights / ranks, layout.replicate, copies)


def _pass_s(total_bytes: float, machine: Machine) -> float:
    """Through a device's memory; where its bandwidth is not known, copies are not counted."""
    return total_bytes / (machine.memory_gb_s * 1e9) if machine.memory_gb_s else 0.0


def _ring_s(total_bytes: float, ranks: int, gb_s: float) -> float:
    """An all-gather or a reduce-scatter of so many bytes in all: each rank passes on all but its own part."""
    return total_bytes * (ranks - 1) / ranks / (gb_s * 1e9)


def _data_gb_s(layout: Layout, machine: Machine) -> float:
    return _within(layout.tensor * layout.context * layout.shard, machine)


def _within(ranks: int, machine: Machine) -> float:
    """Ranks that are numbered together are in one node as long as they fit."""
    return LINK_SHARE * machine.link_gb_s if ranks <= machine.ranks_per_node else machine.network_gb_s
