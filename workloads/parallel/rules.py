"""The rules that make a layout valid for this project's trainer. No torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from workloads.estimator.precisions import find_precision
from workloads.layouts.job import V_SCHEDULES
from workloads.layouts.rules import DEGREES, Violation
from workloads.parallel.layout import SPLIT_BACKWARD_SCHEDULES, Layout, Setting, uses_fsdp

TORCH_VERSION = tuple(int(part) for part in version("torch").split(".")[:2])


def find_violation(layout: Layout, setting: Setting) -> Violation | None:
    """Return the first rule that the layout breaks; None for a valid layout."""
    violations = (Violation(rule, reason) for rule, check in RULES.items() if (reason := check(layout, setting)))
    return next(violations, None)


def _check_world_size(layout: Layout, setting: Setting) -> str:
    if layout.world_size == setting.world_size:
        return ""
    degrees = " x ".join(f"{name} {getattr(layout, name)}" for name in DEGREES)
    return f"{degrees} = {layout.world_size} ranks, but there are {setting.world_size}"


def _check_tp(layout: Layout, setting: Setting) -> str:
    sizes = {
        "heads": setting.shape.heads,
        "key-value heads": setting.shape.kv_heads,
        "intermediate size": setting.shape.intermediate_size,
        "vocabulary": setting.shape.vocabulary,
        "sequence length on a rank": setting.sequence_length // layout.cp,
    }
    reasons = (f"tp {layout.tp} does not divide {size} {name}" for name, size in sizes.items() if size % layout.tp)
    return next(reasons, "")


def _check_tp_in_node(layout: Layout, setting: Setting) -> str:
    if layout.tp <= setting.ranks_per_node or setting.tp_across_nodes:
        return ""
    return f"tp {layout.tp} does not fit in a node of {setting.ranks_per_node}, and tp_across_nodes is false"


def _check_cp(layout: Layout, setting: Setting) -> str:
    parts = 2 * layout.cp  # each rank has one part from the front and one from the back, so that all do equal work
    if layout.cp == 1:
        return "" if layout.cp_method == "allgather" else "cp 1 divides no sequence: cp_method has to be allgather"
    if setting.sequence_length % parts == 0:
        return ""
    return f"cp {layout.cp} needs a sequence length divisible by {parts}, {setting.sequence_length} is not"


def _check_batch(layout: Layout, setting: Setting) -> str:
    if layout.global_batch % (layout.micro_batch * layout.dp) == 0:
        return ""
    product = f"micro-batch {layout.micro_batch} x data parallel {layout.dp}"
    return f"global batch {layout.global_batch} is not a multiple of {product}"


def _check_stages(layout: Layout, setting: Setting) -> str:
    if layout.total_stages > setting.shape.layers:
        return f"{layout.total_stages} stages, but the model has {setting.shape.layers} layers"
    if layout.pp == 1:
        is_default = layout.stages_per_rank == 1 and layout.schedule == "1f1b"
        return "" if is_default else "pp 1 is not a pipeline: it needs stages_per_rank 1 and schedule 1f1b"
    if (layout.schedule == "1f1b") != (layout.stages_per_rank == 1):
        needed = "1" if layout.schedule == "1f1b" else "above 1"
        return f"schedule {layout.schedule} needs stages_per_rank {needed}"
    if layout.schedule in V_SCHEDULES and layout.stages_per_rank != 2:
        return f"schedule {layout.schedule} needs stages_per_rank 2"
    return ""


def _check_microbatches(layout: Layout, setting: Setting) -> str:
    if layout.pp == 1:
        return ""
    if layout.microbatches < layout.pp:
        return f"{layout.microbatches} micro-batches do not fill a pipeline of {layout.pp} ranks"
    if layout.schedule == "dualpipev" and layout.microbatches < layout.total_stages:
        return f"schedule dualpipev needs {layout.total_stages} micro-batches, one for each stage"
    rounds = max(1, layout.microbatches // layout.pp)
    if layout.schedule in ("interleaved", "zero_bubble") and layout.microbatches % rounds:
        return f"schedule {layout.schedule} needs a multiple of {rounds} micro-batches, {layout.microbatches} is not"
    return ""


def _check_resharding(layout: Layout, setting: Setting) -> str:
    if layout.is_sharded or setting.state == "fp32" or layout.reshard_after_forward:
        return ""
    return "dp_shard 1 and cp 1 shard no weights in state bf16: reshard_after_forward has to be true"


def _check_checkpointing(layout: Layout, setting: Setting) -> str:
    if layout.checkpointing_freq == 1:
        return ""
    if layout.checkpointing == "none":
        return "checkpointing none recomputes no block: checkpointing_freq has to be 1"
    if layout.checkpointing_freq > setting.shape.layers:
        return f"checkpointing_freq {layout.checkpointing_freq} recomputes none of {setting.shape.layers} blocks"
    return ""


def _check_split_backward(layout: Layout, setting: Setting) -> str:
    """Check what PyTorch needs to split a backward pass, first for inputs and then for weights."""
    schedule = layout.schedule
    if schedule not in SPLIT_BACKWARD_SCHEDULES:
        return ""
    if TORCH_VERSION < (2, 13):
        installed = ".".join(map(str, TORCH_VERSION))
        return f"{schedule} does not split this loss's backward pass before torch 2.13, this is {installed}"
    if setting.compiled:
        return f"{schedule} splits the backward pass, which a compiled block does not support: compile has to be false"
    if layout.checkpointing == "selective":
        return f"{schedule} goes through a block twice, which selective checkpointing does not support"
    if uses_fsdp(layout, setting.state) and layout.reshard_after_forward:
        needed = "" if layout.is_sharded or setting.state == "fp32" else ", with dp_shard above 1"
        return (
            f"{schedule} computes wrong gradients where weights are gathered again: reshard_after_forward has to be "
            f"false{needed}"
        )
    return ""


def _check_tied_head(layout: Layout, setting: Setting) -> str:
    if setting.shape.tied and layout.pp > 1:
        return "the model's head is its embedding: both have to be in one stage, so pp has to be 1"
    return ""


def _check_low_precision(layout: Layout, setting: Setting) -> str:
    """Check what torchao's layers support: tokens and sizes on a rank, and tensor parallelism in fp8 alone."""
    if setting.dtype in ("bf16", "fp32"):
        return ""
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        return f"{layout.schedule} splits the backward pass, which a layer in {setting.dtype} does not support"
    if layout.tp > 1 and not setting.dtype.startswith("fp8"):
        return f"dtype {setting.dtype} has no tensor parallel layers here: tp has to be 1"
    multiple = find_precision(setting.dtype).multiple
    tokens = layout.micro_batch * setting.sequence_length // layout.cp
    if tokens % multiple:
        return f"{setting.dtype} needs tokens in multiples of {multiple}, a micro-batch leaves {tokens} on a rank"
    sizes_on_rank = {
        "hidden size": setting.shape.hidden_size,
        "heads": setting.shape.heads * setting.shape.head_size // layout.tp,
        "keys and values": 2 * setting.shape.kv_heads * setting.shape.head_size // layout.tp,
        "intermediate size": setting.shape.intermediate_size // layout.tp,
    }
    reasons = (
        f"{setting.dtype} needs sizes in multiples of {multiple}, tp {layout.tp} leaves {size} of {name}"
        for name, size in sizes_on_rank.items()
        if size % multiple
    )
    return next(reasons, "")


def _check_async_tp(layout: Layout, setting: Setting) -> str:
    """Check what PyTorch's asynchronous tensor parallelism needs."""
    if not layout.async_tp:
        return ""
    if layout.tp == 1:
        return "tp 1 has no collectives: async_tp has to be false"
    if not setting.compiled:
        return "async_tp is a pass of the compiler: compile has to be true"
    if not setting.on_gpu:
        return "async_tp copies between the memories of GPUs: on a CPU it has to be false"
    if layout.tp > setting.ranks_per_node:
        return f"async_tp maps the memory of GPUs of one node: tp {layout.tp} does not fit in {setting.ranks_per_node}"
    return ""


def _check_cuda_graph(layout: Layout, setting: Setting) -> str:
    """Check that a recording holds: it has no collectives, and nothing of FSDP, which allocates weights anew."""
    if not layout.cuda_graph:
        return ""
    if not setting.on_gpu:
        return "cuda_graph records the launches of a GPU: on a CPU it has to be false"
    if layout.world_size > 1:
        return f"cuda_graph has no collectives: it needs one rank, these are {layout.world_size}"
    if uses_fsdp(layout, setting.state):
        return "cuda_graph does not record FSDP, which casts fp32 weights: state has to be bf16"
    return ""


def _check_documents(layout: Layout, setting: Setting) -> str:
    """Check what attention within documents supports."""
    if not setting.document_tokens:
        return ""
    if layout.cp > 1:
        return "document_tokens needs whole sequences: cp has to be 1"
    if setting.block == "manual":
        return "block manual attends to whole sequences: document_tokens needs block pytorch"
    if setting.on_gpu and TORCH_VERSION < (2, 13):
        installed = ".".join(map(str, TORCH_VERSION))
        return f"document_tokens needs the varlen_attn of torch 2.13, this is {installed}"
    if setting.on_gpu and setting.dtype == "fp32":
        return "document_tokens needs half precision on a GPU: dtype has to be bf16 or lower"
    return ""


def _check_state(layout: Layout, setting: Setting) -> str:
    if setting.state == "bf16" and setting.dtype == "fp32":
        return "state bf16 keeps weights in bf16, and dtype fp32 multiplies fp32 ones: state has to be fp32"
    return ""


def _check_block(layout: Layout, setting: Setting) -> str:
    """Check that a rank has whole weights and whole sequences, which the manual backward pass is written for."""
    if setting.block != "manual":
        return ""
    if layout.tp * layout.cp > 1:
        return f"block manual has whole weights and sequences: tp {layout.tp} and cp {layout.cp} have to be 1"
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        return f"{layout.schedule} splits the backward pass, and that of block manual is one: block has to be pytorch"
    if setting.dtype not in ("bf16", "fp32"):
        return f"block manual has no layers of torchao: dtype {setting.dtype} needs block pytorch"
    return ""


RULES: dict[str, Callable[[Layout, Setting], str]] = {
    "the degrees multiply to the number of ranks": _check_world_size,
    "tp divides heads, sizes and sequence": _check_tp,
    "tp stays within a node": _check_tp_in_node,
    "cp divides the sequence": _check_cp,
    "micro-batches divide the global batch": _check_batch,
    "stages and schedule agree": _check_stages,
    "micro-batches fill the pipeline": _check_microbatches,
    "only sharded weights stay gathered": _check_resharding,
    "checkpointing_freq selects blocks": _check_checkpointing,
    "a split backward pass is supported": _check_split_backward,
    "a tied head shares a stage with the embedding": _check_tied_head,
    "fp8 is supported": _check_low_precision,
    "asynchronous tensor parallel is supported": _check_async_tp,
    "a CUDA graph is supported": _check_cuda_graph,
    "document masks are supported": _check_documents,
    "state and products agree": _check_state,
    "the manual block is supported": _check_block,
}
