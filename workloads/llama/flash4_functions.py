"""FlashAttention 4 as PyTorch's switch calls it; importing this module imports the package.

PyTorch (2.11 to 2.13, torch/nn/attention/_fa4.py) unpacks two results of the forward pass and three of the backward
pass. The pinned version of flash-attn-4 returns more: what sparse attention needs.
"""

from __future__ import annotations

from typing import Any

from flash_attn.cute import interface
from torch import Tensor


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, lse, *_ = interface._flash_attn_fwd(*args, **kwargs)
    return out, lse


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, *_ = interface._flash_attn_bwd(*args, **kwargs)
    return dq, dk, dv
