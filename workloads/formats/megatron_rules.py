"""What Megatron-LM and the programs on it can express."""

from __future__ import annotations

from collections.abc import Callable

from workloads.formats.megatron_settings import FP8_RECIPES
from workloads.formats.rendering import Support
from workloads.layouts.job import Job
from workloads.layouts.offers import RUNS

MODEL_VALUES: dict[str, tuple[object, ...]] = {
    "activation": ("swiglu", "gelu", "squared_relu"),
    "positions": ("rope", "learned", "none"),
    "window": (0,),
}


def _check_model(job: Job) -> str:
    model = job.model
    for name, values in MODEL_VALUES.items():
        if getattr(model, name) not in values:
            supported = ", ".join(map(str, values))
            return f"the model's {name}={getattr(model, name)} cannot be written. Supported: {supported}"
    if model.mlp_bias and not model.qkv_bias:
        return "mlp_bias=true cannot be written without qkv_bias=true: biases are of the projections alone, or of all"
    if model.experts and model.dense_layers and not model.intermediate_size:
        return "dense_layers needs intermediate_size"
    if model.positions == "learned" and model.max_positions < job.sequence_length:
        return f"sequence_length={job.sequence_length} is above the model's {model.max_positions} learned positions"
    return ""


def _check_sharding(job: Job) -> str:
    """megatron/training/arguments.py, `validate_args`."""
    layout = job.layout
    if layout.sharding == "fsdp2":
        reasons = {
            "pp": layout.pp > 1,
            "ep": layout.ep > 1,
            "dp_replicate": layout.dp_replicate > 1,
            "a tied head": job.model.tied,
            "precision=fp16": job.precision == "fp16",
        }
        name = next((name for name, is_set in reasons.items() if is_set), "")
        return f"sharding=fsdp2 does not run with {name}" if name else ""
    if layout.sharding != "none" and not layout.reshard_after_forward:
        return f"reshard_after_forward=false cannot be written with sharding={layout.sharding}"
    if layout.sharding == "none" and layout.offload_optimizer:
        return "offload_optimizer=true needs the distributed optimizer: set dp_shard above 1 and sharding=zero1"
    return ""


def _check_pipeline(job: Job) -> str:
    layout, layers = job.layout, job.model.layers
    if (layout.schedule == "1f1b") != (layout.stages_per_rank == 1) and layout.schedule in ("1f1b", "interleaved"):
        return f"schedule={layout.schedule} does not run with stages_per_rank={layout.stages_per_rank}"
    stages = layout.pp * layout.stages_per_rank
    if layers % stages and (layers + 2) % stages:
        divided = f"{stages} stages (pp x stages_per_rank)"
        return f"{layers} layers do not divide into {divided}, nor do they with embedding and head"
    if layout.schedule == "interleaved" and layout.microbatches % layout.pp:
        return f"schedule=interleaved needs a multiple of {layout.pp} micro-batches, {layout.microbatches} is not"
    return ""


def _check_tp(job: Job) -> str:
    layout = job.layout
    if layout.tp_overlap == "async" and not layout.sequence_parallel:
        return "tp_overlap=async needs sequence_parallel=true"
    if layout.cp > 1 and job.sequence_length % (2 * layout.cp):
        return f"cp={layout.cp} needs a sequence length divisible by {2 * layout.cp}"
    if job.model.experts and layout.tp > 1 and not layout.sequence_parallel:
        return "tp with experts needs sequence_parallel=true"
    return ""


def _check_experts(job: Job) -> str:
    layout, experts = job.layout, job.model.experts
    if layout.ep == 1:
        return ""
    if not experts or experts % layout.ep:
        return f"ep={layout.ep} does not divide the {experts} experts"
    group = layout.dp_shard * layout.cp * layout.tp
    return f"ep={layout.ep} does not divide dp_shard x cp x tp = {group}" if group % layout.ep else ""


def _check_checkpointing(job: Job) -> str:
    layout = job.layout
    stages = layout.pp * layout.stages_per_rank
    if layout.checkpointing == "norm_act" and not job.model.experts:
        return "checkpointing=norm_act cannot be written for a dense model: activations are recomputed in experts only"
    if layout.checkpointed_layers is None:
        return ""
    if layout.checkpointing != "full" or layout.checkpointed_layers % stages or not layout.checkpointed_layers:
        how = f"full checkpointing of as many in each of {stages} stages can"
        return f"checkpointed_layers={layout.checkpointed_layers} cannot be written: {how}"
    return ""


RULES = (_check_model, _check_sharding, _check_pipeline, _check_tp, _check_experts, _check_checkpointing)


def support(trainer: str, name: str = "", rules: tuple[Callable[[Job], str], ...] = ()) -> Support:
    """Return what a program that is built on Megatron-LM can express, with rules of its own.

    Args:
        trainer: the planner's key of the program.
        name: of the program in messages; the key if empty.
    """
    values: dict[str, tuple[object, ...]] = {
        **RUNS[trainer],
        "precision": ("bf16", "fp16", "fp32", *FP8_RECIPES),
        "state": ("fp32",),
        "document_tokens": (0,),  # documents are those of the data
    }
    return Support(name or trainer, values, (*RULES, *rules))
