"""PyTorch's attention runs by a fused kernel on a GPU, or the trial is infeasible; a CPU takes what there is."""

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.amd_device import amd_device
from workloads.api.contract import Infeasible
from workloads.llama import pytorch_attention
from workloads.llama.attention import AttentionShape
from workloads.llama.pytorch_attention import causal_attention, choose_backend, fused_attention

SHAPE = AttentionShape(heads=4, kv_heads=2, head_size=32, length=64, dtype=torch.bfloat16)


def test_without_a_fused_kernel_a_trial_is_infeasible_with_the_reasons_of_pytorch() -> None:
    q, k, v = (torch.zeros(1, heads, 16, size) for heads, size in ((4, 32), (2, 32), (2, 16)))
    assert choose_backend(q, k, v) == SDPBackend.MATH
    with (
        sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
        pytest.raises(Infeasible, match=r"q \(1, 4, 16, 32\).* is not measured: .*same last dimension"),
    ):
        choose_backend(q, k, v)


def test_an_output_of_one_sequence_has_no_stride_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 4 refuses one, which PyTorch takes from the queries of a compiled graph."""

    def forward(*_: object, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert 0 not in out.stride()
        return out.fill_(1), torch.zeros(()), torch.zeros(())

    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    for name, parent in zip(names[1:], names, strict=False):
        monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, ModuleType(parent)))
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules[parent], name.rpartition(".")[2], sys.modules[name], raising=False)
    monkeypatch.setattr(sys.modules[names[2]], "_flash_attn_fwd", forward, raising=False)
    # Set before it is imported, so that the module with these stand-ins is gone after the test.
    monkeypatch.setitem(sys.modules, "workloads.llama.flash4_functions", ModuleType("stand_in"))
    del sys.modules["workloads.llama.flash4_functions"]
    functions = import_module("workloads.llama.flash4_functions")
    queries = torch.zeros(1, 4, 8, 16).as_strided((1, 4, 8, 16), (0, 16, 64, 1))
    out = torch.empty_like(queries)
    assert out.stride()[0] == 0 and torch.equal(functions._flash_attn_fwd(out=out)[0], torch.ones(1, 4, 8, 16))
    assert torch.equal(out, torch.ones(1, 4, 8, 16))  # the memory is the same


def test_on_a_cpu_nothing_is_restricted() -> None:
    with fused_attention(SHAPE, torch.device("cpu")) as name:
        assert name == "" and torch.backends.cuda.math_sdp_enabled()


def test_on_an_amd_gpu_the_library_is_set_as_long_as_its_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are on the CPU, whose flash kernel is the one that PyTorch takes for them."""
    tensors = [torch.zeros(1, heads, 16, 32) for heads in (4, 2, 2)]
    monkeypatch.setattr(pytorch_attention, "_draw_inputs", lambda shape, device: tensors)
    monkeypatch.setattr(pytorch_attention, "choose_rocm_library", lambda shape, device: "ck")
    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: True)
    before = torch.backends.cuda.preferred_rocm_fa_library()
    with amd_device():
        with pytorch_attention.fused_attention(SHAPE, torch.device("cuda", 0)) as name:
            assert name == "ck flash"
            assert torch.backends.cuda.preferred_rocm_fa_library() == torch._C._ROCmFABackend.Ck
            assert not torch.backends.cuda.math_sdp_enabled()
        assert torch.backends.cuda.preferred_rocm_fa_library() == before
        tensors[2] = torch.zeros(1, 2, 16, 16)
        with pytest.raises(Infeasible), pytorch_attention.fused_attention(SHAPE, torch.device("cuda", 0)):
            pass
    assert torch.backends.cuda.preferred_rocm_fa_library() == before and torch.backends.cuda.math_sdp_enabled()


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


@pytest.mark.gpu
def test_the_fastest_attention_of_a_gpu_is_right_and_is_undone_afterwards() -> None:
    """FlashAttention 4 where it is installed and faster; compiled as blocks are, with grouped heads."""
    device = torch.device("cuda", 0)
    shape = AttentionShape(heads=8, kv_heads=2, head_size=128, length=4096, dtype=torch.bfloat16)
    inputs = [torch.randn(1, heads, 4096, 128, device=device, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    gradients = {}
    for name in ("fastest", "fused"):
        context = pytorch_attention.fastest_attention if name == "fastest" else fused_attention
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        torch.compiler.reset()
        with context(shape, device) as kernel:
            assert kernel in ("cudnn", "flash", "flash4", "aotriton flash", "ck flash")
            torch.compile(causal_attention, dynamic=False)(q, k, v).square().sum().backward()
        gradients[name] = [x.grad.float() for x in (q, k, v) if x.grad is not None]
    for fast, exact in zip(gradients["fastest"], gradients["fused"], strict=True):
        assert (fast - exact).norm() / exact.norm() < 0.03
    if hasattr(torch.nn.attention, "current_flash_attention_impl"):
        assert torch.nn.attention.current_flash_attention_impl() is None
