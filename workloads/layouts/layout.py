"""A training job: a model, a layout and a trainer, as plain values.

Degrees have torchtitan's names. In rank numbers, the innermost degree varies fastest: tp, then cp, dp_shard,
dp_replicate, pp. The ranks that communicate most are therefore neighbors and stay within a node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from workloads.models.model import Model

T = TypeVar("T")
Sharding = Literal["none", "zero1", "zero2", "fsdp1", "fsdp2", "megatron_fsdp"]
TorchSchedule = Literal["1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]  # of torch.distributed.pipelining
Schedule = Literal[TorchSchedule, "v_half", "v_min"]
# The stages go from the first rank to the last and back, so each rank has two.
CONTROLLED_SCHEDULES = ("v_half", "v_min")  # these hold about a half and a third of 1F1B's activations
V_SCHEDULES = ("zbv", "dualpipev", *CONTROLLED_SCHEDULES)
SPLIT_SCHEDULES = ("zero_bubble", *V_SCHEDULES)  # these compute input gradients and weight gradients separately
Checkpointing = Literal["none", "per_op", "selective_up", "selective", "core_attention", "norm_act", "full"]
State = Literal["fp32", "amp", "bf16", "int8"]
TensorOverlap = Literal["none", "async"]
ContextMethod = Literal["allgather", "ring"]
AttentionKernel = Literal["flash2", "flash3", "cudnn", "cudnn_fp8", "unfused"]
Dispatcher = Literal["alltoall", "deepep", "allgather"]
ExpertLoads = Literal["equal", "unequal", "natural"]
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
LESS_LAYERS = ("first_stage_less_layers", "last_stage_less_layers")


@dataclass(frozen=True)
class Layout:
    """The division of a model and a batch over ranks, each with one GPU."""

    # dp_replicate, dp_shard (data parallelism): replicas of the model, and ranks that share one replica's states.
    dp_replicate: int = 1
    dp_shard: int = 1
    # tp, cp, pp: the degrees of tensor, context and pipeline parallelism.
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1  # expert parallelism; it reuses ranks of the other degrees, so `gpus` does not include it
    stages_per_rank: int = 1  # pipeline stages per rank; above 1 for interleaved and V schedules
    schedule: Schedule = "1f1b"
    micro_batch: int = 1  # sequences that a data-parallel rank computes at once
    global_batch: int = 1  # sequences per step over all ranks
    # Which states `dp_shard` divides: none (DDP), the optimizer's (zero1), also gradients (zero2), or all.
    sharding: Sharding = "fsdp2"
    # If True, weights are gathered again for the backward pass (if `sharding` divides them), and gradients are
    # reduce-scattered after each micro-batch. If False, both stay unsharded throughout a step, except gradients of this
    # project's blocks with a manual backward pass outside pipelines.
    reshard_after_forward: bool = True
    sequence_parallel: bool = True  # tensor-parallel ranks divide the sequence outside attention and MLP
    tp_overlap: TensorOverlap = "none"  # `async` splits tensor-parallel collectives and overlaps them with the GEMMs
    # Whether keys and values of all ranks are gathered before attention or move around a ring during attention.
    cp_method: ContextMethod = "allgather"
    offload_optimizer: bool = False  # the optimizer's states and step are on the host
    # What the backward pass recomputes. `per_op` is torchtitan's selective mode, `selective` is this project's mode,
    # which recomputes gate and up (`selective_up` only up), and `core_attention` is Megatron's mode; `norm_act`
    # recomputes norms and activations.
    checkpointing: Checkpointing = "none"
    # The number of checkpointed blocks; None for the blocks that `checkpointing_freq` selects.
    checkpointed_layers: int | None = None
    # How many layers fewer than the other stages the first and the last stage of a pipeline have, which also have the
    # embedding and the head, as torchtitan's `pipeline_parallel_last_stage_less_layers`.
    first_stage_less_layers: int = 0
    last_stage_less_layers: int = 0
    # Every Nth block is checkpointed, counted like torchtitan's `selective_ac_option`. Only this project's trainer has
    # this field and `cuda_graph`, which records the passes of a step once and replays them.
    checkpointing_freq: int = 1
    cuda_graph: bool = False

    @property
    def gpus(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """The number of groups of ranks that train on different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks share the weights of a copy of the model."""
        return self.dp_shard * self.cp > 1

    @property
    def microbatches(self) -> int:
        """The number of micro-batches that a rank computes per step, to accumulate gradients or to fill a pipeline."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def less_layers(self) -> tuple[int, int]:
        return self.first_stage_less_layers, self.last_stage_less_layers

    def checkpointing_of(self, block: int) -> Checkpointing:
        """Return the checkpointing of a block, given its number, counted from 0."""
        return self.checkpointing if (block + 1) % self.checkpointing_freq == 0 else "none"

    def count_checkpointed(self, layers: int) -> int:
        if self.checkpointed_layers is None:
            return layers if self.checkpointing == "none" else layers // self.checkpointing_freq
        return min(layers, self.checkpointed_layers)

    def list_stages(self, pp_rank: int) -> list[int]:
        if self.schedule in V_SCHEDULES:
            return [pp_rank, self.stages - 1 - pp_rank]
        return list(range(pp_rank, self.stages, self.pp))

    def uses_fsdp(self, state: State) -> bool:
        """Return whether FSDP wraps the model in this project's trainer.

        FSDP is used if gradients are averaged over several ranks, and also on a single rank with fp32 state: it then
        casts weights before a block and accumulates gradients in fp32. torchtitan does the same, because it always
        keeps its mesh (torchtitan/distributed/fsdp.py, resolve_fsdp_mesh).
        """
        return state == "fp32" or self.dp * self.cp > 1

    def __str__(self) -> str:
        degrees = [f"{name} {getattr(self, name)}" for name in (*DEGREES, "ep") if getattr(self, name) > 1]
        ring = " (ring)" if self.cp_method == "ring" else ""
        ends = zip(("first", "last"), self.less_layers, strict=True)
        less = "".join(f", {end} with {count} fewer" for end, count in ends if count)
        pipeline = f" ({self.schedule}, {self.stages} stages{less})" if self.pp > 1 else ""
        batch = f"micro-batch {self.micro_batch} x {self.microbatches}"
        checkpointing = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        if self.checkpointing_freq > 1:
            checkpointing += f" of one block in {self.checkpointing_freq}"
        gathered = "" if self.reshard_after_forward else ", weights stay gathered"
        others = (", async tp" if self.tp_overlap == "async" else "") + (", CUDA graph" if self.cuda_graph else "")
        return f"{' x '.join(degrees) or 'one rank'}{ring}{pipeline}, {batch}{checkpointing}{gathered}{others}"


# The fields of a layout that any trainer may have.
LAYOUT_FIELDS = tuple(item.name for item in fields(Layout) if item.name not in ("checkpointing_freq", "cuda_graph"))


@dataclass(frozen=True)
class Job:
    """A model and how a trainer trains it."""

    model: Model
    layout: Layout
    sequence_length: int
    trainer: str = "own"  # key of the planner's table of trainers; determines rules, memory and efficiency
    # The data type of GEMMs: bf16, fp16, or an fp8 or fp4 recipe such as `fp8_tensorwise`.
    precision: str = "bf16"
    bf16_blocks: int = 0  # blocks whose GEMMs stay in bf16, as the last blocks do in NVFP4's recipes
    # `fp32`: fp32 master weights, moments and gradient reduction; `amp`: fp32 weights that are cast for each use;
    # `bf16`: everything in bf16; `int8`: 8-bit moments.
    state: State = "fp32"
    low_precision_head: bool = False  # the output layer's GEMMs have the data type of those in blocks
    waits_for_launches: bool = False  # CUDA_LAUNCH_BLOCKING: the GPU waits for the host before each kernel
    compiled: bool = True  # blocks are compiled by torch.compile
    compiled_loss: bool = True  # the loss is compiled too, if the trainer supports it
    fused_loss: bool = False  # the gradient of the logits replaces the logits, as in Transformer Engine's cross entropy
    # Blocks use this project's own backward pass, which saves fewer tensors (`workloads.llama.block`).
    manual_backward: bool = False
    document_tokens: int = 0  # mean length of documents, to which attention is confined; 0 for whole sequences
    # Bytes per gradient in the reduction over data-parallel ranks; None for the trainer's default.
    gradient_bytes: int | None = None
    moment_bytes: int | None = None  # bytes of both moments of a weight; None for those of the state
    attention_kernel: AttentionKernel | Literal[""] = ""  # empty for the trainer's default
    # How tokens are sent to experts: `deepep` sends a token once per node, `alltoall` once per expert, and `allgather`
    # to all ranks, which scatter the sums of outputs.
    dispatcher: Dispatcher = "alltoall"
    expert_overlap: bool = False  # the all-to-all of one micro-batch overlaps with the computation of another
    fused_experts: bool = False  # the grouped GEMMs apply the activation and quantize (Transformer Engine's op fuser)
    expert_capacity: bool = False  # experts get a fixed number of tokens, so the host does not read their numbers
    # `equal`: forced balance; `unequal`: forced, so that they are known in advance; `natural`: the router's choice.
    expert_loads: ExpertLoads = "equal"
    expert_imbalance: float = 1.0  # the tokens of the busiest rank's experts, divided by the mean


def vary(item: T, **changes: Any) -> T:
    """Return a frozen dataclass with some values changed, in a tenth of the time of `dataclasses.replace`: without a
    check of the names, without `__post_init__`, and with all that the original has cached."""
    copy = object.__new__(type(item))
    copy.__dict__.update(item.__dict__, **changes)
    return copy


# A layout as `key=value` arguments of the command.
_ALWAYS_SHOWN = ("micro_batch", "checkpointing")
_SIZES = (*DEGREES[:-1], "ep", "pp", "schedule", "stages_per_rank", *LESS_LAYERS)
WORDS = (*_SIZES, "sharding", *_ALWAYS_SHOWN, "reshard_after_forward")


def layout_words(layout: Layout) -> dict[str, str]:
    return {name: str(getattr(layout, name)).lower() for name in WORDS}


def describe(layout: Layout) -> str:
    """Describe the layout in one line, omitting fields that have their usual values."""
    words, usual = layout_words(layout).items(), {("sharding", "none"), *layout_words(Layout()).items()}
    unusual: dict[str, object] = {name: v for name, v in words if name in _ALWAYS_SHOWN or (name, v) not in usual}
    if layout.checkpointed_layers is not None:
        unusual["checkpointed_layers"] = layout.checkpointed_layers
    return write_words(unusual)


def write_words(values: Mapping[str, object]) -> str:
    texts = {name: ",".join(map(str, v)) if isinstance(v, tuple) else str(v).lower() for name, v in values.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items())
