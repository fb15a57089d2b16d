"""Forward and backward attention kernels for NVIDIA GPUs, AMD GPUs and CPUs.

scaled_dot_product_attention calls the same ATen functions, but does not return their logsumexp. None of the functions
in this module is documented: torch.nn.attention.varlen also returns a logsumexp, but no public function accepts one for
a backward pass. `tests/workloads/instruments/test_torch_internals.py` checks the functions' arguments. Dropout is never
used, so the backward functions do not read the random number generator state that they require.

This project has not run any of AMD's kernels. The signatures and layouts of these kernels come from source code:
PyTorch's aten/src/ATen/native/transformers (hip/flash_attn/flash_api.h, aot/mha_all_aot.hip, ck/mha_bwd_ck.hip,
cuda/attention_backward.cu), AITER 0.1.4 to 0.1.20 (aiter/ops/mha.py) and flash-attn 2.7 and later
(flash_attn/flash_attn_interface.py). `workloads.llama.attention`, which documents the shapes, therefore checks each
kernel's results before timing it.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]
HALF_PRECISION = (torch.bfloat16, torch.float16)


class Kernel(NamedTuple):
    """An attention kernel: (q, k, v, causal) -> (out, lse) and (d_out, q, k, v, out, lse, causal) -> (dq, dk, dv)."""

    name: str  # in logs and results
    dtypes: tuple[torch.dtype, ...]  # that the kernel computes correctly; cuDNN's kernel does not reject other types
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Gradients]


def _cudnn_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.squeeze(-1)


def _cudnn_bwd(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    random = (torch.zeros((), dtype=torch.int64, device=q.device),) * 2
    sizes, no_bias_or_packing = (q.shape[2], k.shape[2]), (None, None, None)
    return aten._scaled_dot_product_cudnn_attention_backward(
        d_out, q, k, v, out, lse.unsqueeze(-1), *random, *no_bias_or_packing, *sizes, 0.0, causal
    )


def _flash_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _flash_bwd(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    # On ROCm, both libraries return and accept the seed and offset as int64 scalars (prepare_philox_arguments of
    # mha_all_aot.hip).
    size, dtype = ((), torch.int64) if torch.version.hip else ((2,), torch.uint64)
    rng_state = torch.zeros(size, dtype=dtype, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, rng_state, rng_state
    )


# The memory-efficient kernel lacks grouped-query attention, so keys and values are repeated for each query head.


def _efficient_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    group_size = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def _efficient_bwd(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    # CUTLASS's kernel reads the lse in whole blocks of 32 queries. AOTriton's kernel views the lse as [batch * heads,
    # queries], so it needs the compact lse of its forward pass (attention_backward.cu): a padded lse fails for lengths
    # that are not multiples of 32.
    if not torch.version.hip:
        lse = functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    kv_heads = k.shape[1]
    groups = (kv_heads, q.shape[1] // kv_heads)
    k, v = k.repeat_interleave(groups[1], 1), v.repeat_interleave(groups[1], 1)
    rng_state = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        d_out, q, k, v, None, out, lse, rng_state, rng_state, 0.0, [True, True, True, False], causal
    )
    return dq, dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2)


def _cpu_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_bwd(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(d_out, q, k, v, out, lse, 0.0, causal)


@contextmanager
def rocm_attention_library(name: str) -> Iterator[None]:
    """Run PyTorch's attention on ROCm with `aotriton` or `ck` within the context. Raises RuntimeError without CK.

    The choice applies to the whole process. TORCH_ROCM_FA_PREFER_CK can preset it, so either library is set explicitly.
    """
    # A PyTorch build without this function and without CK falls back to AOTriton with only a warning (flash_api.h).
    is_available = getattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: False)
    if name == "ck" and not is_available():
        raise RuntimeError("this PyTorch is built without CK's attention, or CK does not support this GPU")
    previous = torch.backends.cuda.preferred_rocm_fa_library()
    torch.backends.cuda.preferred_rocm_fa_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_rocm_fa_library(previous)


def _run_by(library: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Tensor | bool) -> Any:
        with rocm_attention_library(library):
            return function(*arguments)

    return run


# Kernels from packages take [batch, tokens, heads, head_size]; only the last dimension must have a stride of 1. Their
# lse is [batch, heads, queries]. These kernels sum the gradients of grouped heads.


def _by_tokens(*tensors: Tensor) -> Any:
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


# FlashAttention 4 (the package flash-attn-4) compiles on the first call.
# torch.nn.attention.activate_flash_attention_impl("FA4") would replace PyTorch's own flash kernel with the same two
# functions in the whole process, so the two kernels could not be timed in interleaved order.


def _flash4_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(*_by_tokens(q, k, v), causal=causal, return_lse=True)
    return out.transpose(1, 2), lse


def _flash4_bwd(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    return _by_tokens(*_flash_attn_bwd(*_by_tokens(q, k, v, out, d_out), lse, causal=causal)[:3])


def _rocm_arguments(q: Tensor, causal: bool) -> dict[str, Any]:
    window = {"window_size_left": -1, "window_size_right": -1}
    return {"dropout_p": 0.0, "softmax_scale": q.shape[-1] ** -0.5, "causal": causal, "alibi_slopes": None} | window


def _aiter_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from aiter.ops.mha import _flash_attn_forward

    arguments = _rocm_arguments(q, causal) | {"return_lse": True, "return_softmax": False, "sink_size": 0}
    arguments |= dict.fromkeys(("bias", "q_descale", "k_descale", "v_descale"))
    known = inspect.signature(_flash_attn_forward).parameters  # AITER 0.1.8 added sink_size and the scales
    arguments = {name: value for name, value in arguments.items() if name in known}
    out, lse, *_ = _flash_attn_forward(*_by_tokens(q, k, v), **arguments)
    return out.transpose(1, 2), lse


def _aiter_bwd(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    from aiter.ops.mha import _flash_attn_backward

    # The assembly kernels sum dq in no fixed order, so they are excluded when results must be deterministic.
    gradients = [torch.empty_like(x) for x in _by_tokens(q, k, v)]
    arguments = _rocm_arguments(q, causal) | {"dbias": None, "bias": None, "deterministic": False}
    arguments |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    _flash_attn_backward(*_by_tokens(d_out, q, k, v, out), lse, **arguments)
    return _by_tokens(*gradients)


def _package_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    arguments = _rocm_arguments(q, causal) | {"softcap": 0.0, "return_softmax": False}
    out, lse, *_ = _flash_attn_forward(*_by_tokens(q, k, v), **arguments)
    return out.transpose(1, 2), lse


def _package_bwd(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    gradients = [torch.empty_like(x) for x in _by_tokens(q, k, v)]
    arguments = _rocm_arguments(q, causal) | {"softcap": 0.0, "deterministic": False}
    _flash_attn_backward(*_by_tokens(d_out, q, k, v, out), lse, *gradients, **arguments)
    return _by_tokens(*gradients)


WITH_FP32 = (*HALF_PRECISION, torch.float32)
CPU_KERNEL = Kernel("cpu", WITH_FP32, _cpu_fwd, _cpu_bwd)
CUDA_KERNELS = (
    Kernel("cudnn", HALF_PRECISION, _cudnn_fwd, _cudnn_bwd),
    Kernel("flash", HALF_PRECISION, _flash_fwd, _flash_bwd),
    Kernel("flash4", HALF_PRECISION, _flash4_fwd, _flash4_bwd),
    Kernel("efficient", WITH_FP32, _efficient_fwd, _efficient_bwd),
)
ROCM_KERNELS = (
    Kernel("aotriton", HALF_PRECISION, _run_by("aotriton", _flash_fwd), _run_by("aotriton", _flash_bwd)),
    Kernel("ck", HALF_PRECISION, _run_by("ck", _flash_fwd), _run_by("ck", _flash_bwd)),
    Kernel("aiter", HALF_PRECISION, _aiter_fwd, _aiter_bwd),
    Kernel("flash_attn", HALF_PRECISION, _package_fwd, _package_bwd),
    Kernel("aotriton_efficient", WITH_FP32, _run_by("aotriton", _efficient_fwd), _run_by("aotriton", _efficient_bwd)),
)
KERNELS = {kernel.name: kernel for kernel in (CPU_KERNEL, *CUDA_KERNELS, *ROCM_KERNELS)}
