"""Megatron's settings as a layout: of a command, of a log, of Primus's and Megatron-Bridge's files."""

from __future__ import annotations

import math
from typing import Any

from workloads.api.errors import UserInputError
from workloads.formats.megatron_settings import (
    CP_METHODS,
    FP8_RECIPES,
    FSDP_STRATEGIES,
    Settings,
)
from workloads.formats.rendering import FileReading, canonical_layout, data_parallel_size
from workloads.layouts.job import TrainingLayout
from workloads.models.model import Model


def read_settings(settings: Settings, trainer: str, gpus: int | None, model: Model | None = None) -> FileReading:
    """Return what settings say, with Megatron-LM's defaults for what they leave out.

    Args:
        gpus: on which the program runs; None if nothing says so.
        model: of the program where the settings do not have its sizes.

    Raises:
        UserInputError: a value that no job has, or the number of GPUs is missing.
    """
    model = _read_model(settings) or model
    layers = model.layers if model else settings.get("num_layers")
    layout = _read_layout(settings, settings.get("world_size") or gpus, layers)
    return FileReading(
        trainer=trainer,
        layout=canonical_layout(layout, layers),
        sequence_length=settings.get("seq_length") or 0,
        model=model,
        precision=_read_precision(settings),
        notes=tuple(_find_notes(settings)),
    )


def _read_layout(settings: Settings, gpus: int | None, layers: int | None) -> TrainingLayout:
    degrees: dict[str, Any] = {
        "tp": settings.get("tensor_model_parallel_size") or 1,
        "cp": settings.get("context_parallel_size") or 1,
        "pp": settings.get("pipeline_model_parallel_size") or 1,
    }
    dp = settings.get("data_parallel_size") or data_parallel_size(gpus, degrees)
    sharding = _read_sharding(settings)
    replicas = 1 if sharding == "fsdp2" else settings.get("num_distributed_optimizer_instances") or 1
    stages = _read_stages(settings, layers) if degrees["pp"] > 1 else 1
    micro_batch = settings.get("micro_batch_size") or 1
    return TrainingLayout(
        **degrees,
        dp_replicate=replicas,
        dp_shard=dp // replicas,
        ep=settings.get("expert_model_parallel_size") or 1,
        stages_per_rank=stages,
        schedule=_read_schedule(settings, stages),  # type: ignore[arg-type]
        micro_batch=micro_batch,
        global_batch=settings.get("global_batch_size") or micro_batch * dp,
        sharding=sharding,  # type: ignore[arg-type]
        reshard_after_forward=settings.get("torch_fsdp2_reshard_after_forward", True) or sharding != "fsdp2",
        sequence_parallel=bool(settings.get("sequence_parallel")),
        tp_overlap="async" if settings.get("tp_comm_overlap") else "none",
        cp_method=_read_cp_method(settings),  # type: ignore[arg-type]
        offload_optimizer=bool(settings.get("optimizer_cpu_offload")),
        **_read_checkpointing(settings, degrees["pp"] * stages, layers),
    )


def _read_sharding(settings: Settings) -> str:
    if settings.get("use_torch_fsdp2"):
        return "fsdp2"
    if settings.get("use_megatron_fsdp") or settings.get("use_custom_fsdp"):
        strategy = settings.get("data_parallel_sharding_strategy", "no_shard")
        ours = {theirs: name for name, theirs in FSDP_STRATEGIES.items()} | {"optim": "zero1", "no_shard": "none"}
        if strategy not in ours:
            raise UserInputError(
                f"data_parallel_sharding_strategy={strategy}: not known here. Known: {', '.join(ours)}"
            )
        return ours[strategy]
    return "zero1" if settings.get("use_distributed_optimizer") else "none"


def _read_schedule(settings: Settings, stages: int) -> str:
    if settings.get("patch_zero_bubble") and settings.get("enable_zero_bubble", True):
        return "zbv" if settings.get("zero_bubble_v_schedule") else "zero_bubble"
    return "interleaved" if stages > 1 else "1f1b"


def _read_cp_method(settings: Settings) -> str:
    value = settings.get("cp_comm_type") or "p2p"
    method = value[0] if isinstance(value, list) else value
    ours = {theirs: name for name, theirs in CP_METHODS.items()} | {"allgather": "allgather"}
    if method not in ours:
        raise UserInputError(f"cp_comm_type={method}: no layout has it. Known: {', '.join(ours)}")
    return ours[method]


def _read_checkpointing(settings: Settings, stages: int, layers: int | None) -> dict[str, Any]:
    granularity = settings.get("recompute_granularity")
    if settings.get("recompute_activations"):
        granularity = "selective"
    if granularity is None:
        return {"checkpointing": "none"}
    if granularity == "selective":
        modules = settings.get("recompute_modules") or ["core_attn"]
        modules = [modules] if isinstance(modules, str) else modules
        if modules == ["core_attn"]:
            return {"checkpointing": "core_attention"}
        if set(modules) <= {"layernorm", "moe_act"}:
            return {"checkpointing": "norm_act"}
        raise UserInputError(f"recompute_modules={','.join(modules)}: no layout has these. Known: core_attn, layernorm")
    if settings.get("recompute_method") == "block":
        total = (settings.get("recompute_num_layers") or 1) * stages
        return {"checkpointing": "full", "checkpointed_layers": min(total, layers) if layers else total}
    return {"checkpointing": "full"}


def _read_precision(settings: Settings) -> str:
    if number_format := settings.get("fp8"):
        recipe = settings.get("fp8_recipe") or "delayed"
        for name, (_, theirs) in FP8_RECIPES.items():
            if theirs == recipe:
                return name
        raise UserInputError(f"fp8_recipe={recipe} ({number_format}): no precision of ours")
    return "bf16" if settings.get("bf16") else "fp16" if settings.get("fp16") else "fp32"


def _find_notes(settings: Settings) -> list[str]:
    if settings.get("rampup_batch_size"):
        return [f"rampup_batch_size={settings['rampup_batch_size']}: the batch grows to the global batch"]
    return []


def _read_model(settings: Settings) -> Model | None:
    """Return the model of settings, with Megatron-LM's defaults; None if sizes are missing."""
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if any(not isinstance(settings.get(name), int) for name in sizes):
        return None
    heads = settings["num_attention_heads"]
    is_gated = bool(settings.get("swiglu"))
    experts = settings.get("num_experts") or 0
    default = int(4 * settings["hidden_size"] * 2 / 3) // 64 * 64 if is_gated else 4 * settings["hidden_size"]
    feed_forward = settings.get("ffn_hidden_size") or default
    biased = bool(settings.get("add_bias_linear", True))
    positions = {"rope": "rope", "learned_absolute": "learned"}.get(settings.get("position_embedding_type", ""), "none")
    dense_layers = _read_dense_layers(settings.get("moe_layer_freq"), settings["num_layers"])
    return Model(
        layers=settings["num_layers"],
        hidden_size=settings["hidden_size"],
        heads=heads,
        kv_heads=settings.get("num_query_groups") or heads if settings.get("group_query_attention") else heads,
        head_size=settings.get("kv_channels") or settings["hidden_size"] // heads,
        intermediate_size=0 if experts and not dense_layers else feed_forward,
        vocabulary=settings["vocab_size"] + (settings.get("tokenizer_type", "NullTokenizer") == "NullTokenizer"),
        activation="swiglu" if is_gated else "squared_relu" if settings.get("squared_relu") else "gelu",
        tied=not settings.get("untie_embeddings_and_output_weights", False),
        qkv_bias=biased or bool(settings.get("add_qkv_bias")),
        mlp_bias=biased,
        positions=positions,  # type: ignore[arg-type]
        max_positions=settings.get("max_position_embeddings", 0) if positions == "learned" else 0,
        experts=experts,
        experts_per_token=settings.get("moe_router_topk", 2) if experts else 0,
        expert_intermediate_size=(settings.get("moe_ffn_hidden_size") or feed_forward) if experts else 0,
        shared_expert_intermediate_size=settings.get("moe_shared_expert_intermediate_size") or 0,
        dense_layers=dense_layers,
    )


def _read_dense_layers(pattern: object, layers: int) -> int:
    """Return the number of dense layers at the start, of a pattern such as `([0]*3+[1]*58)`."""
    if not isinstance(pattern, str) or "[0]*" not in pattern:
        return 0
    number = pattern.partition("[0]*")[2].partition("+")[0]
    return min(int(number), layers) if number.isdigit() else 0


def _read_stages(settings: Settings, layers: int | None) -> int:
    """Return the stages of a pipeline rank, by any of the three settings that give them."""
    pp = settings.get("pipeline_model_parallel_size") or 1
    given = settings.get("num_virtual_stages_per_pipeline_rank") or settings.get("virtual_pipeline_model_parallel_size")
    if given:
        return int(given)
    per_stage = settings.get("num_layers_per_virtual_pipeline_stage")
    return math.ceil(layers / pp / per_stage) if per_stage and layers else 1
