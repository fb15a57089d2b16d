"""Models by name, or by the sizes in their Hugging Face `config.json`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workloads.models.model import MODELS, Activation, Model, Positions

FAMILIES: dict[str, tuple[Activation, Positions]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("swiglu", "rope")),
    "gpt_neox": ("gelu", "rope"),
    "gpt2": ("gelu", "learned"),
    "mpt": ("gelu", "alibi"),
    "nemotron": ("squared_relu", "rope"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek"), ("swiglu", "rope")),
}
UNSUPPORTED_FAMILIES = {
    "qwen3_next": "three of four layers are linear attention",
    "qwen3_5": "most layers are linear attention",
    **dict.fromkeys(("mamba", "jamba"), "layers are Mamba"),
    **dict.fromkeys(("mamba2", "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid"), "layers are Mamba-2"),
    **dict.fromkeys(("kimi_linear", "minimax"), "layers are linear attention"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "keys and values are compressed (multi-head latent attention)"),
}
# Names of one size in the files of different families.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_intermediate_size": ("moe_intermediate_size",),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    "window": ("sliding_window",),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
REQUIRED = ("layers", "hidden_size", "heads", "vocabulary")
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1


class UnsupportedModel(ValueError):
    """A model that the planner does not know, with the reason in a line."""


def load_model(name: str) -> Model:
    """Return a model by its name or by the path of a Hugging Face `config.json`. Raises UnsupportedModel."""
    if name in MODELS:
        return MODELS[name]
    if name.endswith(".json"):
        try:
            content = json.loads(Path(name).read_text())
        except OSError as error:
            raise UnsupportedModel(f"cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UnsupportedModel(f"not JSON: {error}") from error
        if not isinstance(content, dict):
            raise UnsupportedModel("not a Hugging Face configuration: must be a JSON object")
        return read_hugging_face(content)
    if name in UNSUPPORTED_FAMILIES:
        raise UnsupportedModel(f"{name} is not modelled: {UNSUPPORTED_FAMILIES[name]}")
    available = f"Available: {', '.join(MODELS)}, or a path to a config.json."
    raise UnsupportedModel(f"unknown model '{name}'. {available}{_suggest(name, MODELS)}")


def _suggest(word: str, allowed: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def read_hugging_face(config: Mapping[str, Any]) -> Model:
    """Return the sizes in a configuration. Raises UnsupportedModel, also for a size that is missing or cannot be."""
    family = str(config.get("model_type") or "")
    if family in UNSUPPORTED_FAMILIES:
        raise UnsupportedModel(f"{family} is not modelled: {UNSUPPORTED_FAMILIES[family]}")
    kinds = set(_layer_types(config)) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModel(f"layers of kind {', '.join(sorted(kinds))} are not modelled")
    if family not in FAMILIES:
        what = f"model_type '{family}' is not modelled" if family else "no model_type"
        raise UnsupportedModel(f"{what}. Available: {', '.join(FAMILIES)}.{_suggest(family, FAMILIES)}")
    activation, positions = FAMILIES[family]
    sizes = {}  # each by the first of its names that the file has; 0 where it has none or says null
    for field, keys in NAMES.items():
        limit, least = MAX_LAYERS if field == "layers" else MAX_SIZE, 1 if field in REQUIRED else 0
        sizes[field] = next((_whole(config, key, least, limit) for key in keys if config.get(key) is not None), 0)
    missing = [NAMES[key][0] for key in REQUIRED if not sizes[key]]
    if missing:
        raise UnsupportedModel(f"no {', '.join(missing)}. Required: {', '.join(NAMES[key][0] for key in REQUIRED)}")
    attention = config.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise UnsupportedModel(f"attn_config is {attention!r}: must be a mapping")
    is_multiquery = attention.get("attn_type") == "multiquery_attention"
    usual = 1 if is_multiquery else sizes["kv_heads"] or sizes["heads"]
    heads, hidden_size, kv_heads = sizes["heads"], sizes["hidden_size"], _whole(attention, "kv_n_heads") or usual
    if heads % kv_heads:
        raise UnsupportedModel(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if not sizes["head_size"] and hidden_size % heads:
        raise UnsupportedModel(
            f"num_attention_heads {heads} does not divide hidden_size {hidden_size}, and there is no head_dim"
        )
    sizes["kv_heads"], sizes["head_size"] = kv_heads, sizes["head_size"] or hidden_size // heads
    if not sizes["intermediate_size"]:
        sizes["intermediate_size"] = (_whole(config, "expansion_ratio") or 4) * hidden_size
    sizes["max_positions"] = sizes["max_positions"] if positions == "learned" else 0
    return Model(
        activation=activation,
        tied=bool(config.get("tie_word_embeddings", family in ("gpt2", "mpt"))),
        qkv_bias=bool(config.get("attention_bias", family in ("gpt2", "gpt_neox", "qwen2", "qwen2_moe"))),
        mlp_bias=bool(config.get("mlp_bias", family in ("gpt2", "gpt_neox"))),
        positions=positions,
        **(sizes | _windows(config, sizes["window"]) | _experts(config, sizes)),
    )


def _whole(config: Mapping[str, Any], key: str, least: int = 0, limit: int = MAX_SIZE) -> int:
    """Return a whole number of the file; 0 where the key is missing or null."""
    value = config.get(key)
    if value is None:
        return 0
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not is_whole or not least <= value <= limit:
        raise UnsupportedModel(f"{key} is {value!r}: must be a whole number from {least} to {limit:,}")
    return int(value)


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise UnsupportedModel(f"layer_types is {kinds!r}: must be a list with the kind of each layer")
    return [str(kind) for kind in kinds]


def _windows(config: Mapping[str, Any], window: int) -> dict[str, int]:
    """Return the window, and after how many layers one attends to the whole sequence; 0 if none does."""
    kinds = _layer_types(config)
    is_used = "sliding_attention" in kinds if kinds else config.get("use_sliding_window", True)
    if not window or not is_used:
        return {"window": 0, "window_every": 0}
    full = kinds.count("full_attention")
    return {"window": window, "window_every": round(len(kinds) / full) if full else 0}


def _experts(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of experts and the layers without them; the dense size is 0 where every layer has experts."""
    if not sizes["experts"]:
        return {}
    if not 1 <= sizes["experts_per_token"] <= sizes["experts"]:
        raise UnsupportedModel(
            f"num_experts_per_tok is {sizes['experts_per_token']}: must be from 1 to the {sizes['experts']} experts"
        )
    width = sizes["expert_intermediate_size"] or sizes["intermediate_size"]
    shared = sizes["shared_expert_intermediate_size"] or _whole(config, "n_shared_experts") * width
    dense_layers = _whole(config, "first_k_dense_replace", limit=sizes["layers"])
    return {
        "expert_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "dense_layers": dense_layers,
        "intermediate_size": sizes["intermediate_size"] if dense_layers else 0,
    }
