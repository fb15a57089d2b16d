"""Checkpoints are exchanged with transformers in both directions, with equal logits."""

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.llama import Llama
from tests.support.parallel_ranks import build_llama
from workloads.api.contract import Rank
from workloads.api.trial import run_trial
from workloads.llama import checkpoint
from workloads.llama.experts import Experts
from workloads.llama.model import rope_table
from workloads.models.model import MODELS, Model
from workloads.models.routing import NATURAL

transformers = pytest.importorskip("transformers")

TINY = MODELS["llama_tiny"]
EXPERTS = replace(MODELS["experts_tiny"], shared_expert_intermediate_size=0, shared_expert_gate=False)
SHAPES = {
    "llama": TINY,
    "tied with rope scaling": replace(TINY, tied=True, rope_factor=32.0),
    "qwen2": replace(TINY, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6),
    "qwen3": replace(TINY, qk_norm="head", head_size=64),
    "mixtral": replace(EXPERTS, qk_norm="", dense_layers=(), intermediate_size=0),
    "olmoe": replace(EXPERTS, qk_norm="all", renormalized=False, dense_layers=(), intermediate_size=0),
    "qwen3_moe": EXPERTS,
    "glm4_moe": replace(
        EXPERTS,
        shared_expert_intermediate_size=32,
        qkv_bias=True,
        qk_norm="",
        router_scores="sigmoid",
        expert_groups=4,
        groups_per_token=2,
        router_scale=2.5,
        rotary_share=0.5,
        head_size=32,
    ),
    "gpt_oss": replace(
        EXPERTS,
        qk_norm="",
        qkv_bias=True,
        gpt_oss=True,
        dense_layers=(),
        intermediate_size=0,
        window=48,
        full_layers=(1,),
        other_vectors=EXPERTS.hidden_size
        + EXPERTS.heads
        + EXPERTS.experts * (2 * EXPERTS.expert_intermediate_size + EXPERTS.hidden_size + 1),
    ),
    "qwen2_moe": replace(
        EXPERTS,
        qk_norm="",
        renormalized=False,
        qkv_bias=True,
        shared_expert_intermediate_size=96,
        shared_expert_gate=True,
    ),
}


def logits(shape: Model, folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of `Llama` with a checkpoint's weights."""
    model = Llama(shape)
    read = checkpoint.open_reader(folder, shape)
    with torch.no_grad():
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(".bias")]
        for name, tensor in (*model.named_parameters(), *(biases if shape.router_scores == "sigmoid" else ())):
            tensor.copy_(read(name))
        x = model.embedding(tokens)
        for block in model.blocks:
            x = block(x, rope_table(shape, tokens.shape[1], torch.device("cpu")))
        return model.lm_head(model.norm(x))


def load_with_transformers(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_checkpoint_of_transformers_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    shape = SHAPES[kind]
    torch.manual_seed(0)
    given = checkpoint.build_config(shape, checkpoint.find_family(shape))
    config = transformers.AutoConfig.for_model(**given, max_position_embeddings=131072)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokens = torch.randint(0, shape.vocabulary, (2, 200))
    expected = load_with_transformers(tmp_path)(tokens).logits.detach()
    torch.testing.assert_close(logits(shape, tmp_path, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SHAPES)
def test_transformers_reads_a_saved_checkpoint(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES[kind]
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 300_000)
    model = build_llama(shape)
    with torch.no_grad():  # nonzero biases and norms other than 1, so that a lost one changes the logits
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if shape.router_scores == "sigmoid":  # of its family the bias is a tensor of the checkpoint
        weights |= {name: 0.1 * torch.randn(8) for name, _ in model.named_buffers() if name.endswith(".bias")}
    checkpoint.save(tmp_path, shape, weights.items())
    with pytest.raises(ValueError, match="rope_"):
        checkpoint.open_reader(tmp_path, replace(shape, rope_factor=2.0))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    read = checkpoint.open_reader(tmp_path, shape)
    for name, weight in weights.items():
        assert torch.equal(read(name), weight)
    tokens = torch.randint(0, shape.vocabulary, (1, 50))
    expected = load_with_transformers(tmp_path)(tokens).logits.detach()
    torch.testing.assert_close(logits(shape, tmp_path, tokens), expected, rtol=1e-4, atol=1e-4)


def test_no_more_than_a_file_of_weights_is_held_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(TINY, layers=40)
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 4 * 10**6)
    alive, drawn, most = set[int](), 0, 0

    def draw() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal drawn, most
        with torch.device("meta"):
            sizes = {name: parameter.shape for name, parameter in Llama(shape).named_parameters()}
        for drawn, (name, size) in enumerate(sizes.items(), 1):
            weight = torch.zeros(size)
            alive.add(drawn)
            weakref.finalize(weight.untyped_storage(), alive.discard, drawn)
            most = max(most, len(alive))
            yield name, weight
            del weight

    checkpoint.save(tmp_path, shape, draw())
    files = sorted(path.name for path in tmp_path.glob("*"))
    assert len(files) > 8 and not any(name.endswith(".part") for name in files)
    assert most < 2 * drawn / (len(files) - 2)
    read = checkpoint.open_reader(tmp_path, shape)
    assert not read("blocks.39.qkv.weight").any()


def test_a_missing_checkpoint_and_one_of_another_shape_are_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, TINY, [("norm.weight", torch.ones(TINY.hidden_size))])
    with pytest.raises(ValueError, match=r"has no \*.safetensors files with a config.json"):
        checkpoint.open_reader(tmp_path / "nowhere", TINY)
    with pytest.raises(ValueError, match="layers is 2, the model's is 5; vocabulary is 512, the model's is 9"):
        checkpoint.open_reader(tmp_path, replace(TINY, layers=5, vocabulary=9))


def test_a_checkpoint_of_another_family_that_computes_the_same_is_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, TINY, [("norm.weight", torch.ones(TINY.hidden_size))])
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": None,
        "sliding_window": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(checkpoint.open_reader(tmp_path, TINY)("norm.weight"), torch.ones(TINY.hidden_size))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2}))
    with pytest.raises(ValueError, match="does not fit the model: heads is 2"):
        checkpoint.open_reader(tmp_path, TINY)


def test_no_bias_of_a_router_is_lost(tmp_path: Path) -> None:
    layer = SHAPES["mixtral"].layers - 1
    bias = {f"blocks.{layer}.experts.bias": torch.ones(8)}
    with pytest.raises(ValueError, match=f"blocks.{layer}.experts.bias is not 0, and a checkpoint of mixtral has no"):
        checkpoint.save(tmp_path, SHAPES["mixtral"], bias.items())
    with pytest.raises(ValueError, match=r"no blocks\.1\.experts\.bias: a checkpoint of glm4_moe has"):
        checkpoint.save(tmp_path, SHAPES["glm4_moe"], [])
    experts = Experts(SHAPES["glm4_moe"])
    experts.load_state_dict(experts.state_dict() | {"bias": torch.ones(8)})
    experts.start(NATURAL, 4, torch.device("cpu"))
    assert torch.equal(experts.bias, torch.ones(8))


def test_a_model_that_no_family_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint of mixtral has this model's renormalized=False"):
        checkpoint.save(tmp_path, replace(SHAPES["mixtral"], renormalized=False), [])


def test_training_resumes_from_a_saved_checkpoint(tmp_path: Path) -> None:
    parameters = {"model": "llama_tiny", "sequence_length": 32, "sequences_per_step": 4, "dtype": "fp32", "warmup": 0}
    budgets = {"device_gib": 1.0, "host_gib": 0.0, "learning_rate": 3e-3}
    first = run_trial("offload", {**parameters, **budgets, "steps": 15, "save_to": str(tmp_path)}, Rank())
    second = run_trial("offload", {**parameters, **budgets, "steps": 1, "checkpoint": str(tmp_path)}, Rank())
    assert second.metrics["first_loss"] < first.metrics["first_loss"] - 0.05
