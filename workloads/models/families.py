"""Families of models: the names of sizes in their `config.json`, and other properties of their blocks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workloads.models.model import Activation, Positions, QkNorm, RouterScores
from workloads.tables import read_toml

Config = Mapping[str, Any]
Names = dict[str, tuple[str, ...]]


def _rotary(config: Config, layer: int) -> bool:
    rotary = config["no_rope_layers"]  # 1 for a layer with rotary embeddings
    return bool(rotary[layer] if rotary else (layer + 1) % config["no_rope_layer_interval"])


# Which layers have the window or are linear, for files without layer_types.
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
_TABLE: dict[str, Any] = read_toml(__file__, "families.toml")
GROUPS: dict[str, Names] = {
    group: {size: tuple(keys) for size, keys in names.items()} for group, names in _TABLE["groups"].items()
}


@dataclass(frozen=True)
class Family:
    """Properties of a family's blocks other than their sizes, taken from the family's module in transformers 5.23."""

    activation: Activation = "swiglu"
    positions: Positions = "rope"
    norms: int = 2  # per block; each has `norm_vectors`: a scale and possibly a bias
    norm_vectors: int = 1
    qk_norm: QkNorm = ""  # norm of queries and keys: over each head's features, or over all heads' features
    # rope_theta, norm_eps: the values for files that lack them
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    # qkv_bias, output_bias, mlp_bias: whether these projections have biases, or the key in the file that states this
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    expert_bias: bool = False  # experts and routers have biases
    sinks: bool = False  # each head has an attention sink
    shared_expert_gate: bool = False  # a matrix with one output gates the shared expert
    router_scores: RouterScores = "softmax"  # the function that computes expert scores
    # Whether a token's scores are divided by their sum, or the key in the file that states this.
    renormalized: bool | str = "norm_topk_prob"
    # Which layers have a window. None if no layer has a window; files then must not define one.
    window: Callable[[Config, int], bool] | None = None
    windowed: tuple[str, ...] = ("sliding_attention",)  # the kinds of layers with a window in `layer_types`
    # Which layers are linear if the file has no layer_types; None if no layer can be linear.
    linear: Callable[[Config, int], bool] | None = None
    split_blocks: bool = False  # a block is only a mixer or only an MLP, according to `layer_types`
    attention_gate: bool = False
    expansion: int = 0  # the MLP's size as a multiple of the hidden size, for files without the size
    names: Names = field(default_factory=dict)  # names of sizes, in addition to or instead of the common names
    defaults: Config = field(default_factory=dict)  # values of keys that files may lack
    adapt: Callable[[Config], dict[str, Any]] = lambda config: {}  # returns keys that are derived from other keys

    @property
    def size_names(self) -> dict[str, tuple[str, ...]]:
        groups = ["every", *(["window"] if self.window else []), *(["linear"] if self.linear else [])]
        return {size: keys for group in groups for size, keys in GROUPS[group].items()} | self.names

    @property
    def flags(self) -> set[str]:
        """Return the boolean keys that a file may have."""
        flags = (self.qkv_bias, self.output_bias, self.mlp_bias, self.renormalized)
        named = (key for key in flags if isinstance(key, str))
        return {*named, *(key for key, value in self.defaults.items() if type(value) is bool), "tie_word_embeddings"}

    @property
    def keys(self) -> set[str]:
        """Return the keys of a file that affect the model."""
        return {
            *(key for names in self.size_names.values() for key in names),
            *self.flags,
            *self.defaults,
            "layer_types",
        }


def _falcon(config: Config) -> dict[str, Any]:
    is_new, is_parallel = config["new_decoder_architecture"], config["parallel_attn"]
    usual = None if is_new or not config["multi_query"] else 1  # None: the number of heads
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
    head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return {"head_dim": head_dim, "num_key_value_heads": config.get("num_attention_heads")}


def _delta_rule(config: Config) -> dict[str, Any]:
    """Return the sizes of a gated delta rule: queries, keys, values and a gate, and two scalars per head."""
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


ADAPTERS = {"falcon": _falcon, "mpt": _mpt, "latent": _latent, "delta_rule": _delta_rule, "nemotron_h": _nemotron_h}


def _build_family(row: dict[str, Any]) -> Family:
    names: Names = {size: keys for group in row.pop("groups", ()) for size, keys in GROUPS[group].items()}
    names |= {size: (key,) for size, key in row.pop("names", {}).items()}
    defaults = row.pop("defaults", {}) | dict.fromkeys(row.pop("optional", ()))
    functions: dict[str, Any] = {name: LAYERS[row.pop(name)] for name in ("window", "linear") if name in row}
    adapt = ADAPTERS[row.pop("adapt")] if "adapt" in row else Family.adapt
    return Family(**row, **functions, adapt=adapt, names=names, defaults=defaults)


FAMILIES = {name: _build_family(row) for name, row in _TABLE["family"].items()}
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]
# Families that wrap a text part, with the text part's family for files that do not name it.
TEXT_PARTS: dict[str, str] = _TABLE["text_parts"]
VALUES: dict[str, Any] = _TABLE["values"]
UNSUPPORTED_FAMILIES = {name: reason for reason, names in _TABLE["unsupported"].items() for name in names}
# A key with one of these words in its name may change shapes, unless WITHOUT_SHAPE matches it.
SHAPE_WORDS = re.compile(rf"(^|_)({'|'.join(_TABLE['shapes']['words'])})(_|$)")
WITHOUT_SHAPE = re.compile("|".join(_TABLE["shapes"]["without"]))
