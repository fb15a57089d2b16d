"""Every attention kernel equals scaled_dot_product_attention, over the whole sequence and over parts of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from workloads.llama.attention import KERNELS, attend, attend_backward

CASES = [pytest.param("cpu", "cpu", torch.float32), pytest.param("cpu", "cpu", torch.bfloat16)]
CASES += [
    pytest.param(name, "cuda", dtype, marks=pytest.mark.gpu)
    for name, dtype in [
        ("cudnn", torch.bfloat16),
        ("flash", torch.bfloat16),
        ("flash4", torch.bfloat16),
        ("efficient", torch.bfloat16),
        ("efficient", torch.float32),
    ]
]


@pytest.mark.parametrize(("name", "device", "dtype"), CASES)
@pytest.mark.parametrize("past", [0, 64])
@pytest.mark.parametrize("size", [(40, 32), (128, 64), (128, 128)])
def test_a_kernel_equals_plain_attention(
    name: str, device: str, dtype: torch.dtype, past: int, size: tuple[int, int]
) -> None:
    """Compare outputs and gradients with fp64, where `past` keys and values are an earlier part of the sequence."""
    if name == "flash4":
        pytest.importorskip("flash_attn.cute")
    length, head_size = size
    torch_device = torch.device(device)
    generator = torch.Generator().manual_seed(0)

    def heads(count: int, tokens: int) -> Tensor:
        return torch.randn(2, tokens, count, head_size, generator=generator).to(torch_device, dtype).transpose(1, 2)

    q, k, v, d_out = heads(4, length), heads(2, past + length), heads(2, past + length), heads(4, length)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mask = torch.ones(length, past + length, dtype=torch.bool, device=device).tril(past)
    exact_out = functional.scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True)
    exact_out.backward(d_out.double())

    past_kv = (k[:, :, :past], v[:, :, :past]) if past else None
    k, v = k[:, :, past:], v[:, :, past:]
    out, lse = attend(KERNELS[name], q, k, v, past_kv)
    (dq, dk, dv), d_past_kv = attend_backward(KERNELS[name], d_out, q, k, v, out, lse, past_kv)
    if d_past_kv is not None:
        dk, dv = torch.cat([d_past_kv[0], dk], dim=2), torch.cat([d_past_kv[1], dv], dim=2)
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    for actual, expected in zip((out, dq, dk, dv), (exact_out, *(x.grad for x in exact)), strict=True):
        assert expected is not None
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
