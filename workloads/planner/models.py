"""Models by the planner's table, or by their Hugging Face `config.json`."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from workloads.planner.job import Activation, Model, Positions

TABLE = Path(__file__).parent / "tables" / "models.csv"
FAMILIES: dict[str, tuple[Activation, Positions]] = {
    "llama": ("swiglu", "rope"),
    "mistral": ("swiglu", "rope"),
    "qwen2": ("swiglu", "rope"),
    "qwen3": ("swiglu", "rope"),
    "gpt_neox": ("gelu", "rope"),
    "gpt2": ("gelu", "learned"),
    "mpt": ("gelu", "alibi"),
    "nemotron": ("squared_relu", "rope"),
    "qwen2_moe": ("swiglu", "rope"),
    "qwen3_moe": ("swiglu", "rope"),
    "mixtral": ("swiglu", "rope"),
    "gpt_oss": ("swiglu", "rope"),
    "deepseek": ("swiglu", "rope"),
}
UNSUPPORTED_FAMILIES = {
    "qwen3_next": "three of four layers are linear attention",
    "qwen3_5": "most layers are linear attention",
    "nemotron_h": "layers are Mamba-2",
    "mamba": "layers are Mamba",
    "mamba2": "layers are Mamba-2",
    "jamba": "layers are Mamba",
    "bamba": "layers are Mamba-2",
    "falcon_h1": "layers are Mamba-2",
    "granitemoehybrid": "layers are Mamba-2",
    "kimi_linear": "layers are linear attention",
    "minimax": "layers are linear attention",
    "deepseek_v2": "keys and values are compressed (multi-head latent attention)",
    "deepseek_v3": "keys and values are compressed (multi-head latent attention)",
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


class UnsupportedModel(ValueError):
    """A model that the planner does not know, with the reason in a line."""


@cache
def known_models() -> dict[str, Model]:
    """Return the models of the planner's table by name."""
    with TABLE.open(newline="") as lines:
        return {row["name"]: _from_row(row) for row in csv.DictReader(lines)}


def load_model(name: str) -> Model:
    """Return a model by its name in the table, or by the path of a Hugging Face `config.json`.

    Raises:
        UnsupportedModel: it is neither, or its architecture is not modelled.
    """
    if name in known_models():
        return known_models()[name]
    if name.endswith(".json"):
        return read_hugging_face(_read_json(Path(name)), name)
    if name in UNSUPPORTED_FAMILIES:
        raise UnsupportedModel(f"model {name} is not modelled: {UNSUPPORTED_FAMILIES[name]}")
    close = difflib.get_close_matches(name, known_models(), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UnsupportedModel(
        f"unknown model '{name}'. Available: {', '.join(known_models())}, or a path to a config.json.{hint}"
    )


def read_hugging_face(config: Mapping[str, Any], name: str = "config.json") -> Model:
    """Return the sizes in a Hugging Face configuration.

    Raises:
        UnsupportedModel: its family is not modelled, or a size is missing.
    """
    family = str(config.get("model_type", ""))
    _check_family(family, config, name)
    activation, positions = FAMILIES[family]
    sizes = {field: _size(config, keys) for field, keys in NAMES.items()}
    missing = [NAMES[key][0] for key in ("layers", "hidden_size", "heads", "vocabulary") if not sizes[key]]
    if missing:
        raise UnsupportedModel(f"{name} has no {', '.join(missing)}")
    hidden_size, heads = sizes["hidden_size"], sizes["heads"]
    sizes["kv_heads"] = _kv_heads(config, sizes["kv_heads"] or heads)
    sizes["head_size"] = sizes["head_size"] or hidden_size // heads
    if not sizes["intermediate_size"]:
        sizes["intermediate_size"] = int(config.get("expansion_ratio") or 4) * hidden_size
    sizes["max_positions"] = sizes["max_positions"] if positions == "learned" else 0
    return Model(
        activation=activation,
        tied=bool(config.get("tie_word_embeddings", family in ("gpt2", "mpt"))),
        qkv_bias=bool(config.get("attention_bias", family in ("gpt2", "gpt_neox", "qwen2", "qwen2_moe"))),
        mlp_bias=bool(config.get("mlp_bias", family in ("gpt2", "gpt_neox"))),
        positions=positions,
        **(sizes | _windows(config, sizes["window"]) | _experts(config, sizes)),
    )


def _check_family(family: str, config: Mapping[str, Any], name: str) -> None:
    if family in UNSUPPORTED_FAMILIES:
        raise UnsupportedModel(f"{name}: {family} is not modelled: {UNSUPPORTED_FAMILIES[family]}")
    kinds = set(config.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModel(f"{name}: layers of kind {', '.join(sorted(kinds))} are not modelled")
    if family not in FAMILIES:
        raise UnsupportedModel(f"{name}: model_type '{family}' is not modelled. Available: {', '.join(FAMILIES)}")


def _size(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    return next((int(config[key]) for key in keys if config.get(key)), 0)


def _kv_heads(config: Mapping[str, Any], kv_heads: int) -> int:
    attention = config.get("attn_config") or {}
    return int(attention.get("kv_n_heads") or (1 if attention.get("attn_type") == "multiquery_attention" else kv_heads))


def _windows(config: Mapping[str, Any], window: int) -> dict[str, int]:
    """Return the window, and after how many layers one attends to the whole sequence; 0 if none does."""
    kinds = config.get("layer_types") or []
    is_used = "sliding_attention" in kinds if kinds else config.get("use_sliding_window", True)
    if not window or not is_used:
        return {"window": 0, "window_every": 0}
    full = kinds.count("full_attention")
    return {"window": window, "window_every": round(len(kinds) / full) if full else 0}


def _experts(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of experts and the layers without them; the dense size is 0 where every layer has experts."""
    if not sizes["experts"]:
        return {}
    width = sizes["expert_intermediate_size"] or sizes["intermediate_size"]
    shared = sizes["shared_expert_intermediate_size"] or int(config.get("n_shared_experts") or 0) * width
    dense_layers = int(config.get("first_k_dense_replace") or 0)
    return {
        "expert_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "dense_layers": dense_layers,
        "intermediate_size": sizes["intermediate_size"] if dense_layers else 0,
    }


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UnsupportedModel(f"model {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedModel(f"model {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"model {path} is not a Hugging Face configuration")
    return content


def _from_row(row: Mapping[str, str]) -> Model:
    kinds = {field.name: field.type for field in fields(Model)}
    values: dict[str, Any] = {}
    for name, text in row.items():
        if name in kinds:
            values[name] = text == "true" if kinds[name] == "bool" else int(text) if kinds[name] == "int" else text
    return Model(**values)
