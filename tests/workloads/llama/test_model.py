"""The decoder: its parameter and FLOP counts against published ones, its computation against plain PyTorch."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.conftest import REPOSITORY
from tests.support.llama import Llama
from tests.support.parallel_ranks import build_llama
from workloads.llama.model import ChunkedLoss, apply_rotary_emb, rope_table
from workloads.models.flops import hardware_flops_per_token, model_flops_per_token
from workloads.models.model import MODELS

GOLDEN = Path(REPOSITORY).parent / "shared" / "reference" / "flops_golden.csv"


@pytest.mark.skipif(not GOLDEN.exists(), reason="needs shared/reference/flops_golden.csv beside the repository")
def test_parameters_and_flops_equal_the_golden_table() -> None:
    for row in csv.DictReader(GOLDEN.open()):
        shape = MODELS[row["model"]]
        assert shape.parameters == int(row["params"])
        assert model_flops_per_token(shape, int(row["seq_len"])) == int(row["causal_exact_flops_per_token"])


def test_llama_3_8b_has_its_published_size() -> None:
    assert MODELS["llama3_8b"].parameters == 8_030_261_248
    assert model_flops_per_token(MODELS["llama3_8b"], 8192) == pytest.approx(51.47e9, rel=1e-4)


def test_flops_of_blocks_and_output_layer_sum_to_those_of_the_model() -> None:
    shape = MODELS["llama3_8b"]
    block = model_flops_per_token(replace(shape, layers=1, vocabulary=0), 1024)
    head = model_flops_per_token(replace(shape, layers=0), 1024)
    assert shape.layers * block + head == pytest.approx(model_flops_per_token(shape, 1024))


def test_scores_are_computed_again_of_attended_tokens_alone() -> None:
    model = MODELS["gpt_oss_20b"]  # every other block has a window
    needed = model_flops_per_token(model, 8192)
    attention = needed - 6 * model.active_parameters  # two products, three times each
    assert hardware_flops_per_token(model, 8192, {}) - needed == pytest.approx(attention / 6)


def test_the_module_has_the_parameter_count_of_its_shape() -> None:
    assert sum(p.numel() for p in Llama(MODELS["llama_tiny"]).parameters()) == MODELS["llama_tiny"].parameters


@pytest.mark.parametrize("chunk_tokens", [7, 64])
def test_chunked_loss_and_gradients_equal_plain_cross_entropy(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16, dtype=torch.float64), torch.randn(50, 16, dtype=torch.float64)
    targets = torch.randint(0, 50, (64,))
    results = []
    for loss_function in (
        lambda h, w: ChunkedLoss.apply(h, w, targets, chunk_tokens, 3.0),
        lambda h, w: 3 * functional.cross_entropy(h @ w.t(), targets),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_function(h, w)
        loss.backward()
        results.append((loss.double(), h.grad, w.grad))
    for chunked, plain in zip(*results, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=1e-6)


def test_rotary_embedding_keeps_norms_and_scores_depend_only_on_distance() -> None:
    shape = MODELS["llama_tiny"]
    rope = rope_table(shape, 32, torch.device("cpu"))
    q, k = torch.randn(1, 1, 1, shape.head_size), torch.randn(1, 1, 1, shape.head_size)
    q, k = (apply_rotary_emb(x.expand(1, 1, 32, -1), rope) for x in (q, k))
    assert torch.allclose(q.norm(dim=-1), q[:, :, :1].norm(dim=-1))
    scores = (q @ k.transpose(-1, -2))[0, 0]
    assert torch.allclose(scores[5, 2], scores[20, 17], atol=1e-4)


def test_attention_is_causal() -> None:
    torch.manual_seed(0)
    model = build_llama(MODELS["llama_tiny"])
    rope = rope_table(model.shape, 16, torch.device("cpu"))
    tokens = torch.randint(0, 512, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 512
    outputs = []
    for sequence in (tokens, changed):
        x = model.embedding(sequence)
        for block in model.blocks:
            x = block(x, rope)
        outputs.append(x)
    assert torch.equal(outputs[0][:, :10], outputs[1][:, :10])
    assert not torch.equal(outputs[0][:, 10:], outputs[1][:, 10:])


def test_training_overfits_a_single_batch() -> None:
    model = build_llama(MODELS["llama_tiny"])
    tokens = torch.randint(0, 512, (2, 65), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rope = rope_table(model.shape, 64, torch.device("cpu"))
    losses = []
    for _ in range(20):
        loss = model(tokens[:, :-1], tokens[:, 1:], rope)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(6.74, abs=0.1)  # ln 512 + 1/2: logits have a variance of 1
    assert losses[-1] < 0.6 * losses[0]
