"""Models of the table and of Hugging Face's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workloads.planner.models import UnsupportedModel, known_models, load_model, read_hugging_face
from workloads.planner.sizes import model_flops_per_token, parameters

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("model", "billions"),
    [("llama3_8b", 8.03), ("llama3_70b", 70.6), ("mpt_30b", 29.96), ("qwen3_30b_a3b", 30.5), ("grok1_314b", 315.7)],
)
def test_parameters(model: str, billions: float) -> None:
    assert parameters(load_model(model)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_flops_by_the_causal_convention() -> None:
    assert model_flops_per_token(load_model("llama3_8b"), 8192) / 1e9 == pytest.approx(51.47, abs=0.01)
    assert model_flops_per_token(load_model("llama3_70b"), 8192) / 1e9 == pytest.approx(449.22, abs=0.01)


def test_a_hugging_face_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    assert load_model(str(path)) == known_models()["llama3_8b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_next"}, "linear attention"),
        ({"model_type": "nemotron_h"}, "Mamba-2"),
        ({"model_type": "deepseek_v3"}, "latent attention"),
        ({"model_type": "other"}, "Available: llama"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_hugging_face(LLAMA_8B | changes)


def test_an_unknown_name_has_a_suggestion() -> None:
    with pytest.raises(UnsupportedModel, match="Did you mean llama3_70b"):
        load_model("llama3-70b")
