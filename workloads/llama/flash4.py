"""FlashAttention 4's kernels (the package flash-attn-4), as operators that torch.compile takes whole. Shapes as in
attention.py. They compile themselves in some seconds when they are first called."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("workloads::flash4_forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd  # an import of seconds, for who has it

    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    out, lse, *_ = _flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
    return out.transpose(1, 2), lse


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("workloads::flash4_backward", mutates_args=())
def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, out, d_out = (heads.transpose(1, 2) for heads in (q, k, v, out, d_out))
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, d_out, lse, causal=causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _like(heads: Tensor) -> Tensor:
    """As the kernels lay them out: all heads of a token side by side."""
    batch, count, tokens, size = heads.shape
    return heads.new_empty(batch, tokens, count, size).transpose(1, 2)
