"""How a model is laid out over ranks: the degrees, and which of them are legal. No torch.

Ranks are numbered with the innermost degree fastest: tensor, context, shard, replicate, pipeline. So those that talk
most are neighbours, and stay within a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from workloads.llama.shapes import LlamaShape

Checkpointing = Literal["none", "selective", "full"]
LOSS_TOKENS = 2048  # what the loss takes at a time, so that no full logits exist
DEGREES = ("replicate", "shard", "tensor", "context", "pipeline")
TORCH = tuple(int(part) for part in version("torch").split(".")[:2])
Schedule = Literal["1f1b", "interleaved", "zero_bubble"]


@dataclass(frozen=True)
class Layout:
    """replicate, shard: data parallel, whole copies and FSDP within each; tensor: with sequence parallelism; context:
    of the sequence; pipeline: ranks in a line, each with `stages` stages of it

    micro_batch: sequences that a rank computes at once; global_batch: sequences in a step, of all ranks
    reshard: whether weights are gathered again for the backward pass, and gradients divided after each micro-batch;
    else both stay whole through a step
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    stages: int = 1
    schedule: Schedule = "1f1b"
    micro_batch: int = 1
    global_batch: int = 1
    checkpointing: Checkpointing = "none"
    reshard: bool = True

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.tensor * self.context * self.pipeline

    @property
    def data(self) -> int:
        """So many groups of ranks see different sequences."""
        return self.replicate * self.shard

    @property
    def is_wrapped(self) -> bool:
        """Whether FSDP keeps the weights: gradients are averaged over several ranks."""
        return self.data * self.context > 1

    @property
    def microbatches(self) -> int:
        """So many a rank computes in a step, one after the other: gradient accumulation, or what fills a pipeline."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def total_stages(self) -> int:
        return self.pipeline * self.stages

    def __str__(self) -> str:
        """`shard 4 x tensor 2, micro-batch 2 x 8`"""
        degrees = [f"{name} {getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1]
        line = f" ({self.schedule}, {self.total_stages} stages)" if self.pipeline > 1 else ""
        kept = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        gathered = "" if self.reshard else ", weights stay gathered"
        batch = f"micro-batch {self.micro_batch} x {self.microbatches}"
        return f"{' x '.join(degrees) or 'one rank'}{line}, {batch}{kept}{gathered}"


@dataclass(frozen=True)
class Setting:
    """What a layout is held against."""

    shape: LlamaShape
    sequence_length: int
    world_size: int
    ranks_per_node: int
    tensor_across_nodes: bool = False
    compiled: bool = False
    dtype: str = "bf16"


def why_illegal(layout: Layout, setting: Setting) -> tuple[str, str]:
    """The first rule that is broken, and how, with its numbers; both empty where none is."""
    broken = ((rule, reason) for rule, breaks in RULES.items() if (reason := breaks(layout, setting)))
    return next(broken, ("", ""))


def _world(l: Layout, s: Setting) -> str:  # noqa: E741
    degrees = (
        f"replicate {l.replicate} x shard {l.shard} x tensor {l.tensor} x context {l.context} x pipeline {l.pipeline}"
    )
    return f"{degrees} = {l.world_size} ranks, there are {s.world_size}" if l.world_size != s.world_size else ""


def _tensor(l: Layout, s: Setting) -> str:  # noqa: E741
    parts = {
        "heads": s.shape.heads,
        "key-value heads": s.shape.kv_heads,
        "feed-forward width": s.shape.intermediate_size,
        "vocabulary": s.shape.vocabulary,
        "sequence length on a rank": s.sequence_length // l.context,
    }
    return next((f"tensor {l.tensor} does not divide {n} {name}" for name, n in parts.items() if n % l.tensor), "")


def _tensor_in_node(l: Layout, s: Setting) -> str:  # noqa: E741
    if l.tensor <= s.ranks_per_node or s.tensor_across_nodes:
        return ""
    return f"tensor {l.tensor} does not fit in a node of {s.ranks_per_node}, and tensor_across_nodes is false"


def _context(l: Layout, s: Setting) -> str:  # noqa: E741
    halves = 2 * l.context  # each rank has a part from the front and one from the back: equal work
    if l.context == 1 or s.sequence_length % halves == 0:
        return ""
    return f"context {l.context} needs a sequence of {halves} equal parts, {s.sequence_length} is none"


def _batch(l: Layout, s: Setting) -> str:  # noqa: E741
    if l.global_batch % (l.micro_batch * l.data) == 0:
        return ""
    return f"global batch {l.global_batch} is no multiple of micro-batch {l.micro_batch} x data parallel {l.data}"


def _stages(l: Layout, s: Setting) -> str:  # noqa: E741
    if l.total_stages > s.shape.layers:
        return f"{l.total_stages} stages, the model has {s.shape.layers} layers"
    if l.pipeline == 1:
        return "one rank is no pipeline: stages 1 and schedule 1f1b" if (l.stages, l.schedule) != (1, "1f1b") else ""
    if (l.schedule == "1f1b") != (l.stages == 1):
        return f"schedule {l.schedule} has {'one stage' if l.schedule == '1f1b' else 'several stages'} on a rank"
    return ""


def _filled(l: Layout, s: Setting) -> str:  # noqa: E741
    if l.pipeline == 1:
        return ""
    if l.microbatches < l.pipeline:
        return f"{l.microbatches} microbatches do not fill a pipeline of {l.pipeline}"
    rounds = max(1, l.microbatches // l.pipeline)
    if l.schedule != "1f1b" and l.microbatches % rounds:
        return f"{l.microbatches} microbatches are not divided by {rounds} rounds, as schedule {l.schedule} needs"
    return ""


def _resharding(l: Layout, s: Setting) -> str:  # noqa: E741
    divided = l.shard * l.context > 1
    return "" if divided or l.reshard else "with shard 1 and context 1 nothing is gathered: reshard true"


def _zero_bubble(l: Layout, s: Setting) -> str:  # noqa: E741
    """What PyTorch's split of a backward pass, first for inputs and then for weights, does not stand."""
    if l.schedule != "zero_bubble":
        return ""
    if TORCH < (2, 13):
        return f"zero_bubble does not split this loss's backward pass before torch 2.13, this is {TORCH[0]}.{TORCH[1]}"
    if s.compiled:
        return "zero_bubble splits the backward pass, a compiled block does not: compile false"
    if l.checkpointing == "selective":
        return "zero_bubble goes through a block twice, selective checkpointing only once"
    if l.is_wrapped and l.reshard:
        return "zero_bubble with weights that are gathered again has wrong gradients: reshard false, with shard above 1"
    return ""


def _tied(l: Layout, s: Setting) -> str:  # noqa: E741
    return "the model's head is its embedding: both have to be in one stage" if s.shape.tied and l.pipeline > 1 else ""


def _fp8(l: Layout, s: Setting) -> str:  # noqa: E741
    """What torchao's layers are laid out for here."""
    if not s.dtype.startswith("fp8"):
        return ""
    if l.tensor > 1:
        return f"the scales of {s.dtype} are of whole weights: tensor 1"
    return "zero_bubble splits the backward pass, an fp8 layer does not" if l.schedule == "zero_bubble" else ""


RULES: dict[str, Callable[[Layout, Setting], str]] = {
    "the degrees multiply to the number of ranks": _world,
    "tensor divides what it divides": _tensor,
    "tensor stays within a node": _tensor_in_node,
    "context divides the sequence": _context,
    "micro-batches make the global batch": _batch,
    "stages and schedule agree": _stages,
    "micro-batches fill the pipeline": _filled,
    "only what is divided is gathered": _resharding,
    "zero bubble is possible": _zero_bubble,
    "a tied head is where the embedding is": _tied,
    "fp8 is possible": _fp8,
}


def is_written(layout: Layout, dtype: str) -> bool:
    """Whether blocks have a backward pass of our own: where weights and sequences are whole. Zero bubble asks for the
    two halves of a backward pass, each by itself, and fp8 layers are torchao's."""
    whole = layout.tensor == layout.context == 1
    return whole and layout.schedule != "zero_bubble" and not dtype.startswith("fp8")


def stage_layers(layers: int, stages: int) -> list[range]:
    """Which layers each stage has: as even as can be, the first and the last stage the ones with fewer, since they have
    the ends."""
    base, more = divmod(layers, stages)
    longer = sorted(range(stages), key=lambda n: (n in (0, stages - 1), n))[:more]
    found, start = [], 0
    for n in range(stages):
        end = start + base + (n in longer)
        found.append(range(start, end))
        start = end
    return found
