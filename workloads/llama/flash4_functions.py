"""FlashAttention 4 with the interface that PyTorch's kernel switch expects. Importing this module imports the package.

PyTorch (2.11 to 2.13, torch/nn/attention/_fa4.py) unpacks two results of the forward pass and three of the backward
pass. The pinned version of flash-attn-4 also returns data for sparse attention. The package rejects an output with a
stride of 0, which a compiled graph may create for a batch of one, so the output gets the strides of the queries.
"""

from __future__ import annotations

from typing import Any

from flash_attn.cute import interface
from torch import Tensor


def _flash_attn_fwd(*args: Any, out: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    if out is not None:  # the stride of a dimension of size one is never used
        sizes = zip(out.shape, out.stride(), strict=True)
        out = out.as_strided(out.shape, [out.numel() if size == 1 else stride for size, stride in sizes])
    out, lse, *_ = interface._flash_attn_fwd(*args, out=out, **kwargs)
    return out, lse


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, *_ = interface._flash_attn_bwd(*args, **kwargs)
    return dq, dk, dv
