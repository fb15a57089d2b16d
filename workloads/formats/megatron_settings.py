"""A job as Megatron's settings, by the names under which Megatron-LM logs them and Primus takes them."""

from __future__ import annotations

from typing import Any

from workloads.layouts.job import Job, TrainingLayout

Settings = dict[str, Any]

# Ours to (format, recipe). Megatron's `tensorwise` takes scales of the current tensor, `delayed` of earlier ones.
FP8_RECIPES = {
    "fp8_te_delayed": ("hybrid", "delayed"),
    "fp8_te_current": ("hybrid", "tensorwise"),
    "fp8_te_blockwise": ("e4m3", "blockwise"),
    "mxfp8": ("e4m3", "mxfp8"),
}
CP_METHODS = {"ring": "p2p", "allgather": "all_gather"}
# megatron/core/transformer/transformer_config.py, `recompute_modules`. The activation is recomputed in experts only.
NORM_ACT = ["layernorm", "moe_act"]
FSDP_STRATEGIES = {"zero2": "optim_grads", "megatron_fsdp": "optim_grads_params"}
# `validate_args` asks for the second with the first.
OFFLOADED_OPTIMIZER = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
# A vocabulary is padded to a multiple of this times `tp`, so that its products have sizes that are fast.
LARGEST_VOCABULARY_MULTIPLE = 128


def build_settings(job: Job) -> Settings:
    """Return the settings of a canonical job that `SUPPORT` accepts. Defaults of Megatron-LM are left out."""
    return {
        **_model(job),
        **_experts(job),
        **_batch(job),
        **_degrees(job),
        **_sharding(job.layout),
        **_checkpointing(job),
        **_precision(job.precision),
        **(OFFLOADED_OPTIMIZER if job.layout.offload_optimizer else {}),
    }


def _model(job: Job) -> Settings:
    model = job.model
    positions = {"rope": "rope", "learned": "learned_absolute", "none": "none"}[model.positions]
    settings: Settings = {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size or model.expert_intermediate_size,
        "num_attention_heads": model.heads,
        "kv_channels": model.head_size,
        "position_embedding_type": positions,
        "max_position_embeddings": max(model.max_positions, job.sequence_length),
        "vocab_size": model.vocabulary - 1,  # NullTokenizer adds a token
        "make_vocab_size_divisible_by": vocabulary_multiple(model.vocabulary, job.layout.tp),
        "untie_embeddings_and_output_weights": not model.tied,
        "add_bias_linear": model.mlp_bias,
        "normalization": "RMSNorm" if model.positions == "rope" else "LayerNorm",
    }
    if model.positions == "rope":
        settings["rotary_base"] = 500_000  # of Llama 3; no product or copy depends on it
    if model.kv_heads != model.heads:
        settings |= {"group_query_attention": True, "num_query_groups": model.kv_heads}
    if model.qkv_bias and not model.mlp_bias:
        settings["add_qkv_bias"] = True
    if model.activation != "gelu":
        settings[model.activation] = True
    return settings


def vocabulary_multiple(vocabulary: int, tp: int) -> int:
    """Return the largest power of two, up to 128, that pads the vocabulary the least."""
    multiples = [2**power for power in range(LARGEST_VOCABULARY_MULTIPLE.bit_length())]
    return min(reversed(multiples), key=lambda multiple: -vocabulary % (multiple * tp))


def _experts(job: Job) -> Settings:
    model = job.model
    if not model.experts:
        return {}
    settings: Settings = {
        "num_experts": model.experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_intermediate_size,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "expert_model_parallel_size": job.layout.ep,
        "expert_tensor_parallel_size": 1,  # experts are divided whole, and not within
    }
    if model.shared_expert_intermediate_size:
        settings["moe_shared_expert_intermediate_size"] = model.shared_expert_intermediate_size
    if model.dense_layers:
        settings["moe_layer_freq"] = f"([0]*{model.dense_layers}+[1]*{model.layers - model.dense_layers})"
    return settings


def _batch(job: Job) -> Settings:
    layout = job.layout
    return {
        "seq_length": job.sequence_length,
        "micro_batch_size": layout.micro_batch,
        "global_batch_size": layout.global_batch,
    }


def _degrees(job: Job) -> Settings:
    layout = job.layout
    settings: Settings = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.tp > 1 and layout.sequence_parallel,
    }
    if layout.cp > 1:
        settings["cp_comm_type"] = CP_METHODS[layout.cp_method]
    if layout.tp_overlap == "async":
        settings["tp_comm_overlap"] = True
    if layout.stages_per_rank > 1:
        settings["num_virtual_stages_per_pipeline_rank"] = layout.stages_per_rank
    if layout.pp > 1 and job.model.layers % (layout.pp * layout.stages_per_rank):
        ends = ("embedding", "loss")
        settings |= {f"account_for_{end}_in_pipeline_split": True for end in ends}
    return settings


def _sharding(layout: TrainingLayout) -> Settings:
    settings: Settings = {"overlap_grad_reduce": True} if layout.dp * layout.cp > 1 else {}
    if layout.sharding in ("zero1", *FSDP_STRATEGIES):
        settings |= {"use_distributed_optimizer": True, "overlap_param_gather": True}
        settings["num_distributed_optimizer_instances"] = layout.dp_replicate
    if layout.sharding in FSDP_STRATEGIES:
        strategy = FSDP_STRATEGIES[layout.sharding]
        settings |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
        settings["ckpt_format"] = "fsdp_dtensor"  # the only one that it takes
    if layout.sharding == "fsdp2":
        settings = {"use_torch_fsdp2": True, "gradient_accumulation_fusion": False, "ckpt_format": "torch_dist"}
        settings["torch_fsdp2_reshard_after_forward"] = layout.reshard_after_forward
    return settings


def _checkpointing(job: Job) -> Settings:
    layout = job.layout
    if layout.checkpointing == "core_attention":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if layout.checkpointing == "norm_act":
        return {"recompute_granularity": "selective", "recompute_modules": NORM_ACT}
    if layout.checkpointing != "full":
        return {}
    if layout.checkpointed_layers is None:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    # With `block`, the number is of each stage: megatron/core/transformer/transformer_block.py.
    of_a_stage = layout.checkpointed_layers // (layout.pp * layout.stages_per_rank)
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": of_a_stage}


def _precision(precision: str) -> Settings:
    if precision in ("fp16", "fp32"):
        return {precision: True} if precision == "fp16" else {}
    if precision not in FP8_RECIPES:
        return {"bf16": True}
    number_format, recipe = FP8_RECIPES[precision]
    return {"bf16": True, "fp8": number_format, "fp8_recipe": recipe}
