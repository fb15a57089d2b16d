"""Layouts of a model over ranks: the parallel degrees, and what training adds to them. No torch.

Ranks are numbered with the innermost degree fastest: tp, cp, dp_shard, dp_replicate, pp. Ranks that communicate most
are neighbours and stay within a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workloads.layouts.job import V_SCHEDULES
from workloads.layouts.rules import DEGREES
from workloads.models.flops import attended_length
from workloads.models.model import Model

Checkpointing = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
# The backward pass is computed first for inputs and then for weights.
SPLIT_BACKWARD_SCHEDULES = ("zero_bubble", *V_SCHEDULES)
ContextMethod = Literal["allgather", "ring"]
State = Literal["fp32", "bf16"]
BlockKind = Literal["pytorch", "manual"]


@dataclass(frozen=True)
class Layout:
    """The division of the model and the batch over ranks. The degrees have torchtitan's names.

    Attributes:
        dp_replicate, dp_shard: data parallel: whole copies of the model, and FSDP within each copy.
        tp: tensor parallel, with sequence parallel.
        cp: context parallel: each rank has a part of the sequence.
        pp: pipeline parallel ranks, each with `stages_per_rank` stages.
        micro_batch: sequences that a rank computes at once.
        global_batch: sequences in a step, of all ranks together.
        reshard_after_forward: weights are gathered again for the backward pass, and gradients are reduce-scattered
            after each micro-batch. If False, both stay whole through a step.
        checkpointing_freq: one block in so many is checkpointed, as torchtitan's `selective_ac_option` counts them.
        cp_method: keys and values of all ranks are gathered before attention, or go around a ring beside it.
        async_tp: tensor parallel collectives run in parts beside the matrix products.
        cuda_graph: the passes of a step are recorded once and replayed.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    stages_per_rank: int = 1
    schedule: Schedule = "1f1b"
    micro_batch: int = 1
    global_batch: int = 1
    checkpointing: Checkpointing = "none"
    checkpointing_freq: int = 1
    reshard_after_forward: bool = True
    cp_method: ContextMethod = "allgather"
    async_tp: bool = False
    cuda_graph: bool = False

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """The data parallel degree: the number of rank groups that train on different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks share the weights of a copy of the model."""
        return self.dp_shard * self.cp > 1

    @property
    def microbatches(self) -> int:
        """The micro-batches that a rank computes in a step: gradient accumulation, or what fills a pipeline."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def total_stages(self) -> int:
        return self.pp * self.stages_per_rank

    def checkpointing_of(self, block: int) -> Checkpointing:
        """Return the checkpointing of a block of the model, the first one being 0."""
        return self.checkpointing if (block + 1) % self.checkpointing_freq == 0 else "none"

    def __str__(self) -> str:
        """Describe the layout, such as `dp_shard 4 x tp 2, micro-batch 2 x 8`."""
        degrees = [f"{name} {getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1]
        ring = " (ring)" if self.cp_method == "ring" else ""
        pipeline = f" ({self.schedule}, {self.total_stages} stages)" if self.pp > 1 else ""
        batch = f"micro-batch {self.micro_batch} x {self.microbatches}"
        checkpointing = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        if self.checkpointing_freq > 1:
            checkpointing += f" of one block in {self.checkpointing_freq}"
        gathered = "" if self.reshard_after_forward else ", weights stay gathered"
        others = (", async tp" if self.async_tp else "") + (", CUDA graph" if self.cuda_graph else "")
        return f"{' x '.join(degrees) or 'one rank'}{ring}{pipeline}, {batch}{checkpointing}{gathered}{others}"


@dataclass(frozen=True)
class Setting:
    """The model, its training and the ranks that a layout is checked against.

    Attributes:
        dtype: data type or recipe of the matrix products.
        state: data type of weights, gradients and optimizer states between steps. With fp32 FSDP gathers weights in
            the data type of the products, and gradients are reduced and accumulated in fp32.
        block: the backward pass of blocks is PyTorch's, or this project's own.
    """

    shape: Model
    sequence_length: int
    world_size: int
    ranks_per_node: int
    tp_across_nodes: bool = False
    compiled: bool = False
    dtype: str = "bf16"
    state: State = "fp32"
    block: BlockKind = "pytorch"
    document_tokens: int = 0
    on_gpu: bool = True

    @property
    def attended_length(self) -> float:
        """The length of a sequence without documents whose attention costs as much."""
        return attended_length(self.sequence_length, self.document_tokens)


def uses_fsdp(layout: Layout, state: State) -> bool:
    """Return whether FSDP wraps the model.

    It does where gradients are averaged over several ranks, and with fp32 state on a single rank too: there it casts
    weights before a block and accumulates gradients in fp32, as in torchtitan, which always keeps its mesh
    (torchtitan/distributed/fsdp.py, resolve_fsdp_mesh).
    """
    return state == "fp32" or layout.dp * layout.cp > 1


def rank_stages(layout: Layout, pp_rank: int) -> list[int]:
    """Return the indices of the stages that a pipeline rank has, in ascending order."""
    if layout.schedule in V_SCHEDULES:
        return [pp_rank, layout.total_stages - 1 - pp_rank]
    return list(range(pp_rank, layout.total_stages, layout.pp))
