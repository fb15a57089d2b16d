"""Families of models: the names of sizes in their `config.json`, and what their blocks have beyond these."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workloads.models.model import Activation, Positions, QkNorm, RouterScores

Config = Mapping[str, Any]
Names = dict[str, tuple[str, ...]]


def _rotary(config: Config, layer: int) -> bool:
    rotary = config["no_rope_layers"]  # 1 where a layer has rotary embeddings
    return bool(rotary[layer] if rotary else (layer + 1) % config["no_rope_layer_interval"])


# Which layers have the window, or are linear, where the file has no layer_types.
LAYERS: dict[str, Callable[[Config, int], bool]] = {
    "every": lambda config, layer: True,
    "none": lambda config, layer: False,
    "all but every nth": lambda config, layer: (layer + 1) % config["sliding_window_pattern"] != 0,
    "all but every fourth": lambda config, layer: (layer + 1) % config["full_attention_interval"] != 0,
    "from max_window_layers": lambda config, layer: layer >= config["max_window_layers"],
    "even below max_window_layers": lambda config, layer: layer % 2 == 0 and layer < config["max_window_layers"],
    "rotary": _rotary,
    "not rotary": lambda config, layer: not _rotary(config, layer),
}
# Names of one size in the files of different families, and those of mixtures of experts.
NAMES: Names = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
EXPERTS: Names = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
    "expert_intermediate_size": ("moe_intermediate_size",),
}
WIDE_EXPERTS: Names = EXPERTS | {"expert_intermediate_size": ("intermediate_size",)}
WINDOW: Names = {"window": ("sliding_window",)}
PREDICTION: Names = {"prediction_layers": ("num_nextn_predict_layers", "num_mtp_layers")}
LATENT: Names = PREDICTION | {
    "kv_rank": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "rope_size": ("qk_rope_head_dim",),
    "value_size": ("v_head_dim",),
}
LINEAR: Names = {name: (name,) for name in ("linear_in", "linear_out", "linear_state", "linear_vectors")}


@dataclass(frozen=True)
class Family:
    """What a family's blocks have beyond the sizes in its files, as its module in transformers 5.23 builds them.

    Attributes:
        norms: of a block; `norm_vectors` of each, a scale and a bias.
        qk_norm: of queries and keys: over a head's features, or over those of all heads.
        rope_theta, norm_eps: of files that lack them.
        qkv_bias, output_bias, mlp_bias: whether these have biases, or the key that says so.
        expert_bias: experts and routers have biases.
        sinks: each head has an attention sink.
        shared_expert_gate: a matrix with one output weighs the shared expert.
        router_scores: what gives the scores of experts.
        renormalized: whether those of a token are divided by their sum, or the key that says so.
        window: which layers have a window; None where none has, then a file may not have one.
        chunked: windows are chunks.
        linear: which layers are linear, where the file has no layer_types; None where none can be.
        split_blocks: a block is a mixer or an MLP alone, as its `layer_types` say.
        expansion: of the hidden size in the MLP, where the file does not have its size.
        names: of sizes, in addition to `NAMES` or instead.
        defaults: values of keys that files may lack.
        adapt: returns the keys that follow from others.
    """

    activation: Activation = "swiglu"
    positions: Positions = "rope"
    norms: int = 2
    norm_vectors: int = 1
    qk_norm: QkNorm = ""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    expert_bias: bool = False
    sinks: bool = False
    shared_expert_gate: bool = False
    router_scores: RouterScores = "softmax"
    renormalized: bool | str = "norm_topk_prob"
    window: Callable[[Config, int], bool] | None = None
    chunked: bool = False
    linear: Callable[[Config, int], bool] | None = None
    split_blocks: bool = False
    attention_gate: bool = False
    expansion: int = 0
    names: Names = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)
    adapt: Callable[[Config], dict[str, Any]] = lambda config: {}

    @property
    def size_names(self) -> dict[str, tuple[str, ...]]:
        return {**NAMES, **(WINDOW if self.window else {}), **(LINEAR if self.linear else {}), **self.names}

    @property
    def flags(self) -> set[str]:
        """Return the keys of a file that are true or false."""
        flags = (self.qkv_bias, self.output_bias, self.mlp_bias, self.renormalized)
        named = (key for key in flags if isinstance(key, str))
        return {*named, *(key for key, value in self.defaults.items() if type(value) is bool), "tie_word_embeddings"}

    @property
    def keys(self) -> set[str]:
        """Return the keys of a file that have an effect on the model."""
        return {
            *(key for names in self.size_names.values() for key in names),
            *self.flags,
            *self.defaults,
            "layer_types",
        }


def _falcon(config: Config) -> dict[str, Any]:
    is_new, is_parallel = config["new_decoder_architecture"], config["parallel_attn"]
    usual = None if is_new or not config["multi_query"] else 1  # as many as heads
    norms = config["num_ln_in_parallel_attn"] or (2 if is_new else 1)
    return {
        "num_kv_heads": (config["num_kv_heads"] if is_new else None) or usual,
        "norms": norms if is_parallel else 2,
        "positions": "alibi" if config["alibi"] else "rope",
    }


def _mpt(config: Config) -> dict[str, Any]:
    attention = config["attn_config"] or {}
    usual = 1 if attention.get("attn_type") == "multiquery_attention" else None
    return {"num_key_value_heads": attention.get("kv_n_heads") or usual}


def _latent(config: Config) -> dict[str, Any]:
    return {
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "num_key_value_heads": config.get("num_attention_heads"),
    }


def _delta_rule(config: Config) -> dict[str, Any]:
    """Return the sizes of a gated delta rule: queries, keys, values and a gate, and two scalars of each head."""
    heads, value_size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * value_size
    return {
        "linear_in": 2 * keys + 2 * values + 2 * heads,
        "linear_out": values,
        "linear_state": heads * config["linear_key_head_dim"] * value_size,
        "linear_vectors": (2 * keys + values) * config["linear_conv_kernel_dim"] + 2 * heads + value_size,
    }


BLOCK_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron_h(config: Config) -> dict[str, Any]:
    """Return the kinds of Nemotron-H's blocks, and the sizes of Mamba-2: a gate, inputs, B, C and steps."""
    pattern = config["hybrid_override_pattern"]
    kinds = config["layers_block_type"] or [BLOCK_LETTERS.get(letter, letter) for letter in pattern or ""]
    heads, size = config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]
    convolved = size + 2 * config["n_groups"] * config["ssm_state_size"]
    return {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "linear_in": size + convolved + heads,
        "linear_out": size,
        "linear_state": size * config["ssm_state_size"],
        "linear_vectors": convolved * (config["conv_kernel"] + config["use_conv_bias"]) + 3 * heads + size,
    }


TIED: dict[str, Any] = {"tie_word_embeddings": True}
GPT: dict[str, Any] = {"activation": "gelu", "norm_vectors": 2, "norm_eps": 1e-5}
BIASED: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
UNBIASED: dict[str, Any] = {"qkv_bias": False, "output_bias": False}
GEMMA: dict[str, Any] = {"activation": "gelu_gated"}
UPPER_WINDOWS: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
QWEN2: dict[str, Any] = {"qkv_bias": True, "output_bias": False, "window": LAYERS["from max_window_layers"]}
SPARSE_STEP: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None}
LATENT_SIZES: dict[str, Any] = {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"first_k_dense_replace": 0, "moe_layer_freq": 1, "n_shared_experts": 1, "mlp_layer_types": None},
}
LATENT_FAMILY: dict[str, Any] = {"qkv_bias": False, "names": EXPERTS | LATENT, "adapt": _latent}
NO_ROPE: dict[str, Any] = {"no_rope_layers": None, "no_rope_layer_interval": 4}
FALCON: dict[str, Any] = {
    "num_kv_heads": None,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "multi_query": True,
}
FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias"),
    "mistral": Family(**UNBIASED, window=LAYERS["every"], defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(**QWEN2, defaults=UPPER_WINDOWS | {"num_key_value_heads": 32}),
    "qwen3": Family(
        qk_norm="head",
        window=LAYERS["from max_window_layers"],
        defaults=UPPER_WINDOWS | {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "gpt_neox": Family(**GPT, mlp_bias=True, defaults={"attention_bias": True}),
    "gpt2": Family(**GPT, **BIASED, positions="learned", expansion=4, defaults={**TIED, "n_positions": 1024}),
    "mpt": Family(
        **UNBIASED,
        activation="gelu",
        norm_eps=1e-5,
        positions="alibi",
        expansion=4,
        defaults={**TIED, "expansion_ratio": None, "attn_config": None},
        adapt=_mpt,
    ),
    "nemotron": Family(activation="squared_relu", norm_vectors=2, norm_eps=1e-5, mlp_bias="mlp_bias"),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        output_bias=False,
        window=LAYERS["even below max_window_layers"],
        shared_expert_gate=True,
        names={**EXPERTS, "shared_expert_intermediate_size": ("shared_expert_intermediate_size",)},
        defaults=UPPER_WINDOWS | SPARSE_STEP | {"num_key_value_heads": 16, "qkv_bias": True},
    ),
    "qwen3_moe": Family(
        qk_norm="head",
        window=LAYERS["every"],
        names=EXPERTS,
        defaults=UPPER_WINDOWS | SPARSE_STEP | {"num_key_value_heads": 4},
    ),
    "mixtral": Family(
        **UNBIASED,
        rope_theta=1e6,
        norm_eps=1e-5,
        renormalized=True,
        window=LAYERS["every"],
        names=WIDE_EXPERTS,
        defaults={"num_key_value_heads": 8},
    ),
    "gpt_oss": Family(
        rope_theta=150_000.0,
        norm_eps=1e-5,
        expert_bias=True,
        sinks=True,
        window=LAYERS["all but every nth"],
        names=WIDE_EXPERTS,
        defaults={
            "attention_bias": True,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
    ),
    "deepseek": Family(
        names=EXPERTS, defaults={"first_k_dense_replace": 0, "moe_layer_freq": 1, "n_shared_experts": 0}
    ),
    # Keys and values are compressed (multi-head latent attention). Routing groups change which experts a token goes to,
    # not how many.
    "deepseek_v2": Family(**LATENT_FAMILY, defaults=LATENT_SIZES | {"n_shared_experts": 2}),
    "deepseek_v3": Family(**LATENT_FAMILY, defaults=LATENT_SIZES | {"first_k_dense_replace": 3}),
    "glm4_moe_lite": Family(
        **LATENT_FAMILY,
        norm_eps=1e-5,
        defaults=LATENT_SIZES
        | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "first_k_dense_replace": 1},
    ),
    "qwen3_next": Family(
        qk_norm="head",
        shared_expert_gate=True,
        attention_gate=True,
        linear=LAYERS["all but every fourth"],
        names={**EXPERTS, "shared_expert_intermediate_size": ("shared_expert_intermediate_size",)},
        defaults=SPARSE_STEP
        | {"num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        adapt=_delta_rule,
    ),
    "nemotron_h": Family(
        activation="squared_relu",
        norm_eps=1e-5,
        positions="none",
        norms=1,
        linear=LAYERS["none"],
        split_blocks=True,
        names={
            **EXPERTS,
            "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size",),
            "expert_hidden_size": ("moe_latent_size",),
            **PREDICTION,
        },
        defaults={"num_key_value_heads": 8, "head_dim": 128, "hybrid_override_pattern": None, "layers_block_type": None}
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
        | {"use_conv_bias": True, "n_shared_experts": 1},
        adapt=_nemotron_h,
    ),
    "phi3": Family(**UNBIASED, norm_eps=1e-5, window=LAYERS["every"]),
    "olmo": Family(norm_vectors=0, norm_eps=1e-5),
    "olmo2": Family(qk_norm="all", norm_eps=1e-5),
    "olmo3": Family(
        qk_norm="all",
        rope_theta=500_000.0,
        norm_eps=1e-5,
        window=LAYERS["all but every nth"],
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "olmoe": Family(qk_norm="all", norm_eps=1e-5, names=WIDE_EXPERTS),
    "granite": Family(mlp_bias="mlp_bias"),
    "granitemoe": Family(names=WIDE_EXPERTS),
    "granitemoeshared": Family(
        names={**WIDE_EXPERTS, "shared_expert_intermediate_size": ("shared_intermediate_size",)}
    ),
    "smollm3": Family(
        mlp_bias="mlp_bias",
        rope_theta=2e6,
        window=LAYERS["not rotary"],
        defaults=TIED | NO_ROPE | {"num_key_value_heads": 4, "use_sliding_window": False, "max_window_layers": None},
    ),
    "seed_oss": Family(
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "falcon": Family(
        **GPT,
        qkv_bias="bias",
        output_bias="bias",
        mlp_bias="bias",
        expansion=4,
        names={"kv_heads": ("num_kv_heads",), "intermediate_size": ("ffn_hidden_size",)},
        defaults={**TIED, **FALCON, "num_ln_in_parallel_attn": None, "alibi": False},
        adapt=_falcon,
    ),
    "starcoder2": Family(
        **GPT,
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        window=LAYERS["every"],
        defaults={**TIED, "use_bias": True, "num_key_value_heads": 2},
    ),
    "cohere": Family(
        norms=1, qk_norm="all", rope_theta=500_000.0, norm_eps=1e-5, defaults={**TIED, "use_qk_norm": False}
    ),
    "cohere2": Family(
        norms=1,
        norm_eps=1e-5,
        window=LAYERS["all but every nth"],
        defaults={**TIED, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "glm4_moe": Family(
        output_bias=False,
        qk_norm="head",
        norm_eps=1e-5,
        router_scores="sigmoid",
        names=EXPERTS | PREDICTION,
        defaults={
            "num_key_value_heads": 8,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
    ),
    "gemma": Family(**GEMMA, defaults={**TIED, "num_key_value_heads": 16, "head_dim": 256}),
    "gemma2": Family(
        **GEMMA,
        norms=4,
        window=LAYERS["all but every nth"],
        defaults={
            **TIED,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
    ),
    "gemma3_text": Family(
        **GEMMA,
        norms=4,
        qk_norm="head",
        rope_theta=1e6,
        window=LAYERS["all but every nth"],
        defaults={
            **TIED,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
    "qwen2_5_vl_text": Family(
        **QWEN2,
        rope_theta=1e6,
        norm_eps=1e-5,
        defaults=UPPER_WINDOWS | {"num_key_value_heads": 8, "max_window_layers": 80},
    ),
    "llama4_text": Family(
        rope_theta=500_000.0,
        norm_eps=1e-5,
        window=LAYERS["rotary"],
        chunked=True,
        names={
            **WIDE_EXPERTS,
            "intermediate_size": ("intermediate_size_mlp",),
            "shared_expert_intermediate_size": ("intermediate_size",),
            "window": ("attention_chunk_size",),
        },
        defaults={
            **NO_ROPE,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "interleave_moe_layer_step": 1,
            "moe_layers": None,
        },
    ),
}
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]
# Families that wrap a text part, and the family of that part where the file does not say.
TEXT_PARTS = {"mistral3": "mistral", "gemma3": "gemma3_text", "qwen2_5_vl": "qwen2_5_vl_text", "llama4": "llama4_text"}
UNSUPPORTED_FAMILIES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "most layers are linear attention"),
    **dict.fromkeys(("mamba", "jamba", "falcon_mamba"), "layers are Mamba"),
    **dict.fromkeys(("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "zamba2"), "layers are Mamba-2"),
    **dict.fromkeys(("kimi_linear", "minimax", "olmo_hybrid"), "layers are linear attention"),
    "recurrent_gemma": "layers are recurrent",
    "gemma3n": "layers have embeddings of their own",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "attention selects tokens by an index"),
    "deepseek_v4": "attention is to compressed tokens",
}
# A key with one of these words in its name may change shapes, unless it is one of those below.
SHAPE_WORDS = re.compile(
    r"(^|_)(sizes?|dims?|layers?|heads?|experts?|window|chunk|rank|lora|ffn?|mlp|moe|bias|hidden|kv|qk|attn|attention"
    r"|mamba|ssm|conv|sparse|blocks?|altup|laurel|mtp|inner|expansion|vision|freq|interval|pattern|ratio|width|depth"
    r"|gate|norm|shared|residual|step)(_|$)"
)
WITHOUT_SHAPE = re.compile(
    r".*(eps|epsilon|dropout|pdrop|dropout_prob|softcapping|multiplier|scalar|implementation\w*|_act|activation)"
    r"|norm_(topk_prob|type)|mlp_type|attn_(scale|temperature_tuning)|sliding_window_size|_sliding_window_pattern"
    r"|full_attn_mod|rope_local_base_freq|ff_factor|layer_switch|order_of_interleaved_layers|use_parallel_(block|residual)"
    r"|apply_residual_connection_post_layernorm|scale_attn_\w+|reorder_and_upcast_attn"
    r"|(output|use_bidirectional)_attentions?|output_hidden_states|use_flash_attn|no_bias|kv_cache\w*|vision_(\w+_)?token_id|ep_size"
    r"|use_mamba_kernels|mamba_ssm_cache_dtype|time_step_\w+|chunk_size|moe_shared_expert_overlap"
    r"|rescale_prenorm_residual|mtp_layers_block_type"  # the blocks of `num_nextn_predict_layers`
)
