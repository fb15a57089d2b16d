"""What torchtitan 0.2.2 can express, and its names for it."""

from __future__ import annotations

import math
from dataclasses import replace

from workloads.formats.rendering import Support
from workloads.formats.torchtitan_models import find_flavor
from workloads.layouts.job import Job, TrainingLayout
from workloads.layouts.offers import RUNS

# torch.distributed.pipelining.schedules.get_schedule_class, which torchtitan asks.
SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
V_SCHEDULES = ("zbv", "dualpipev")  # two stages a rank, no other number
ROTATE_METHODS = {"allgather": "allgather", "ring": "alltoall"}
RECIPES = {"fp8_rowwise": "rowwise", "fp8_rowwise_gw_hp": "rowwise_with_gw_hp"}
FP8, MXFP8 = "quantize.linear.float8", "quantize.linear.mx"
PRECISIONS = ("bf16", "fp32", "fp8_tensorwise", *RECIPES, "mxfp8")


def find_layers_per_stage(layers: int, layout: TrainingLayout) -> dict[str, int] | None:
    """Return the settings that give the number of stages; None if no settings do.

    torchtitan divides the layers, with the embedding and the head counted as `less_layers`, by `layers_per_stage` and
    rounds up (`pipeline_llm`).
    """
    stages = layout.pp * layout.stages_per_rank
    for less in (1, 0):
        per_stage = math.ceil((layers + 2 * less) / stages)
        if math.ceil((layers + 2 * less) / per_stage) == stages:
            ends = {f"pipeline_parallel_{end}_stage_less_layers": less for end in ("first", "last")}
            return {"pipeline_parallel_layers_per_stage": per_stage} | ends
    return None


def find_interval(job: Job) -> int | None:
    """Return n where checkpointing every n-th layer gives the number of checkpointed layers; None if no n does."""
    layers = job.model.layers
    return next((n for n in range(1, layers + 1) if layers // n == job.layout.checkpointed_layers), None)


def _check_mixed_precision(job: Job) -> str:
    """torchtitan/distributed/utils.py, `maybe_enable_amp`: without FSDP, tp and pp switch mixed precision off."""
    layout = job.layout
    if job.state != "amp" or layout.tp * layout.pp == 1:
        return ""
    return "tp and pp compute in fp32 where nothing is sharded. Set dp_shard or cp above 1, or state=bf16"


def _check_states(job: Job) -> str:
    if job.precision == "fp32" and job.state != "fp32":
        return f"precision=fp32 needs state=fp32, not {job.state}"
    return ""


def _check_sharding(job: Job) -> str:
    """torchtitan/models/llama3/infra/parallelize.py: FSDP2 over dp_shard and cp, or DDP alone."""
    layout = job.layout
    is_sharded = layout.dp_shard * layout.cp > 1
    if is_sharded and layout.sharding != "fsdp2":
        return f"sharding={layout.sharding} cannot be written where dp_shard or cp is above 1. Supported: fsdp2"
    if not is_sharded and layout.dp_replicate > 1 and layout.tp * layout.pp > 1:
        return "dp_replicate without dp_shard or cp is DDP, which torchtitan does not combine with tp or pp"
    return ""


def _check_tp(job: Job) -> str:
    layout = job.layout
    if layout.tp > 1 and not layout.sequence_parallel:
        return "sequence_parallel=false cannot be written: its tensor parallelism divides the sequence"
    if layout.tp_overlap == "async" and not job.compiled:
        return "tp_overlap=async needs compiled=true"
    return ""


def _check_pipeline(job: Job) -> str:
    layout = job.layout
    if layout.pp == 1:
        return ""
    if find_flavor(job.model)[0] == "qwen3":
        return "pp above 1 cannot be written: qwen3 has no pipeline in version 0.2.2"
    if (layout.schedule == "1f1b") != (layout.stages_per_rank == 1):
        return f"schedule={layout.schedule} does not run with stages_per_rank={layout.stages_per_rank}"
    if layout.schedule in V_SCHEDULES and layout.stages_per_rank != 2:
        return f"schedule={layout.schedule} needs stages_per_rank=2, not {layout.stages_per_rank}"
    if find_layers_per_stage(job.model.layers, layout) is None:
        stages = layout.pp * layout.stages_per_rank
        return f"stages_per_rank={layout.stages_per_rank}: no number of layers a stage gives {stages} stages"
    return ""


def _check_checkpointed_layers(job: Job) -> str:
    layout = job.layout
    if layout.checkpointed_layers is None:
        return ""
    if layout.checkpointing != "full" or layout.pp > 1 or find_interval(job) is None:
        return f"checkpointed_layers={layout.checkpointed_layers} cannot be written: every n-th layer without pp can"
    return ""


def _check_experts(job: Job) -> str:
    layout = job.layout
    if layout.ep == 1:
        return ""
    if not job.model.experts:
        return "ep above 1 needs a model with experts"
    group = layout.dp_shard * layout.cp * layout.tp
    return f"ep={layout.ep} does not divide dp_shard x cp x tp = {group}" if group % layout.ep else ""


SUPPORT = Support(
    "torchtitan",
    {
        **RUNS["torchtitan"],
        "precision": PRECISIONS,
        "state": ("fp32", "amp", "bf16"),
        "offload_optimizer": (False,),
        "document_tokens": (0,),  # documents are those of the data
    },
    (
        _check_states,
        _check_sharding,
        _check_mixed_precision,
        _check_tp,
        _check_pipeline,
        _check_checkpointed_layers,
        _check_experts,
    ),
)


def canonical_state(job: Job) -> Job:
    """Return the job with its state as torchtitan has it: FSDP keeps fp32 weights, without it autocast casts them."""
    is_sharded = job.layout.dp_shard * job.layout.cp > 1
    if job.state not in ("fp32", "amp") or job.precision == "fp32":
        return job
    return replace(job, state="fp32" if is_sharded else "amp")
