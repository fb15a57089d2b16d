"""Plans of models from files: what is printed of the model, and what is refused before anything is searched."""

import json
from pathlib import Path
from typing import Any

import pytest

from sweeper.commands.plan.main import COMMAND
from workloads.api.errors import UserInputError

WORDS = ["hardware=h100", "gpus=8", "trainer=megatron", "tp=1", "cp=1", "pp=1", "micro_batch=1", "sequence_length=1024"]
SIZES = {
    "hidden_size": 1280,
    "intermediate_size": 3584,
    "num_hidden_layers": 20,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "vocab_size": 50000,
}


def plan(config: dict[str, Any], folder: Path) -> int:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return COMMAND.run([f"model={path}", *WORDS])


def test_a_plan_prints_what_the_model_has_and_multiplies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "mistral3", "text_config": SIZES | {"sliding_window": None}, "vision_config": {"depth": 2}}
    assert plan(config, tmp_path) == 0
    text = " ".join(capsys.readouterr().out.split())
    matrices = 20 * (2 * 1280 * 64 * (20 + 4) + 3 * 1280 * 3584) + 50000 * 1280
    total = matrices + 50000 * 1280 + 41 * 1280
    assert f"{total / 1e9:.4g} B parameters, {matrices / 1e9:.4g} B active" in text
    assert f"{(6 * matrices + 20 * 12 * 512 * 1280) / 1e9:.4g} GFLOP" in text
    assert "the text part of mistral3" in text


def test_a_key_that_may_change_shapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="num_experts may change shapes, and is not known of model_type olmo2"):
        plan({"model_type": "olmo2", "num_experts": 16, **SIZES}, tmp_path)
