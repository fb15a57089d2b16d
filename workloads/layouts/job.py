"""A training job: a model, a layout and a trainer, as plain values.

Degrees have the names of `workloads.parallel.layout.Layout`, which are torchtitan's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from workloads.models.model import Model

Sharding = Literal["none", "zero1", "zero2", "fsdp1", "fsdp2", "megatron_fsdp"]
Schedule = Literal["1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
V_SCHEDULES = ("zbv", "dualpipev")  # the stages go from the first rank to the last and back, so a rank has two of them
Checkpointing = Literal["none", "per_op", "selective", "core_attention", "norm_act", "full"]
State = Literal["fp32", "amp", "bf16", "int8"]
TensorOverlap = Literal["none", "async"]
ContextMethod = Literal["allgather", "ring"]
AttentionKernel = Literal["flash2", "flash3", "cudnn", "unfused"]
Dispatcher = Literal["alltoall", "deepep"]


@dataclass(frozen=True)
class TrainingLayout:
    """The division of a model and a batch over GPUs.

    Attributes:
        dp_replicate, dp_shard: data parallel: copies of the model, and GPUs that share one copy's states.
        tp, cp, pp: tensor, context and pipeline parallel.
        ep: expert parallel; its GPUs are some of those of the other degrees, so it does not enter `gpus`.
        stages_per_rank: pipeline stages of a GPU; above 1 for interleaved and V schedules.
        layers_per_stage: of each pipeline stage, the first one first; None to divide them evenly.
        micro_batch: sequences that a data parallel rank computes at once.
        global_batch: sequences in a step, of all GPUs together.
        sharding: which states `dp_shard` divides: none (DDP), the optimizer's (zero1), gradients too (zero2), all.
        reshard_after_forward: weights are gathered again for the backward pass (only where `sharding` divides them).
        sequence_parallel: tensor parallel ranks divide the sequence outside attention and MLP.
        tp_overlap: `async` computes while tensor parallel collectives run.
        offload_optimizer: the optimizer's states and step are on the host.
        checkpointing: what the backward pass computes again. `per_op` is torchtitan's selective mode, `selective` this
            project's, `core_attention` Megatron's selective mode, `norm_act` norms and activations.
        checkpointed_layers: blocks that are checkpointed; None for all.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    stages_per_rank: int = 1
    schedule: Schedule = "1f1b"
    micro_batch: int = 1
    global_batch: int = 1
    sharding: Sharding = "fsdp2"
    reshard_after_forward: bool = True
    sequence_parallel: bool = True
    tp_overlap: TensorOverlap = "none"
    cp_method: ContextMethod = "allgather"
    offload_optimizer: bool = False
    checkpointing: Checkpointing = "none"
    checkpointed_layers: int | None = None
    layers_per_stage: tuple[int, ...] | None = None

    @property
    def gpus(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """The number of groups of GPUs that train on different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def microbatches(self) -> int:
        """The micro-batches that a GPU computes in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def changes_from(self, other: TrainingLayout) -> dict[str, tuple[object, object]]:
        """Return the fields in which two layouts differ, with the value of each."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class Job:
    """What a trainer trains, and how.

    Attributes:
        trainer: whose rules, memory and efficiency apply: a key of the planner's table of trainers.
        precision: the data type of matrix products: bf16, fp16 or an fp8 or fp4 recipe such as `fp8_tensorwise`.
        state: `fp32`: fp32 master weights, moments and gradients' reduction; `amp`: fp32 weights that are cast for each
            use; `bf16`: all in bf16; `int8`: 8-bit moments.
        compiled: blocks are compiled by torch.compile.
        manual_backward: blocks have this project's own backward pass, which saves less (`workloads.llama.block`).
        document_tokens: mean length of a document that attention does not leave; 0 for whole sequences.
        gradient_bytes: of a gradient in its reduction over data parallel ranks; None for the trainer's own.
        attention_kernel: the kernel of attention; empty for the trainer's own.
        dispatcher: how tokens go to experts: `deepep` sends a token once to each node, `alltoall` once to each expert.
        expert_overlap: all-to-all of one micro-batch runs beside the computation of another.
        expert_imbalance: tokens of the busiest rank's experts, divided by the mean.
    """

    model: Model
    layout: TrainingLayout
    sequence_length: int
    trainer: str = "own"
    precision: str = "bf16"
    state: State = "fp32"
    compiled: bool = True
    manual_backward: bool = False
    document_tokens: int = 0
    gradient_bytes: int | None = None
    attention_kernel: AttentionKernel | Literal[""] = ""
    dispatcher: Dispatcher = "alltoall"
    expert_overlap: bool = False
    expert_imbalance: float = 1.0
