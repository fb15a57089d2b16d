"""Attention kernels of AMD's GPUs, forward and backward: AOTriton and CK within PyTorch, AITER, flash-attn.

None of them has run for this project. Signatures and layouts are those of the sources: PyTorch's
aten/src/ATen/native/transformers (hip/flash_attn/flash_api.h, aot/mha_all_aot.hip, ck/mha_bwd_ck.hip,
cuda/attention_backward.cu), AITER 0.1.4 to 0.1.20 (aiter/ops/mha.py) and flash-attn 2.7 and later
(flash_attn/flash_attn_interface.py). `workloads.llama.attention` therefore checks the results of each kernel before it
is timed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workloads.llama.attention_kernels import (
    HALF_PRECISION,
    Gradients,
    Kernel,
    aten,
    efficient_backward,
    efficient_forward,
    flash_forward,
)

NO_WINDOW = -1


@contextmanager
def rocm_attention_library(name: str) -> Iterator[None]:
    """Let PyTorch's attention on ROCm run by `aotriton` or `ck` until the block ends.

    The choice is one of the process, and TORCH_ROCM_FA_PREFER_CK sets it too: both are therefore set by name.

    Raises:
        RuntimeError: this PyTorch has no CK, or CK does not support the GPU.
    """
    # A PyTorch without this function takes AOTriton, with a warning alone, for a CK that it lacks (flash_api.h).
    is_available = getattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: False)
    if name == "ck" and not is_available():
        raise RuntimeError("this PyTorch is built without CK's attention, or CK does not support this GPU")
    previous = torch.backends.cuda.preferred_rocm_fa_library()
    torch.backends.cuda.preferred_rocm_fa_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_rocm_fa_library(previous)


def _flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    # Both libraries return and take seed and offset as int64 scalars (prepare_philox_arguments of mha_all_aot.hip).
    rng_state = torch.zeros((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, rng_state, rng_state
    )


def _run_by(library: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Tensor | bool) -> Any:
        with rocm_attention_library(library):
            return function(*arguments)

    return run


# AITER and flash-attn take [batch, tokens, heads, head_size] with any strides but 1 in the last dimension. Their lse is
# [batch, heads, queries], and grouped heads are theirs to sum.


def _aiter_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from aiter.ops.mha import _flash_attn_forward

    arguments = _common_arguments(q, causal) | {"return_lse": True, "return_softmax": False, "sink_size": 0}
    absent = dict.fromkeys(("bias", "alibi_slopes", "q_descale", "k_descale", "v_descale"))
    known = inspect.signature(_flash_attn_forward).parameters  # sink_size and the scales came with 0.1.8
    out, lse, *_ = _flash_attn_forward(
        *_by_tokens(q, k, v), **{name: value for name, value in (arguments | absent).items() if name in known}
    )
    return out.transpose(1, 2), lse


def _aiter_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    from aiter.ops.mha import _flash_attn_backward

    # The kernels in assembly add up dq in any order: they are left out where the result has to be deterministic.
    absent = dict.fromkeys(("dbias", "bias", "alibi_slopes"))
    gradients = [torch.empty_like(x) for x in _by_tokens(q, k, v)]
    _flash_attn_backward(
        *_by_tokens(d_out, q, k, v, out),
        lse,
        **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
        **_common_arguments(q, causal),
        **absent,
        deterministic=False,
    )
    dq, dk, dv = _by_tokens(*gradients)
    return dq, dk, dv


def _flash_attn_package_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    out, lse, *_ = _flash_attn_forward(
        *_by_tokens(q, k, v), **_common_arguments(q, causal), softcap=0.0, alibi_slopes=None, return_softmax=False
    )
    return out.transpose(1, 2), lse


def _flash_attn_package_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    gradients = [torch.empty_like(x) for x in _by_tokens(q, k, v)]
    _flash_attn_backward(
        *_by_tokens(d_out, q, k, v, out),
        lse,
        *gradients,
        **_common_arguments(q, causal),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
    )
    dq, dk, dv = _by_tokens(*gradients)
    return dq, dk, dv


def _common_arguments(q: Tensor, causal: bool) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": q.shape[-1] ** -0.5,
        "causal": causal,
        "window_size_left": NO_WINDOW,
        "window_size_right": NO_WINDOW,
    }


def _by_tokens(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views with heads and tokens exchanged."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


# AOTriton's memory-efficient backward pass views the lse as [batch * heads, queries], so that it takes the compact one
# that its forward pass returns (attention_backward.cu). Padding it, as CUDA's kernel needs, fails for lengths that are
# not multiples of 32.
ROCM_KERNELS = (
    Kernel("aotriton", HALF_PRECISION, _run_by("aotriton", flash_forward), _run_by("aotriton", _flash_backward)),
    Kernel("ck", HALF_PRECISION, _run_by("ck", flash_forward), _run_by("ck", _flash_backward)),
    Kernel("aiter", HALF_PRECISION, _aiter_forward, _aiter_backward),
    Kernel("flash_attn", HALF_PRECISION, _flash_attn_package_forward, _flash_attn_package_backward),
    Kernel(
        "aotriton_efficient",
        (*HALF_PRECISION, torch.float32),
        _run_by("aotriton", efficient_forward),
        _run_by("aotriton", efficient_backward),
    ),
)
