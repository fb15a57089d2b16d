"""The models that `workload=parallel` trains: the models in the table, and any `config.json` with a supported
block."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from workloads.models.families import FAMILIES, Config
from workloads.models.hugging_face import UnsupportedModel, read_config, read_hugging_face, read_number
from workloads.models.model import TRAINED_MODELS, Model
from workloads.suggestions import hint

TRAINED_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss"),
)
# The values of config keys that this project's blocks support. A file may omit these keys.
COMPUTED: dict[str, object] = {
    "hidden_act": "silu",
    "clip_qkv": None,
    **{"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    **dict.fromkeys(("attention_dropout", "router_jitter_noise", "num_nextn_predict_layers"), 0),
}


def load_trained_model(name: str) -> Model:
    """Return a model, given its name or `config.json`. Raises UnsupportedModel if no block supports it."""
    if name in TRAINED_MODELS:
        return TRAINED_MODELS[name]
    if not name.endswith(".json"):
        available = f"Available: {', '.join(TRAINED_MODELS)}, or the path of a config.json."
        raise UnsupportedModel(f"'{name}' is not trained here. {available}{hint(name, TRAINED_MODELS)}")
    return _read_content(json.dumps(read_config(name)))  # not cached by path, because the file may change


@cache
def _read_content(content: str) -> Model:
    return read_trained(json.loads(content))


def read_trained(config: Config) -> Model:
    """Return the model that a config describes, with everything that the trainer needs. Raises UnsupportedModel."""
    family = str(config.get("model_type"))
    if family not in TRAINED_FAMILIES:
        available = f"Available: {', '.join(TRAINED_FAMILIES)}"
        raise UnsupportedModel(f"workload=parallel does not compute blocks of model_type {family}. {available}")
    model = read_hugging_face(config)
    for reason in _obstacles(model, config):
        raise UnsupportedModel(f"workload=parallel does not compute {reason}")
    rope = read_rope(config)
    renormalized = FAMILIES[family].renormalized
    if isinstance(renormalized, str):
        renormalized = bool({**FAMILIES[family].defaults, **config}.get(renormalized))
    model = replace(
        model,
        rotary_share=read_number(rope, "partial_rotary_factor"),
        router_scores=FAMILIES[family].router_scores,
        renormalized=renormalized,
        router_scale=read_number({"routed_scaling_factor": 1.0, **config}, "routed_scaling_factor"),
        gpt_oss=family == "gpt_oss",
        remark="" if family == "gpt_oss" else model.remark,  # the trainer scales rotary embeddings
    )
    keys = (*(model.rope_scaling or {}), "attention_factor", "mscale", "mscale_all_dim")
    scaling = {key: rope[key] for key in keys if rope.get(key) is not None}
    if model.rope_scaling and scaling != model.rope_scaling:
        raise UnsupportedModel(f"workload=parallel does not compute this rope_scaling: {scaling}")
    return model


def read_rope(config: Config) -> dict[str, Any]:
    """Return the rotary embedding's keys: transformers 5 stores them in `rope_parameters`, version 4 in two places."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = config.get("partial_rotary_factor", 0.5 if config.get("model_type") == "glm4_moe" else 1.0)
    rope = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": share, **scaling}
    return rope | {"rope_type": scaling.get("rope_type", scaling.get("type", "default"))}


def _obstacles(model: Model, config: Config) -> Iterator[str]:
    yield from (
        f"{key}={config[key]}: it has to be {value}"
        for key, value in COMPUTED.items()
        if config.get(key, value) not in (value, None)
    )
    is_gpt_oss = config["model_type"] == "gpt_oss"
    if model.window and not is_gpt_oss:
        yield f"layers with a window of {model.window} tokens"
    if is_gpt_oss and not model.qkv_bias:
        yield "gpt-oss without biases of attention: attention_bias has to be true"
    if model.mlp_bias or (model.other_vectors and not is_gpt_oss):
        yield "biases of the attention's output or of the MLP: attention_bias and mlp_bias have to be false"
    if (kind := read_rope(config)["rope_type"]) not in (allowed := ("yarn",) if is_gpt_oss else ("default", "llama3")):
        yield f"rope_type={kind}: it has to be {' or '.join(allowed)}"
