"""Megatron-Bridge's recipe with overrides: what NeMo trains large models with since NeMo 2."""

from __future__ import annotations

import shlex
from typing import Any

from workloads.api.errors import UserInputError
from workloads.formats.megatron import parse_value, read_gpus
from workloads.formats.megatron_reading import read_settings
from workloads.formats.megatron_rules import support
from workloads.formats.megatron_settings import FP8_RECIPES, Settings, build_settings
from workloads.formats.rendering import FileReading, RenderedFile, shell_script, torchrun
from workloads.layouts.job import Job

NAME = "megatron_bridge.sh"
RECIPE = "llama3_8b_pretrain_config"  # the sizes are overridden: any recipe of a Llama is a start
# megatron/bridge/training/mixed_precision.py: registered names.
MIXED_PRECISION = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8_te_delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_te_current": "bf16_with_fp8_current_scaling_mixed",
    "fp8_te_blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
# The section of ConfigContainer, and the name there where it is another one. Others are of `model`.
SECTIONS = {
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
    "num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
    "use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "data_parallel_sharding_strategy": "ddp.data_parallel_sharding_strategy",
    "ckpt_format": "checkpoint.ckpt_format",
    "optimizer_cpu_offload": "optimizer.optimizer_cpu_offload",
    "use_precision_aware_optimizer": "optimizer.use_precision_aware_optimizer",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "num_experts": "model.num_moe_experts",
}
# Megatron-LM's arguments that Megatron-Bridge derives, or that its Llama recipe has set.
DERIVED = (
    "swiglu",
    "normalization",
    "group_query_attention",
    "untie_embeddings_and_output_weights",
    "max_position_embeddings",
    "bf16",
    "fp16",
    "fp8",
    "fp8_recipe",
)
RUN = {"train.train_iters": 20, "train.eval_iters": 0, "logger.log_interval": 1, "checkpoint.save": None}
# What the recipe sets, and a layout may not have.
RECIPE_SETS = {
    "ddp.use_distributed_optimizer": False,
    "ddp.overlap_grad_reduce": False,
    "ddp.overlap_param_gather": False,
    "model.sequence_parallel": False,
}


def _check_recipe(job: Job) -> str:
    model = job.model
    others = {"activation": model.activation != "swiglu", "positions": model.positions != "rope"}
    others["mlp_bias"] = model.mlp_bias
    if name := next((name for name, is_other in others.items() if is_other), ""):
        return f"the model's {name}={getattr(model, name)} cannot be written: the recipe is of a Llama"
    if job.layout.tp_overlap == "async":
        return "tp_overlap=async cannot be written: its buffers are set in a recipe of one's own"
    return ""


_MEGATRON = support("nemo", "nemo (Megatron-Bridge)")
SUPPORT = type(_MEGATRON)(
    _MEGATRON.trainer,
    {**_MEGATRON.values, "precision": tuple(MIXED_PRECISION)},
    (*_MEGATRON.rules, _check_recipe),
)


def render(job: Job, gpus: int) -> RenderedFile:
    """Return the script of a canonical job.

    Raises:
        UserInputError: Megatron-Bridge's recipe cannot express it.
    """
    SUPPORT.check(job)
    overrides = [shlex.quote(f"{name}={_show(value)}") for name, value in build_overrides(job).items()]
    words = [*torchrun(gpus), "scripts/training/run_recipe.py", f"--recipe={RECIPE}", *overrides]
    text = shell_script(words, "Megatron-Bridge 0.3.1: run in its folder", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    note = "the recipe reads the configuration of meta-llama/Meta-Llama-3-8B from the Hugging Face hub"
    return RenderedFile(NAME, text, f"sh {NAME}", ("run it in the folder of Megatron-Bridge", note))


def build_overrides(job: Job) -> dict[str, Any]:
    """Return the overrides of `ConfigContainer`, by section and field."""
    settings = build_settings(job)
    vocabulary = settings.pop("vocab_size") + 1
    overrides: dict[str, Any] = dict(RECIPE_SETS)
    for name, value in settings.items():
        if name not in DERIVED:
            overrides[SECTIONS.get(name, f"model.{name}")] = value
    overrides["model.num_query_groups"] = job.model.kv_heads
    overrides["model.vocab_size"] = vocabulary
    overrides["tokenizer.vocab_size"] = vocabulary - 1  # NullTokenizer adds a token
    overrides["model.share_embeddings_and_output_weights"] = job.model.tied
    overrides["dataset.seq_length"] = job.sequence_length
    overrides["mixed_precision"] = MIXED_PRECISION[job.precision]
    return overrides | RUN


def recognises(text: str) -> bool:
    """Return whether a text is a command with a recipe of Megatron-Bridge."""
    return "run_recipe.py" in text


def read(text: str, gpus: int | None = None) -> FileReading:
    """Return what a command with a recipe says. What the recipe sets itself is not known here.

    Raises:
        UserInputError: a value that no job has, or the number of GPUs is missing.
    """
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    pairs = [word.partition("=") for word in words if "=" in word and not word.startswith("-")]
    overrides = {name: parse_value(value) for name, _, value in pairs}
    return read_settings(to_settings(overrides), "nemo", read_gpus(text) or gpus)


def to_settings(overrides: dict[str, Any]) -> Settings:
    """Return overrides as Megatron-LM's settings.

    Raises:
        UserInputError: the mixed precision is not known.
    """
    names = {theirs: ours for ours, theirs in SECTIONS.items()}
    settings = {names.get(name, name.rpartition(".")[2]): value for name, value in overrides.items()}
    settings |= {"swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope"}
    settings["group_query_attention"] = "num_query_groups" in settings
    settings["untie_embeddings_and_output_weights"] = not settings.get("share_embeddings_and_output_weights", False)
    if isinstance(vocabulary := overrides.get("model.vocab_size"), int):
        settings["vocab_size"] = vocabulary - 1
    return settings | _read_precision(str(overrides.get("mixed_precision", "bf16_mixed")))


def _read_precision(mixed: str) -> Settings:
    ours = next((name for name, theirs in MIXED_PRECISION.items() if theirs == mixed), None)
    if ours is None:
        raise UserInputError(f"mixed_precision={mixed}: not known. Known: {', '.join(MIXED_PRECISION.values())}")
    number_format, recipe = FP8_RECIPES.get(ours, (None, None))
    return {"bf16": ours != "fp16", "fp16": ours == "fp16", "fp8": number_format, "fp8_recipe": recipe}


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
