"""Attention kernels of NVIDIA's GPUs and of processors, forward and backward.

They are the ATen functions that scaled_dot_product_attention calls, which does not return the logsumexp itself, and
FlashAttention 4. None of them is documented: torch.nn.attention.varlen returns a logsumexp too, but no public function
takes one for a backward pass. `tests/workloads/test_torch_internals.py` checks their arguments. There is no dropout,
so the backward functions never read the state of the random number generator that they require.
`workloads.llama.attention` has the shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]
HALF_PRECISION = (torch.bfloat16, torch.float16)


class Kernel(NamedTuple):
    """An attention kernel, forward and backward.

    Attributes:
        name: its name in logs and results.
        dtypes: the data types that it computes correctly. cuDNN's kernel does not refuse other ones.
        forward: (q, k, v, causal) to (out, lse).
        backward: (d_out, q, k, v, out, lse, causal) to (dq, dk, dv).
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Gradients]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    rng_state = torch.zeros((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        rng_state,
        rng_state,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
    )


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, rng_state, rng_state
    )


# FlashAttention 4 (the package flash-attn-4) takes [batch, tokens, heads, head_size] and compiles at the first call.
# torch.nn.attention.activate_flash_attention_impl("FA4") calls the same two functions in place of PyTorch's own flash
# kernel, for the whole process: then the two could not be timed in turns.


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = _flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
    return out.transpose(1, 2), lse


def _flash4_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, out, d_out = (x.transpose(1, 2) for x in (q, k, v, out, d_out))
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, d_out, lse, causal=causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# The memory-efficient kernel has no grouped-query attention: keys and values are repeated for each query head.


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    group_size = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def efficient_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    """Return the gradients. `lse` has the layout that the kernel of this build of PyTorch reads."""
    kv_heads = k.shape[1]
    group_size = q.shape[1] // kv_heads
    rng_state = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        d_out,
        q,
        k.repeat_interleave(group_size, 1),
        v.repeat_interleave(group_size, 1),
        None,
        out,
        lse,
        rng_state,
        rng_state,
        0.0,
        [True, True, True, False],
        causal,
    )
    return dq, dk.unflatten(1, (kv_heads, group_size)).sum(2), dv.unflatten(1, (kv_heads, group_size)).sum(2)


def _efficient_backward_with_padding(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    # CUTLASS's kernel reads the lse in whole blocks of 32 queries.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    return efficient_backward(d_out, q, k, v, out, lse, causal)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(d_out, q, k, v, out, lse, 0.0, causal)


CPU_KERNEL = Kernel("cpu", (*HALF_PRECISION, torch.float32), _cpu_forward, _cpu_backward)
CUDA_KERNELS = (
    Kernel("cudnn", HALF_PRECISION, _cudnn_forward, _cudnn_backward),
    Kernel("flash", HALF_PRECISION, flash_forward, _flash_backward),
    Kernel("flash4", HALF_PRECISION, _flash4_forward, _flash4_backward),
    Kernel("efficient", (*HALF_PRECISION, torch.float32), efficient_forward, _efficient_backward_with_padding),
)
