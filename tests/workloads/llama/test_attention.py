"""Every attention kernel equals scaled_dot_product_attention, over the whole sequence and over parts of it."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from workloads.api.contract import Infeasible
from workloads.llama import attention
from workloads.llama.attention import AttentionShape, attend, attend_backward, fastest_kernel, gpu_kernels
from workloads.llama.attention_kernels import CPU_KERNEL, KERNELS, Gradients, Kernel

TRAINED = (torch.bfloat16, torch.float32)
CASES = [pytest.param("cpu", "cpu", dtype) for dtype in TRAINED]
CASES += [
    pytest.param(kernel.name, "cuda", dtype, marks=pytest.mark.gpu)
    for kernel in gpu_kernels()
    for dtype in TRAINED
    if dtype in kernel.dtypes
]
PACKAGES = {"flash4": "flash_attn.cute", "aiter": "aiter", "flash_attn": "flash_attn"}
SHAPE = AttentionShape(heads=4, kv_heads=2, head_size=32, length=160, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "device", "dtype"), CASES)
@pytest.mark.parametrize("past", [0, 64])
@pytest.mark.parametrize("size", [(40, 32), (128, 64), (128, 128)])
def test_a_kernel_equals_plain_attention(
    name: str, device: str, dtype: torch.dtype, past: int, size: tuple[int, int]
) -> None:
    """Compare outputs and gradients with fp64, where `past` keys and values are an earlier part of the sequence."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    if name == "ck" and not torch.backends.cuda.is_ck_sdpa_available():
        pytest.skip("this PyTorch has no CK")
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


def spoil(change: Callable[[Tensor, Gradients], tuple[Tensor, Gradients]]) -> Kernel:
    """Return a kernel whose lse or gradients are changed."""

    def backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
        return change(lse, CPU_KERNEL.backward(d_out, q, k, v, out, lse, causal))[1]

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = CPU_KERNEL.forward(q, k, v, causal)
        return out, change(lse, (q, k, v))[0]

    return Kernel("spoilt", CPU_KERNEL.dtypes, forward, backward)


SPOILT = {
    "gradients of another group of heads": lambda lse, g: (lse, (g[0], g[1].flip(1), g[2])),
    "gradients of values without the last token": lambda lse, g: (lse, (g[0], g[1], g[2].roll(1, 2))),
    "no scale in the gradient of queries": lambda lse, g: (lse, (g[0] * 1.1, g[1], g[2])),
    "a logsumexp in base 2": lambda lse, g: (lse / math.log(2), g),
    "a NaN": lambda lse, g: (lse, (g[0] * math.nan, g[1], g[2])),
}


@pytest.mark.parametrize("change", SPOILT.values(), ids=SPOILT.keys())
def test_a_fast_kernel_with_wrong_results_is_excluded(
    change: Callable[[Tensor, Gradients], tuple[Tensor, Gradients]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(attention, "TIMED_TOKENS", SHAPE.length)
    kernel = spoil(change)
    assert fastest_kernel(SHAPE, CPU, (kernel, CPU_KERNEL)) == CPU_KERNEL
    assert re.search(r"spoilt is excluded: its results differ by (\d+|inf)% from fp32", capsys.readouterr().err)


@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_rounding_of_bf16_excludes_no_kernel_at_short_lengths(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TIMED_TOKENS", 128)
    shape = replace(SHAPE, length=length, dtype=torch.bfloat16)
    assert fastest_kernel(shape, CPU, (CPU_KERNEL,)) == CPU_KERNEL


def test_the_fastest_of_right_kernels_is_chosen_by_its_fastest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are given: those of a busy CPU would be those of its other processes."""
    monkeypatch.setattr(attention, "TIMED_TOKENS", SHAPE.length)
    times = {"steady": (2.0, 2.0, 2.0), "disturbed": (1.0, 9.0, 9.0), "slow": (3.0, 3.0, 3.0)}
    kernels = tuple(CPU_KERNEL._replace(name=name) for name in times)
    monkeypatch.setattr(attention, "time_in_turns", lambda runs, *_, **__: tuple(times.values()))
    assert fastest_kernel(SHAPE, CPU, kernels).name == "disturbed"


def test_a_shape_without_a_kernel_is_infeasible_with_the_reason_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TIMED_TOKENS", SHAPE.length)

    def fail(*_: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("head_size has to be a multiple of 8\nat line 7")

    half = CPU_KERNEL._replace(name="half", dtypes=(torch.bfloat16,))
    failing = CPU_KERNEL._replace(name="failing", forward=fail)
    reasons = "not measured: half: it has no torch.float32; failing: head_size has to be a multiple of 8$"
    with pytest.raises(Infeasible, match=reasons):
        fastest_kernel(SHAPE, CPU, (half, failing))
    assert fastest_kernel(SHAPE, CPU) == CPU_KERNEL


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [32, 64, 128])
def test_a_gpu_has_a_right_kernel_for_every_size_that_is_trained(head_size: int) -> None:
    for dtype in TRAINED:
        shape = AttentionShape(heads=4, kv_heads=2, head_size=head_size, length=200, dtype=dtype)
        assert fastest_kernel(shape, torch.device("cuda", 0)) in gpu_kernels()
    with pytest.raises(Infeasible, match=r"it has no torch\.float64"):
        fastest_kernel(replace(shape, dtype=torch.float64), torch.device("cuda", 0))
