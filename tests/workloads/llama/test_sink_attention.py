"""Attention with sinks and windows against softmax over all scores and the sink."""

import pytest
import torch
from torch import Tensor

from workloads.llama.sink_attention import attend_with_sinks

CASES = [(length, window) for length in (40, 256) for window in (0, 1, 32, 500)]


def draw(length: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, length, 64, device=device).to(dtype) for heads in (8, 2, 2)]
    return [tensor.requires_grad_() for tensor in (*tensors, torch.randn(8, device=device).to(dtype))]


def attend_by_softmax(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Tensor:
    at = torch.arange(q.shape[2], device=q.device)
    is_seen = (at[:, None] >= at) & (at[:, None] - at < (window or 10**6))
    scores = (q @ k.repeat_interleave(4, 1).mT / 8).masked_fill(~is_seen, float("-inf"))
    sink_scores = sinks[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink_scores], dim=-1).softmax(-1)[..., :-1]
    return weights @ v.repeat_interleave(4, 1)


def largest_error(length: int, window: int, device: str, dtype: torch.dtype) -> float:
    inputs = draw(length, device, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, expected = attend_with_sinks(*inputs, window)[0], attend_by_softmax(*exact, window)  # type: ignore[call-arg]
    d_out = torch.randn_like(out)
    out.backward(d_out)
    expected.backward(d_out.double())
    pairs = [(out.detach(), expected.detach()), *((x.grad, y.grad) for x, y in zip(inputs, exact, strict=True))]
    return max(float((x.double() - y).norm() / y.norm()) for x, y in pairs)  # type: ignore[union-attr]


@pytest.mark.parametrize(("length", "window"), CASES)
def test_outputs_and_gradients_are_those_of_a_softmax_with_the_sink(length: int, window: int) -> None:
    assert largest_error(length, window, "cpu", torch.float32) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "window"), CASES)
def test_flash_attention_computes_the_same_on_a_gpu(length: int, window: int) -> None:
    assert largest_error(length, window, "cuda", torch.bfloat16) < 0.02


def test_the_compiler_knows_the_operation() -> None:
    torch.library.opcheck(attend_with_sinks, (*draw(16, "cpu", torch.float32), 4))
