"""What a layout needs and how fast it should be, on paper: to leave out what cannot fit and to try the best first,
never to report. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from workloads.contract import Machine
from workloads.llama.flops import per_token
from workloads.llama.shapes import LlamaShape
from workloads.parallel.layout import LOSS_TOKENS, Layout, Setting, stage_layers

GIB = 2**30
RUNTIME_GIB = 1.5  # a context, NCCL's buffers, workspaces of the libraries
ASSUMED_TFLOPS = 0.05  # of a processor whose rate nobody has measured: only the order of layouts depends on it
OPTIMIZER_BYTES = 2  # times the width of a number: AdamW's two states
HIDDEN = 0.8  # of what could run beside computation, the share that really does


@dataclass(frozen=True)
class Memory:
    """GiB of one device, of the stage that needs most."""

    parameters: float
    gradients: float
    states: float
    gathered: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        parts = (self.parameters, self.gradients, self.states, self.gathered, self.activations, self.loss)
        return sum(parts) + RUNTIME_GIB


def memory(layout: Layout, setting: Setting, width: int) -> Memory:
    """The pipeline rank that needs most; `width` is the bytes of a number."""
    found = [_memory_of(layout, setting, width, rank) for rank in range(layout.pipeline)]
    return max(found, key=lambda each: each.total)


def _memory_of(layout: Layout, setting: Setting, width: int, rank: int) -> Memory:
    shape, each = setting.shape, stage_layers(setting.shape.layers, layout.total_stages)
    mine = each[rank :: layout.pipeline]
    layer = shape.layer_parameters / layout.tensor
    layers = sum(len(stage) for stage in mine)
    ends = _ends_parameters(shape, mine) / layout.tensor
    kept = (layers * layer + ends) / (layout.shard * layout.context)
    fsdp = layout.data * layout.context > 1
    # Weights and gradients, undivided. In a pipeline PyTorch keeps both so from one micro-batch to the next.
    whole = ends + (min(2, layers) if layout.reshard and layout.pipeline == 1 else layers) * layer
    tokens = layout.micro_batch * setting.sequence_length / layout.context
    # A pipeline's first rank has as many micro-batches on their way as there are ranks.
    waiting: float = min(layout.microbatches, layout.pipeline - rank) if layout.pipeline > 1 else 1
    if layout.schedule == "interleaved":
        begun = (layout.stages - 1) * layout.pipeline + 2 * (layout.pipeline - 1 - rank) + 1
        waiting = min(layout.microbatches, begun / layout.stages)
    elif layout.schedule == "zero_bubble":
        waiting = min(layout.microbatches, layout.pipeline)
    per_layer = tokens * activation_numbers(shape, layout) * width
    working = tokens * activation_numbers(shape, replace(layout, checkpointing="none")) * width
    last = each[-1] in mine
    rows = shape.vocabulary / layout.tensor
    logits = min(LOSS_TOKENS, tokens) * rows * (4 + 2 * width) * (2 if layout.tensor > 1 else 1)
    loss = logits + rows * shape.width * 2 * width if last else 0.0
    return Memory(
        parameters=kept * width / GIB,
        gradients=kept * width / GIB,
        states=kept * OPTIMIZER_BYTES * width / GIB,
        gathered=2 * whole * width / GIB if fsdp else 0.0,
        activations=(waiting * layers * per_layer + working) / GIB,
        loss=loss / GIB,
    )


def activation_numbers(shape: LlamaShape, layout: Layout) -> float:
    """Of a token and layer, what waits for the backward pass: a sequence-parallel part of the residual stream, a
    tensor-parallel part of what is inside attention and MLP, and whole what is gathered before a product or summed
    after it, which PyTorch keeps as it is."""
    if layout.checkpointing == "full":
        return shape.width / layout.tensor
    attention, keys_values = shape.heads * shape.head_size, 2 * shape.kv_heads * shape.head_size
    qkv = attention + keys_values
    inside = qkv + attention if layout.checkpointing == "selective" else 2 * qkv + attention + 3 * shape.feed_forward
    gathered = keys_values * layout.context if layout.context > 1 else 0
    return (2 * shape.width + inside + gathered) / layout.tensor + 2 * shape.width


def _ends_parameters(shape: LlamaShape, stages: list[range]) -> int:
    matrix = shape.vocabulary * shape.width
    first = any(stage.start == 0 for stage in stages)
    last = any(stage.stop == shape.layers for stage in stages)
    return matrix * (first + (last and not shape.tied)) + shape.width * last


# ── time ──


def step_s(layout: Layout, setting: Setting, width: int, machine: Machine, dtype: str) -> float:
    """Seconds of a step: matrix work at the machine's rate, collectives by bytes and bandwidth, the bubble."""
    each = stage_layers(setting.shape.layers, layout.total_stages)
    ranks = [each[rank :: layout.pipeline] for rank in range(layout.pipeline)]
    slowest = max(_rank_s(layout, setting, width, machine, dtype, stages) for stages in ranks)
    bubble = (layout.pipeline - 1) / layout.stages
    if layout.schedule == "zero_bubble":  # the weights' half of the backward pass fills it
        bubble /= 3
    return slowest * (layout.microbatches + bubble) + _once_s(layout, setting, width, machine)


def _rank_s(layout: Layout, setting: Setting, width: int, machine: Machine, dtype: str, stages: list[range]) -> float:
    """Seconds that a rank takes for one micro-batch."""
    shape, layers = setting.shape, sum(len(stage) for stage in stages)
    tokens = layout.micro_batch * setting.sequence_length / layout.context
    rate = machine.matrix_tflops.get(dtype, ASSUMED_TFLOPS) * 1e12
    last = any(stage.stop == shape.layers for stage in stages)
    flops = per_token(shape, setting.sequence_length, layers=layers, head=last)
    block = per_token(shape, setting.sequence_length, layers=layers, head=False)
    again = {"none": 0.0, "full": block / 3, "selective": 2 * layers * math.prod(shape.linear("gate_up"))}
    compute = tokens * (flops + again[layout.checkpointing]) / layout.tensor / rate
    # Four collectives of the residual stream in a layer's forward pass, and as many in its backward pass.
    stream = tokens * shape.width * width
    count = layers * (11 if layout.checkpointing == "full" else 8)
    tensor = count * _ring_s(stream, layout.tensor, _within(layout.tensor, machine))
    keys_values = tokens * 2 * shape.kv_heads * shape.head_size * width * layout.context / layout.tensor
    context = layers * 2 * _ring_s(keys_values, layout.context, _data_gb_s(layout, machine))
    weights = layers * shape.layer_parameters / layout.tensor * width
    times = 3 if layout.reshard else 0  # gathered forward and backward, gradients divided
    sharded = times * _ring_s(weights, layout.shard * layout.context, _data_gb_s(layout, machine))
    return compute + tensor + context + max(sharded - HIDDEN * compute, (1 - HIDDEN) * sharded)


def _once_s(layout: Layout, setting: Setting, width: int, machine: Machine) -> float:
    """What a step does once: gathering what stays gathered, averaging over copies."""
    weights = setting.shape.parameters / layout.pipeline / layout.tensor * width
    ranks = layout.shard * layout.context
    gathered = 0.0 if layout.reshard else 2 * _ring_s(weights, ranks, _data_gb_s(layout, machine))
    copies = _within(layout.tensor * ranks * layout.replicate, machine)
    return gathered + 2 * _ring_s(weights / ranks, layout.replicate, copies)


def _ring_s(total_bytes: float, ranks: int, gb_s: float) -> float:
    """An all-gather or a reduce-scatter of so many bytes in all: each rank passes on all but its own part."""
    return total_bytes * (ranks - 1) / ranks / (gb_s * 1e9)


def _data_gb_s(layout: Layout, machine: Machine) -> float:
    return _within(layout.tensor * layout.context * layout.shard, machine)


def _within(ranks: int, machine: Machine) -> float:
    """Ranks that are numbered together are in one node as long as they fit."""
    return machine.link_gb_s if ranks <= machine.ranks_per_node else machine.network_gb_s
