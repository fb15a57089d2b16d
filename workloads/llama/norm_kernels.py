"""The gradients of the RMS norm in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_BACKWARD_PROGRAMS = 1056  # eight for each multiprocessor of an H200


@triton.jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    x, weight, d_out, d_residual, d_x, d_weight, factors, tokens, features, eps, BLOCK: tl.constexpr
):
    n = tl.arange(0, BLOCK)
    inside = n < features
    w = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    d_w = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = row * features + n
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        later = tl.load(d_residual + at, mask=inside, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / features + eps)
        normed = value * factor
        d_w += d * normed
        d *= w
        gradient = (d - normed * (tl.sum(d * normed, 0) / features)) * factor + later
        tl.store(d_x + at, gradient.to(d_x.dtype.element_ty), mask=inside)
        tl.store(factors + row, factor)
    tl.store(d_weight + tl.program_id(0) * features + n, d_w, mask=inside)


def differentiate_norm(
    x: Tensor, weight: Tensor, d_out: Tensor, d_residual: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x plus `d_residual`, that of weight, and the factor of each row of x in its norm."""
    tokens, features = x.shape
    d_x = torch.empty_like(x)
    factors = torch.empty(tokens, dtype=torch.float32, device=x.device)
    programs = min(NORM_BACKWARD_PROGRAMS, tokens)
    d_weight = torch.empty(programs, features, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(features)
    tensors = (x, weight, d_out, d_residual, d_x, d_weight, factors)
    _norm_backward_kernel[(programs,)](*tensors, tokens, features, eps, BLOCK=block, num_warps=4)
    return d_x, d_weight.sum(0).to(weight.dtype), factors
