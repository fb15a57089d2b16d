"""Documents in sequences: their lengths, what attention within them costs, and that it is attention to each alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.llama.pytorch_attention import DocumentAttention, causal_attention, document_offsets
from workloads.models.flops import attended_length, document_lengths, model_flops_per_token
from workloads.models.model import MODELS

SHORT, MEDIUM, LONG = document_lengths(16, 5)
LENGTHS = torch.tensor([[MEDIUM, SHORT, LONG], [LONG, MEDIUM, SHORT]])


@given(st.integers(1, 500), st.integers(1, 700))
def test_documents_fill_a_sequence_and_have_the_mean_length(sequence_length: int, document_tokens: int) -> None:
    lengths = document_lengths(sequence_length, document_tokens)
    assert sum(lengths) == sequence_length and min(lengths) >= 1 and list(lengths) == sorted(lengths)
    assert len(lengths) == max(1, round(sequence_length / document_tokens))
    assert 1 <= attended_length(sequence_length, document_tokens) <= sequence_length


def test_a_sequence_without_documents_is_one() -> None:
    assert document_lengths(8192, 0) == document_lengths(8192, 8192) == (8192,)
    assert attended_length(8192, 0) == 8192


def test_masked_pairs_are_no_flops_of_the_model() -> None:
    """A token attends to half of its document on average: the pairs of each are half of its length squared."""
    shape, lengths = MODELS["llama3_8b"], document_lengths(8192, 1024)
    pairs = sum(length**2 / 2 for length in lengths)
    attention_flops = 12 * shape.layers * shape.heads * shape.head_size * pairs / 8192
    linear_flops = model_flops_per_token(shape, 0)
    assert model_flops_per_token(shape, attended_length(8192, 1024)) == pytest.approx(linear_flops + attention_flops)
    assert 0.1 < attended_length(8192, 1024) / 8192 < 0.3  # exponential lengths: twice the mean, less for few documents


def draw_inputs(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, 16, 64, generator=generator).to(device, dtype).requires_grad_() for heads in (4, 2, 2)
    ]


def attend_to_each_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention for one document at a time."""
    outs = []
    for sequence, lengths in enumerate(LENGTHS.tolist()):
        parts = zip(*(tensor[sequence : sequence + 1].split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
        outs.append(torch.cat([causal_attention(*part) for part in parts], dim=2))
    return torch.cat(outs)


def attend(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the output and the gradients of the documents' attention."""
    q, k, v = draw_inputs(device, dtype)
    out = DocumentAttention(16, 5, torch.device(device))(q, k, v, document_offsets(LENGTHS.to(device)))
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


def assert_near(results: tuple[torch.Tensor, ...], references: tuple[torch.Tensor, ...], tolerance: float) -> None:
    for result, reference in zip(results, references, strict=True):
        assert (result.float().cpu() - reference).abs().max() < tolerance * reference.abs().max()


def test_attention_in_documents_is_attention_to_each_of_them_alone() -> None:
    inputs = draw_inputs("cpu", torch.float32)
    out = attend_to_each_document(*inputs)
    expected = (out, *torch.autograd.grad(out.square().sum(), inputs))
    assert_near(attend("cpu", torch.float32), expected, tolerance=1e-5)


@pytest.mark.gpu
def test_variable_length_attention_is_the_masked_one() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    assert_near(attend("cuda", torch.bfloat16), attend("cpu", torch.float32), tolerance=0.03)
