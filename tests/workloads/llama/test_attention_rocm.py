"""The attention kernels of AMD's GPUs are called as their sources say, on stand-ins that compute on a CPU.

The stand-ins have the layouts and the required arguments of PyTorch's ROCm sources, of AITER 0.1.7 and 0.1.20 and of
flash-attn 2.8. What the real kernels compute is checked on a GPU, by `test_attention.py`.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.amd_device import amd_device
from workloads.llama import attention, attention_kernels
from workloads.llama.attention_kernels import CPU_KERNEL, CUDA_KERNELS, KERNELS, ROCM_KERNELS, rocm_attention_library
from workloads.llama.pytorch_attention import choose_rocm_library

CPU = torch.device("cpu")
AITER_FORWARD = {
    "0.1.7": "q k v dropout_p softmax_scale causal window_size_left window_size_right bias alibi_slopes return_lse "
    "return_softmax",
    "0.1.20": "q k v dropout_p softmax_scale causal window_size_left window_size_right sink_size bias alibi_slopes "
    "q_descale k_descale v_descale return_lse return_softmax",
}
AITER_BACKWARD = (
    "dout q k v out softmax_lse dq dk dv dbias dropout_p softmax_scale causal window_size_left window_size_right bias "
    "alibi_slopes deterministic"
)
FLASH_ATTN_FORWARD = (
    "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes return_softmax"
)
FLASH_ATTN_BACKWARD = (
    "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left window_size_right softcap "
    "alibi_slopes deterministic"
)
# What an argument that is nothing but absent has to be.
ABSENT = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "sink_size": 0,
    "return_softmax": False,
    "deterministic": False,
    "return_lse": True,
} | dict.fromkeys(("bias", "dbias", "alibi_slopes", "q_descale", "k_descale", "v_descale"))


def current_library() -> str:
    library = torch.backends.cuda.preferred_rocm_fa_library()
    return "ck" if library == torch._C._ROCmFABackend.Ck else "aotriton"


class StandInAten:
    """PyTorch's functions on ROCm, computed on a CPU: aten/src/ATen/native/transformers.

    Attributes:
        libraries: the library that was set in each call.
    """

    def __init__(self) -> None:
        self.libraries: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)  # of the CPU

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool
    ) -> tuple[Tensor, ...]:
        self.libraries.append(current_library())
        out, lse = CPU_KERNEL.forward(q, k, v, causal)
        return out, lse.contiguous(), torch.empty(0)

    def _scaled_dot_product_flash_attention_backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        d_out, q, k, v, out, lse, _, _, queries, keys, dropout, causal, seed, offset = arguments
        self.libraries.append(current_library())
        assert (queries, keys, dropout) == (q.shape[2], k.shape[2], 0.0)
        assert seed.dtype == offset.dtype == torch.int64 and seed.dim() == offset.dim() == 0
        lse.view(len(q) * q.shape[1], q.shape[2])  # as mha_bwd_aot and _efficient_attention_backward do
        return CPU_KERNEL.backward(d_out, q, k, v, out, lse, causal)

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, causal: bool
    ) -> tuple[Tensor, ...]:
        assert q.shape[1] == k.shape[1] and with_lse
        return self._scaled_dot_product_flash_attention(q, k, v, dropout, causal)

    def _scaled_dot_product_efficient_attention_backward(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        d_out, q, k, v, _, out, lse, seed, offset, dropout, _, causal = arguments
        shared = (d_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], dropout, causal, seed, offset)
        return *self._scaled_dot_product_flash_attention_backward(*shared), None


def compute_forward(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    out, lse = CPU_KERNEL.forward(*by_tokens(arguments, "q", "k", "v"), arguments["causal"])  # type: ignore[call-arg]
    return out.transpose(1, 2), lse, torch.empty(0), torch.empty(2)


def compute_backward(arguments: dict[str, Any]) -> Tensor:
    tensors = by_tokens(arguments, "dout", "q", "k", "v", "out")
    gradients = CPU_KERNEL.backward(*tensors, arguments["softmax_lse"], arguments["causal"])  # type: ignore[call-arg]
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        arguments[name].copy_(gradient.transpose(1, 2))
    return torch.empty(0)


def by_tokens(arguments: dict[str, Any], *names: str) -> list[Tensor]:
    """Return tensors that are [batch, tokens, heads, head_size] as the CPU's kernel takes them."""
    assert all(arguments[name].stride(-1) == 1 for name in names)
    return [arguments[name].transpose(1, 2) for name in names]


def with_parameters(names: str, compute: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a function with these required parameters that calls `compute` with their values by name."""
    signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names.split()])

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        assert arguments["softmax_scale"] == arguments["q"].shape[-1] ** -0.5
        for name in ABSENT.keys() & arguments.keys():
            assert arguments[name] == ABSENT[name], name
        return compute(arguments)

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def install(monkeypatch: pytest.MonkeyPatch, name: str, forward: str, backward: str) -> None:
    """Let a module be imported that has `_flash_attn_forward` and `_flash_attn_backward` with these parameters."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    functions = vars(sys.modules[name])
    functions["_flash_attn_forward"] = with_parameters(forward, compute_forward)
    functions["_flash_attn_backward"] = with_parameters(backward, compute_backward)


@pytest.fixture
def aten(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInAten]:
    stand_in = StandInAten()
    monkeypatch.setattr(attention_kernels, "aten", stand_in)
    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: True)
    with amd_device():
        yield stand_in


def test_each_build_of_pytorch_has_its_kernels() -> None:
    assert attention.gpu_kernels() == CUDA_KERNELS
    with amd_device():
        assert attention.gpu_kernels() == ROCM_KERNELS


@pytest.mark.parametrize("version", AITER_FORWARD)
@pytest.mark.parametrize("length", [40, 160])  # 40 is no multiple of 32
@pytest.mark.parametrize("kernel", ROCM_KERNELS, ids=[kernel.name for kernel in ROCM_KERNELS])
def test_a_kernel_takes_its_layouts_and_arguments(
    kernel: attention_kernels.Kernel, length: int, version: str, aten: StandInAten, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "aiter.ops.mha", AITER_FORWARD[version], AITER_BACKWARD)
    install(monkeypatch, "flash_attn.flash_attn_interface", FLASH_ATTN_FORWARD, FLASH_ATTN_BACKWARD)
    q, k, v, d_out = (torch.randn(1, length, heads, 32).bfloat16().transpose(1, 2) for heads in (4, 2, 2, 4))
    out, lse = kernel.forward(q, k, v, True)
    assert (
        attention.measure_error([q, k, v, d_out], out, lse, kernel.backward(d_out, q, k, v, out, lse, True))
        < attention.TOLERANCE
    )
    expected = {"ck": {"ck"}, "aotriton": {"aotriton"}, "aotriton_efficient": {"aotriton"}}
    assert set(aten.libraries) == expected.get(kernel.name, set())
    assert current_library() == "aotriton"


def test_parts_of_a_sequence_give_a_lse_that_the_backward_pass_takes(aten: StandInAten) -> None:
    q, k, v = (torch.randn(2, heads, 40, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for name in ("aotriton", "aotriton_efficient"):
        past = (k[:, :, :24], v[:, :, :24])
        out, lse = attention.attend(KERNELS[name], q[:, :, 24:], k[:, :, 24:], v[:, :, 24:], past)
        _, d_past = attention.attend_backward(
            KERNELS[name], out, q[:, :, 24:], k[:, :, 24:], v[:, :, 24:], out, lse, past
        )
        assert d_past is not None and d_past[0].shape == past[0].shape


def test_a_pytorch_without_ck_never_runs_aotriton_under_its_name(
    aten: StandInAten, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: False)
    monkeypatch.setattr(attention, "TIMED_TOKENS", 64)
    shape = attention.AttentionShape(heads=2, kv_heads=1, head_size=8, length=64, dtype=torch.bfloat16)
    assert attention.fastest_kernel(shape, CPU, (KERNELS["ck"], KERNELS["aotriton"])).name == "aotriton"
    assert "ck is not available: this PyTorch is built without CK's attention" in capsys.readouterr().err
    assert set(aten.libraries) == {"aotriton"}


def test_the_attention_of_pytorch_runs_by_the_library_that_works(
    aten: StandInAten, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TIMED_TOKENS", 32)
    shape = attention.AttentionShape(heads=2, kv_heads=1, head_size=8, length=32, dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "time_in_turns", lambda runs, *_, **__: ((2.0,), (1.0,)))
    assert choose_rocm_library(shape, CPU) == "ck"
    assert choose_rocm_library(replace(shape, dtype=torch.float32), CPU) == "aotriton"  # CK has no fp32
    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: False)
    assert choose_rocm_library(replace(shape, heads=4), CPU) == "aotriton"


def test_the_library_of_the_process_is_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), rocm_attention_library("aotriton"):
        1 / 0  # noqa: B018
    assert current_library() == "aotriton"
