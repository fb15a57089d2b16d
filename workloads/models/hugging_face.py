"""Load models by name, or from the sizes in their Hugging Face `config.json`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workloads.models.families import (
    FAMILIES,
    SHAPE_WORDS,
    TEXT_PARTS,
    UNSUPPORTED_FAMILIES,
    VALUES,
    WITHOUT_SHAPE,
    Config,
    Family,
)
from workloads.models.model import MODELS, Model
from workloads.suggestions import hint, suggest

REQUIRED = ("layers", "hidden_size", "heads", "vocabulary")
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
NUMBERS, FACTORS, EPSILONS = VALUES["least"], VALUES["factors"], VALUES["epsilons"]
COMPRESSION: dict[str, int] = VALUES["compression"]
KINDS: dict[str, Any] = {"a mapping": Mapping, "text": str}


class UnsupportedModel(ValueError):
    """Raised for a model that the planner does not support; the message gives the reason in one line."""


def load_model(name: str) -> Model:
    """Return a model, given its name or the path of a Hugging Face `config.json`. Raises UnsupportedModel."""
    if name in MODELS:
        return MODELS[name]
    if name.endswith(".json"):
        return read_hugging_face(read_config(name))
    for family, reason in UNSUPPORTED_FAMILIES.items():
        if name.startswith(family):
            raise UnsupportedModel(f"{name} is not modelled: {reason}")
    close = suggest(name.rpartition("/")[2], [*MODELS, "a path to a config.json"])
    raise UnsupportedModel(f"unknown model '{name}'. {close}")


def read_config(path: str) -> Config:
    """Return the content of a `config.json`. Raises UnsupportedModel."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise UnsupportedModel(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedModel(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel("not a Hugging Face configuration: must be a JSON object")
    return content


def read_hugging_face(config: Config) -> Model:
    """Return the model that a config describes. Raises UnsupportedModel, also if a size is missing or impossible."""
    name, given, remark = _text_part(config)
    if name in UNSUPPORTED_FAMILIES:
        raise UnsupportedModel(f"{name} is not modelled: {UNSUPPORTED_FAMILIES[name]}")
    if name not in FAMILIES:
        what = f"model_type '{name}' is not modelled" if name else "no model_type"
        raise UnsupportedModel(f"{what}. {suggest(name, [*FAMILIES, *TEXT_PARTS])}")
    family = FAMILIES[name]
    _check_keys(name, given)
    _check_values(family, given)
    read = {key: given[key] for key in family.keys & given.keys() if given[key] is not None or key not in NUMBERS}
    config = {**family.defaults, **read}
    adapted = family.adapt(config)
    config |= adapted
    sizes = _read_sizes(family, config)
    sizes |= _experts(family, config, sizes)
    qkv_bias, output_bias, mlp_bias = (
        bool(config.get(bias)) if isinstance(bias, str) else bias
        for bias in (family.qkv_bias, family.output_bias, family.mlp_bias)
    )
    return Model(
        activation=family.activation,
        positions=adapted.get("positions", family.positions),
        tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=qkv_bias,
        mlp_bias=mlp_bias,
        norms=adapted.get("norms", family.norms),
        norm_vectors=family.norm_vectors,
        qk_norm=family.qk_norm if config.get("use_qk_norm", True) else "",
        other_vectors=_other_vectors(family, config, sizes, output_bias),
        shared_expert_gate=family.shared_expert_gate,
        attention_gate=family.attention_gate,
        expert_groups=_whole(given, "n_group") or 1,
        groups_per_token=_whole(given, "topk_group") or 1,
        **_rotary_and_epsilon(family, given, remark),
        **(sizes | _windows(name, config, sizes) | _linear_layers(family, config, sizes["layers"])),
        **_indexers(family, config, sizes),  # after the check of the layers' kinds
    )


def _rotary_and_epsilon(family: Family, given: Config, remark: str) -> dict[str, Any]:
    """Return the rotary base, Llama 3.1's scaling of rotary frequencies, the norms' epsilon, and a remark."""
    rotary = dict(given.get("rope_scaling") or {}) | dict(given.get("rope_parameters") or {})
    # Gemma 3, OLMo 3 and DeepSeek-V4 have one set per kind of layer.
    rotary = next((rotary[kind] for kind in ("full_attention", "main") if kind in rotary), rotary)
    if not isinstance(rotary, Mapping):
        raise UnsupportedModel(f"full_attention is {rotary!r}: must be a mapping")
    values = {**rotary, **given}
    theta = next((values[key] for key in ("rope_theta", "rotary_emb_base") if values.get(key)), family.rope_theta)
    epsilon = next((given[key] for key in EPSILONS if given.get(key)), family.norm_eps)
    numbers = {"rope_theta": theta, "epsilon of norms": epsilon}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    factor = rotary.get("factor") if kind == "llama3" else None
    partial = values.get("partial_rotary_factor", values.get("rotary_pct", 1.0))
    left = [f"the {kind} scaling of rotary embeddings"] if kind not in ("default", "llama3") else []
    left += [f"rotary embeddings being of {partial} of a head's features alone"] if partial != 1 else []
    return {
        "rope_theta": read_number(numbers, "rope_theta"),
        "norm_eps": read_number(numbers, "epsilon of norms"),
        "rope_factor": factor,
        "remark": "; ".join([*([remark] if remark else []), *(f"without {text}" for text in left)]),
    }


def _text_part(config: Config) -> tuple[str, Config, str]:
    name = str(config.get("model_type") or "")
    if name not in TEXT_PARTS:
        return name, config, ""
    text = config.get("text_config")
    if text is None:  # older files are flat
        text = {key: value for key, value in config.items() if key != "vision_config"}
    if not isinstance(text, Mapping):
        raise UnsupportedModel(f"text_config is {text!r}: must be a mapping")
    if (is_tied := config.get("tie_word_embeddings")) is not None:
        text = {**text, "tie_word_embeddings": is_tied}
    part = str(text.get("model_type") or name)
    return TEXT_PARTS.get(part, part), text, f"the text part of {name}, without its vision part"


def _check_keys(name: str, config: Config) -> None:
    """Raise UnsupportedModel for a key that may change shapes but that this module ignores."""
    known = FAMILIES[name].keys
    ignored = {"sliding_window", "max_window_layers"} if config.get("use_sliding_window") is False else set()
    for key, value in config.items():
        is_shape = SHAPE_WORDS.search(key) and not WITHOUT_SHAPE.fullmatch(key)
        if value and is_shape and key not in known | ignored:
            close = hint(key, sorted(known))
            raise UnsupportedModel(f"{key} may change shapes, and is not known of model_type {name}.{close}")


def _check_values(family: Family, config: Config) -> None:
    for key, least in NUMBERS.items():
        _whole(config, key, least)
    for key in family.keys.intersection(FACTORS, config):
        if not _whole(config, key, 1):
            raise UnsupportedModel(f"{key} is null: must be a whole number of at least 1")
    for key in family.flags & config.keys():
        if not isinstance(config[key], bool | None):
            raise UnsupportedModel(f"{key} is {config[key]!r}: must be true or false")
    for key in VALUES["lists"]:
        value = config.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or any(type(item) is not int or not 0 <= item <= MAX_LAYERS for item in value):
            raise UnsupportedModel(f"{key} is {value!r}: must be a list of whole numbers")
    for key, kind in VALUES["kinds"].items():
        if not isinstance(config.get(key), KINDS[kind] | None):
            raise UnsupportedModel(f"{key} is {config[key]!r}: must be {kind}")
    for key, known in VALUES["listed"].items():
        value = [] if config.get(key) is None else config[key]
        if not isinstance(value, list) or any(item not in known for item in value):
            raise UnsupportedModel(f"{key} is {value!r:.60}: must be a list of {', '.join(map(str, known))}")


def _read_sizes(family: Family, config: Config) -> dict[str, Any]:
    """Return each size, read from the first of its keys that is set in the file; 0 if none of them is."""
    sizes = {}
    for size, keys in family.size_names.items():
        limit, least = MAX_LAYERS if size == "layers" else MAX_SIZE, 1 if size in REQUIRED else 0
        sizes[size] = next((_whole(config, key, least, limit) for key in keys if config.get(key) is not None), 0)
    _require(family, sizes, REQUIRED)
    heads, hidden_size, kv_heads = sizes["heads"], sizes["hidden_size"], sizes["kv_heads"] or sizes["heads"]
    if sizes["head_size"] * heads % sizes.get("output_groups", 1):
        raise UnsupportedModel(f"o_groups {sizes['output_groups']} does not divide the features of {heads} heads")
    if heads % kv_heads:
        raise UnsupportedModel(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if not sizes["head_size"] and hidden_size % heads:
        raise UnsupportedModel(
            f"num_attention_heads {heads} does not divide hidden_size {hidden_size}, and there is no head_dim"
        )
    expansion = _whole(config, "expansion_ratio") or family.expansion
    return sizes | {
        "kv_heads": kv_heads,
        "head_size": sizes["head_size"] or hidden_size // heads,
        "intermediate_size": sizes["intermediate_size"] or expansion * hidden_size,
        "max_positions": sizes["max_positions"] if family.positions == "learned" else 0,
    }


def _require(family: Family, sizes: Mapping[str, int], names: Iterable[str]) -> None:
    keys = family.size_names
    missing = [keys[name][0] for name in names if not sizes[name]]
    if missing:
        required = ", ".join(keys[name][0] for name in names)
        raise UnsupportedModel(f"no {', '.join(missing)}. Required: {required}")


def _experts(family: Family, config: Config, sizes: dict[str, Any]) -> dict[str, Any]:
    kinds, listed = config.get("mlp_layer_types") or (), config.get("moe_layers") or ()
    if len(kinds) not in (0, sizes["layers"]) or any(layer >= sizes["layers"] for layer in listed):
        key = "mlp_layer_types" if kinds else "moe_layers"
        raise UnsupportedModel(f"{key} is {config[key]!r:.60}: must be of {sizes['layers']} layers")
    dense = tuple(layer for layer in range(sizes["layers"]) if not _has_experts(family, config, layer))
    if "experts" not in sizes or len(dense) == sizes["layers"]:
        _require(family, sizes, ("intermediate_size",))
        return {name: 0 for name in sizes if "expert" in name}
    if family.split_blocks:
        dense = tuple(layer for layer in dense if config["layer_types"][layer] == "mlp")
    needed = [name for name in family.size_names if "expert" in name and name != "expert_hidden_size"]
    _require(family, sizes, needed + ["intermediate_size"] * bool(dense))
    if not 1 <= sizes["experts_per_token"] <= sizes["experts"]:
        given, most = sizes["experts_per_token"], sizes["experts"]
        raise UnsupportedModel(f"num_experts_per_tok is {given}: must be from 1 to the {most} experts")
    shared = _whole(config, "n_shared_experts") * sizes["expert_intermediate_size"]
    return {
        "shared_expert_intermediate_size": sizes.get("shared_expert_intermediate_size", shared),
        "dense_layers": dense,
        "intermediate_size": sizes["intermediate_size"] if dense else 0,
    }


def _has_experts(family: Family, config: Config, layer: int) -> bool:
    if family.split_blocks:
        return bool(config["layer_types"][layer] == "moe")
    if config.get("mlp_layer_types"):
        return bool(config["mlp_layer_types"][layer] != "dense")
    if config.get("moe_layers") is not None:
        return layer in config["moe_layers"]
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    is_period = (layer + 1) % step == 0 and layer % (config.get("moe_layer_freq") or 1) == 0
    dense = config.get("mlp_only_layers") or ()
    return is_period and layer not in dense and layer >= _whole(config, "first_k_dense_replace")


def _windows(name: str, config: Config, sizes: Mapping[str, Any]) -> dict[str, Any]:
    family, layers = FAMILIES[name], sizes["layers"]
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or len(kinds) not in (0, layers):
        raise UnsupportedModel(f"layer_types is {kinds!r:.60}: must be a list with the kind of each of {layers} layers")
    known = {*(family.windowed if family.window else ()), *(() if "streams" in family.names else ("full_attention",))}
    known |= ({"linear_attention"} if family.linear else set()) | ({"moe", "mlp"} if family.split_blocks else set())
    if other := {str(kind) for kind in kinds} - known:
        raise UnsupportedModel(f"layer_types: layers of kind {', '.join(sorted(other))} are not modelled in {name}")
    rotary = config.get("no_rope_layers")
    if rotary and len(rotary) != layers:
        raise UnsupportedModel(f"no_rope_layers has {len(rotary)} layers, num_hidden_layers is {layers}")
    if not family.window or not sizes["window"] or not config.get("use_sliding_window", True):
        return {"window": 0}
    is_full = [kind == "full_attention" for kind in kinds]
    is_full = is_full or [not family.window(config, layer) for layer in range(layers)]
    if all(is_full):
        return {"window": 0}
    full_layers = tuple(layer for layer in range(layers) if is_full[layer])
    return {"full_layers": full_layers, "chunked_window": "chunked_attention" in family.windowed}


def _indexers(family: Family, config: Config, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers without an indexer of their own, and the tokens per compressed key in each layer."""
    if "index_heads" not in family.names:
        return {}
    _require(family, sizes, ("query_rank",))
    layers = sizes["layers"]
    if "streams" in family.names:
        _require(family, sizes, ("window",))
        given = config["compress_rates"] or {}
        rates = COMPRESSION | {kind: _whole(given, kind, 1) for kind in given}
        named = {rate: kind for kind, rate in COMPRESSION.items()}
        # Files have the rate of each layer, followed by those of the layers for multi-token prediction.
        kinds = config.get("layer_types") or [named[rate] for rate in config["compress_ratios"] or ()][:layers]
        if len(kinds) < layers:
            raise UnsupportedModel(f"compress_ratios is {config['compress_ratios']!r:.60}: must be of {layers} layers")
        unindexed = (layer for layer in range(layers) if kinds[layer] != "compressed_sparse_attention")
        return {"compression": tuple(rates.get(kind, 0) for kind in kinds), "unindexed_layers": tuple(unindexed)}
    kinds = config["indexer_types"] or config["index_topk_pattern"]
    if kinds and len(kinds) != layers:
        raise UnsupportedModel(f"the kinds of indexers are {kinds!r:.60}: must be of {layers} layers")
    period, before = max(1, _whole(config, "index_topk_freq")), _whole(config, "index_skip_topk_offset") - 1
    is_shared = [kind in ("S", "shared") for kind in kinds or ()]
    is_shared = is_shared or [max(0, layer - before) % period > 0 for layer in range(layers)]
    return {"unindexed_layers": tuple(layer for layer in range(layers) if is_shared[layer])}


def _linear_layers(family: Family, config: Config, layers: int) -> dict[str, Any]:
    if family.linear is None:
        return {}
    kinds = config.get("layer_types") or []
    is_linear = [kind == "linear_attention" for kind in kinds]
    is_linear = is_linear or [family.linear(config, layer) for layer in range(layers)]
    return {
        "linear_layers": tuple(layer for layer in range(layers) if is_linear[layer]),
        "split_blocks": family.split_blocks,
        "mlp_only_layers": tuple(layer for layer, kind in enumerate(kinds) if kind in ("moe", "mlp")),
    }


def _other_vectors(family: Family, config: Config, sizes: Mapping[str, Any], output_bias: bool) -> int:
    """Return the number of elements in a block's sinks, norms of latent features, and biases that have no field."""
    hidden_size = sizes["hidden_size"]
    total = hidden_size * output_bias + sizes["heads"] * family.sinks
    if "kv_rank" in family.names:  # norms of the latent features, and biases of their projections
        latent = sizes["query_rank"] + sizes["kv_rank"]
        total += latent + bool(config.get("attention_bias")) * (latent + sizes["rope_size"])
    if "streams" in family.names:  # norms of the queries' rank and of keys, and hyper-connections' biases and scales
        streams = sizes["streams"]
        total += sizes["query_rank"] + sizes["head_size"] + 2 * (streams * (streams + 2) + 3)
    if family.expert_bias:  # biases of each expert's gate, up and down projections, and of the router
        total += sizes["experts"] * (2 * sizes["expert_intermediate_size"] + hidden_size + 1)
    return total


def _whole(config: Mapping[str, Any], key: str, least: int = 0, limit: int = MAX_SIZE) -> int:
    value = config.get(key)
    if value is None:
        return 0
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not is_whole or not least <= value <= limit:
        raise UnsupportedModel(f"{key} is {value!r}: must be a whole number from {least} to {limit:,}")
    return int(value)


def read_number(config: Config, key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnsupportedModel(f"{key} is {value!r}: must be a number above 0")
    return float(value)
