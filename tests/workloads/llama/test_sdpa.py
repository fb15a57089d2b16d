"""PyTorch's attention runs by a fused kernel on a GPU, or the trial is infeasible; a CPU takes what there is."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads.api.contract import Infeasible
from workloads.llama.attention import AttentionShape
from workloads.llama.sdpa import causal_attention, choose_backend, fused_attention

SHAPE = AttentionShape(heads=4, kv_heads=2, head_size=32, length=64, dtype=torch.bfloat16)


def test_without_a_fused_kernel_a_trial_is_infeasible_with_the_reasons_of_pytorch() -> None:
    q, k, v = (torch.zeros(1, heads, 16, size) for heads, size in ((4, 32), (2, 32), (2, 16)))
    assert choose_backend(q, k, v) == SDPBackend.MATH
    with (
        sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
        pytest.raises(Infeasible, match=r"q \(1, 4, 16, 32\).* is not measured: .*same last dimension"),
    ):
        choose_backend(q, k, v)


def test_on_a_cpu_nothing_is_restricted() -> None:
    with fused_attention(SHAPE, torch.device("cpu")) as name:
        assert name == "" and torch.backends.cuda.math_sdp_enabled()


@pytest.mark.gpu
def test_on_a_gpu_the_fused_kernel_is_named_and_the_mathematical_one_is_never_taken() -> None:
    device = torch.device("cuda", 0)
    with fused_attention(SHAPE, device) as name:
        assert name in ("cudnn", "flash", "aotriton flash", "ck flash")
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()
    fp32 = AttentionShape(heads=4, kv_heads=2, head_size=32, length=64, dtype=torch.float32)
    with fused_attention(fp32, device) as name:
        assert name in ("efficient", "aotriton efficient")
        q, k, v = (torch.randn(1, heads, 64, 32, device=device, requires_grad=True) for heads in (4, 2, 2))
        out = causal_attention(q, k, v)  # grouped heads in fp32
        out.sum().backward()
    exact = causal_attention(*(x.detach().cpu() for x in (q, k, v)))
    assert torch.allclose(out.cpu(), exact, atol=1e-4)
    double = AttentionShape(heads=4, kv_heads=2, head_size=32, length=64, dtype=torch.float64)
    with pytest.raises(Infeasible, match="no fused attention kernel supports"), fused_attention(double, device):
        pass
