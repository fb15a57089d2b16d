"""torchtitan's configuration of version 0.2.2, in TOML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.formats.rendering import RenderedFile, torchrun
from workloads.formats.torchtitan_models import assets_of, find_flavor
from workloads.formats.torchtitan_rules import (
    FP8,
    MXFP8,
    RECIPES,
    ROTATE_METHODS,
    SCHEDULES,
    SUPPORT,
    find_interval,
    find_layers_per_stage,
)
from workloads.layouts.job import Job

NAME = "torchtitan.toml"


def render(job: Job, gpus: int) -> RenderedFile:
    """Return the configuration of a canonical job.

    Raises:
        UserInputError: torchtitan 0.2.2 cannot express it.
    """
    SUPPORT.check(job)
    name, flavor = find_flavor(job.model)
    command = " ".join([*torchrun(gpus), "-m", "torchtitan.train", f"--job.config_file={NAME}"])
    tables: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": "./outputs", "print_config": True},
        "model": {"name": name, "flavor": flavor, "hf_assets_path": assets_of(name, flavor)}
        | {"converters": _converters(job.precision)},
        "training": _training(job),
        "parallelism": _parallelism(job),
        "activation_checkpoint": _checkpointing(job),
        "compile": {"enable": job.compiled},
        "metrics": {"log_freq": 1},
        **_quantize(job),
    }
    notes = (
        f"model.hf_assets_path ({assets_of(name, flavor)}) is the folder of the tokenizer",
        "the file is for torchtitan 0.2: version 0.3.0 reads no TOML (pip install torchtitan==0.2.2)",
        "training.dataset c4 comes from the Hugging Face hub: training.dataset_path names a folder of your own",
    )
    return RenderedFile(NAME, f"# torchtitan 0.2.2: {command}\n" + _to_toml(tables), command, notes)


def _training(job: Job) -> dict[str, Any]:
    layout = job.layout
    # With a pipeline the local batch is what fills it once: torchtitan/distributed/pipeline_parallel.py.
    local_batch = layout.micro_batch if layout.pp == 1 else layout.micro_batch * layout.microbatches
    return {
        "dataset": "c4",
        "seq_len": job.sequence_length,
        "local_batch_size": local_batch,
        "global_batch_size": layout.global_batch,
        "steps": 20,
        "dtype": "bfloat16" if job.state == "bf16" else "float32",
        "mixed_precision_param": "float32" if job.precision == "fp32" else "bfloat16",
    }


def _parallelism(job: Job) -> dict[str, Any]:
    layout = job.layout
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "fsdp_reshard_after_forward": "always" if layout.reshard_after_forward else "never",
        "tensor_parallel_degree": layout.tp,
        "enable_async_tensor_parallel": layout.tp_overlap == "async",
        "context_parallel_degree": layout.cp,
        "context_parallel_rotate_method": ROTATE_METHODS[layout.cp_method],
        "expert_parallel_degree": layout.ep,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp > 1:
        table["pipeline_parallel_schedule"] = SCHEDULES[layout.schedule]
        table["pipeline_parallel_microbatch_size"] = layout.micro_batch
        table |= find_layers_per_stage(job.model.layers, layout) or {}
    return table


def _checkpointing(job: Job) -> dict[str, Any]:
    layout = job.layout
    if layout.checkpointing == "per_op":
        return {"mode": "selective", "selective_ac_option": "op"}
    if layout.checkpointing == "full" and layout.checkpointed_layers is not None:
        return {"mode": "selective", "selective_ac_option": str(find_interval(job))}
    return {"mode": layout.checkpointing}


def _converters(precision: str) -> list[str]:
    if precision == "mxfp8":
        return [MXFP8]
    return [FP8] if precision.startswith("fp8") else []


def _quantize(job: Job) -> dict[str, dict[str, Any]]:
    if job.precision == "fp8_tensorwise":
        return {FP8: {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}}
    if job.precision in RECIPES:
        return {FP8: {"recipe_name": RECIPES[job.precision]}}
    return {MXFP8: {"recipe_name": "mxfp8_cublas"}} if job.precision == "mxfp8" else {}


def _to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    sections = []
    for name, table in tables.items():
        lines = [f"{key} = {_toml_value(value)}" for key, value in table.items()]
        sections.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
