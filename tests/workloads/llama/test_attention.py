"""Attention by its kernels: whole or in parts it is what PyTorch's own function computes."""

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
@pytest.mark.parametrize("before", [0, 64])
@pytest.mark.parametrize("size", [(40, 32), (128, 64), (128, 128)])
def test_a_kernel_gives_what_plain_attention_gives(
    name: str, device: str, dtype: torch.dtype, before: int, size: tuple[int, int]
) -> None:
    """`before` keys and values are an earlier part; relative to the truth in fp64."""
    if name == "flash4":
        pytest.importorskip("flash_attn.cute")
    (length, width), torch_device = size, torch.device(device)
    generator = torch.Generator().manual_seed(0)

    def heads(count: int, tokens: int) -> Tensor:
        return torch.randn(2, tokens, count, width, generator=generator).to(torch_device, dtype).transpose(1, 2)

    q, k, v, d_out = heads(4, length), heads(2, before + length), heads(2, before + length), heads(4, length)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    mask = torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
    truth = functional.scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True)
    truth.backward(d_out.double())

    own = q, k[:, :, before:], v[:, :, before:]
    earlier = (k[:, :, :before], v[:, :, :before]) if before else None
    out, lse = attend(KERNELS[name], *own, earlier)
    (dq, dk, dv), d_earlier = attend_backward(KERNELS[name], d_out, *own, out, lse, earlier)
    if d_earlier is not None:
        dk, dv = torch.cat([d_earlier[0], dk], dim=2), torch.cat([d_earlier[1], dv], dim=2)
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    for found, wanted in zip((out, dq, dk, dv), (truth, *(t.grad for t in exact)), strict=True):
        assert wanted is not None
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
