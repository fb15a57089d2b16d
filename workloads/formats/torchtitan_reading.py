"""A configuration of torchtitan 0.2.x as a layout: its TOML file, or the JSON that it logs."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workloads.api.errors import UserInputError, suggest
from workloads.formats.rendering import FileReading, canonical_layout, data_parallel_size
from workloads.formats.torchtitan_models import MASKED_SUFFIXES, read_flavor
from workloads.formats.torchtitan_rules import FP8, MXFP8, RECIPES, ROTATE_METHODS, SCHEDULES
from workloads.layouts.job import TrainingLayout


def read(text: str, gpus: int | None = None) -> FileReading:
    """Return what a TOML file of torchtitan says.

    Raises:
        UserInputError: it is not TOML, or has a value that no job has.
    """
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserInputError(f"not TOML: {error}") from error
    return read_config(config, gpus)


def recognises(text: str) -> bool:
    """Return whether a text is a TOML file of torchtitan."""
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return isinstance(config.get("training"), dict) and "model" in config


def read_config(config: Mapping[str, Any], gpus: int | None = None) -> FileReading:
    """Return what a configuration says, with torchtitan's defaults for what it leaves out.

    Raises:
        UserInputError: it has a value that no job has, or `gpus` is needed and missing.
    """
    training, parallelism = config.get("training", {}), config.get("parallelism", {})
    model_table = config.get("model", {})
    model = read_flavor(str(model_table.get("name", "llama3")), str(model_table.get("flavor", "debugmodel")))
    layout = _read_degrees(parallelism, gpus)
    layout = _read_batch(layout, training, parallelism)
    layout = replace(layout, **_read_stages(parallelism, layout, model.layers if model else None))
    layout = replace(layout, **_read_checkpointing(config.get("activation_checkpoint", {}), model))
    precision = _read_precision(config)
    dtype = training.get("dtype", "float32")
    is_cast = layout.dp_shard * layout.cp == 1 and precision != "fp32"
    return FileReading(
        trainer="torchtitan",
        layout=canonical_layout(layout, model.layers if model else None),
        sequence_length=int(training.get("seq_len", 2048)),
        model=model,
        precision=precision,
        state="bf16" if dtype == "bfloat16" else "amp" if is_cast else "fp32",
        compiled=bool(config.get("compile", {}).get("enable", False)),
        notes=tuple(_find_notes(config, layout)),
    )


def _read_degrees(table: Mapping[str, Any], gpus: int | None) -> TrainingLayout:
    degrees: dict[str, Any] = {
        "dp_replicate": int(table.get("data_parallel_replicate_degree", 1)),
        "tp": int(table.get("tensor_parallel_degree", 1)),
        "cp": int(table.get("context_parallel_degree", 1)),
        "pp": int(table.get("pipeline_parallel_degree", 1)),
    }
    dp_shard = int(table.get("data_parallel_shard_degree", -1))
    if dp_shard == -1:  # the GPUs that the other degrees leave
        dp_shard = data_parallel_size(gpus, degrees)
    policy = table.get("fsdp_reshard_after_forward", "default")
    return TrainingLayout(
        **degrees,
        dp_shard=dp_shard,
        ep=int(table.get("expert_parallel_degree", 1)),
        sharding="fsdp2" if dp_shard * degrees["cp"] > 1 else "none",
        reshard_after_forward=policy == "always" or (policy == "default" and degrees["pp"] == 1),
        tp_overlap="async" if table.get("enable_async_tensor_parallel") else "none",
        cp_method=_look_up(ROTATE_METHODS, table, "context_parallel_rotate_method", "allgather"),
    )


def _read_batch(layout: TrainingLayout, training: Mapping[str, Any], parallelism: Mapping[str, Any]) -> TrainingLayout:
    local_batch = int(training.get("local_batch_size", 8))
    global_batch = int(training.get("global_batch_size", -1))
    micro_batch = int(parallelism.get("pipeline_parallel_microbatch_size", 1)) if layout.pp > 1 else local_batch
    global_batch = global_batch if global_batch > 0 else local_batch * layout.dp
    return replace(layout, micro_batch=micro_batch, global_batch=global_batch)


def _read_stages(table: Mapping[str, Any], layout: TrainingLayout, layers: int | None) -> dict[str, Any]:
    if layout.pp == 1:
        return {}
    schedule = _look_up(SCHEDULES, table, "pipeline_parallel_schedule", "1F1B")
    per_stage = table.get("pipeline_parallel_layers_per_stage")
    if per_stage is None or layers is None:
        return {"schedule": schedule, "stages_per_rank": 1 if schedule == "1f1b" else 2}
    ends = [table.get(f"pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last")]
    stages = math.ceil((layers + sum(ends)) / per_stage)
    return {"schedule": schedule, "stages_per_rank": stages // layout.pp}


def _read_checkpointing(table: Mapping[str, Any], model: Any) -> dict[str, Any]:
    mode, option = str(table.get("mode", "selective")), str(table.get("selective_ac_option", "2"))
    if mode != "selective":
        if mode not in ("none", "full"):
            raise UserInputError(f"activation_checkpoint.mode={mode}: no layout has it. Known: none, selective, full")
        return {"checkpointing": mode}
    if option == "op":
        return {"checkpointing": "per_op"}
    if not option.isdigit() or not int(option):
        raise UserInputError(f"activation_checkpoint.selective_ac_option={option}: has to be op or a number from 1")
    return {"checkpointing": "full", "checkpointed_layers": model.layers // int(option) if model else None}


def _read_precision(config: Mapping[str, Any]) -> str:
    converters = config.get("model", {}).get("converters", [])
    linear = config.get("quantize", {}).get("linear", {})
    if MXFP8 in converters or "mx" in converters:
        return "mxfp8"
    if FP8 in converters or "float8" in converters:
        recipe = linear.get("float8", {}).get("recipe_name")
        return next((ours for ours, theirs in RECIPES.items() if theirs == recipe), "fp8_tensorwise")
    return "fp32" if config.get("training", {}).get("mixed_precision_param") == "float32" else "bf16"


def _find_notes(config: Mapping[str, Any], layout: TrainingLayout) -> list[str]:
    notes = []
    training = config.get("training", {})
    if training.get("enable_cpu_offload"):
        notes.append("training.enable_cpu_offload: weights, gradients and states are on the host, no field of a job")
    if str(config.get("model", {}).get("flavor", "")).endswith(MASKED_SUFFIXES):
        notes.append("model.flavor: attention stays within documents, whose lengths the file does not say")
    local_batch = int(training.get("local_batch_size", 8))
    if layout.pp > 1 and local_batch * layout.dp != layout.global_batch:
        notes.append("training.local_batch_size: the pipeline is filled and drained several times a step")
    return notes


def _look_up(names: Mapping[str, str], table: Mapping[str, Any], key: str, default: str) -> Any:
    """Return our name of a value.

    Raises:
        UserInputError: we have none for it.
    """
    value = str(table.get(key, default))
    by_theirs = {theirs.lower(): ours for ours, theirs in names.items()}
    if value.lower() not in by_theirs:
        raise UserInputError(f"parallelism.{key}={value}: not known here. {suggest(value, names.values())}")
    return by_theirs[value.lower()]
