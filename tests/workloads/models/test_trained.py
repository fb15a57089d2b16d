"""Models that this project trains: what a config.json says of their blocks, and what is refused by name."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from workloads.models.hugging_face import UnsupportedModel
from workloads.models.model import MODELS
from workloads.models.trained import load_trained_model, read_trained

# Qwen/Qwen3-30B-A3B config.json
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GLM = QWEN3_30B_A3B | {
    "model_type": "glm4_moe",
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
}
del GLM["num_experts"], GLM["norm_topk_prob"]
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS_20B = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN | {"original_max_position_embeddings": 4096},
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(("name", "config"), [("qwen3_30b_a3b", QWEN3_30B_A3B), ("gpt_oss_20b", GPT_OSS_20B)])
def test_a_file_describes_all_that_the_trainer_computes(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    read, named = load_trained_model(str(path)), MODELS[name]
    assert {item.name: getattr(read, item.name) for item in fields(read)} == {
        item.name: getattr(named, item.name) for item in fields(named)
    }


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for hidden_size in (2048, 1024):
        path.write_text(json.dumps(QWEN3_30B_A3B | {"hidden_size": hidden_size}))
        assert load_trained_model(str(path)).hidden_size == hidden_size


def test_routers_with_groups_are_read() -> None:
    model = read_trained(GLM)
    assert (model.router_scores, model.renormalized, model.router_scale) == ("sigmoid", True, 2.5)
    assert (model.expert_groups, model.groups_per_token, model.dense_layers) == (4, 2, (0,))
    assert (model.rotary_share, model.qk_norm, model.shared_expert_intermediate_size) == (0.5, "", 768)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "olmo2"}, "does not compute blocks of model_type olmo2. Available: llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu: it has to be silu"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "layers with a window of 4096 tokens"),
        ({"attention_bias": True}, "biases of the attention's output"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn: it has to be default or llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "this rope_scaling"),
        (GLM | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1: it has to be 0"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0: must be a number above 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1: must be true or false"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_trained(QWEN3_30B_A3B | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": False}, "gpt-oss without biases of attention: attention_bias has to be true"),
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0: it has to be 7.0"),
        ({"rope_scaling": None}, "rope_type=default: it has to be yarn"),
        ({"rope_scaling": YARN | {"factor": 8.0}}, "this rope_scaling"),
        ({"rope_scaling": GPT_OSS_20B["rope_scaling"] | {"attention_factor": 1.0}}, "this rope_scaling"),
    ],
)
def test_other_blocks_of_gpt_oss_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_trained(GPT_OSS_20B | changes)


def test_an_unknown_name_has_a_suggestion() -> None:
    with pytest.raises(UnsupportedModel, match=r"'qwen3_30b' is not trained here.*Did you mean qwen3_30b_a3b"):
        load_trained_model("qwen3_30b")
