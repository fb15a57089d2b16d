"""The scales of `workloads.llama.fp8` in Triton: the largest magnitude of a matrix, and its scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FLAT_BLOCK = 1024  # numbers that a program reads at a time
REDUCING_PROGRAMS = 2048  # programs that share a reduction over a whole matrix


@triton.jit
def _amax_kernel(x, partial, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.abs(tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)))
    tl.store(partial + tl.program_id(0), tl.max(peak, 0))


@triton.jit
def scale_of(amax):  # type: ignore[no-untyped-def]
    """`workloads.llama.fp8.scale_of`: scales from the largest magnitudes, on the bits of fp32."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    value = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where(bits >= 0x7F800000, float("nan"), value)


@triton.jit
def _scale_kernel(partial, scale, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(scale, scale_of(tl.max(tl.load(partial + tl.arange(0, COUNT)), 0)))


def finish_scale(partial: Tensor) -> Tensor:
    scale = torch.empty((), dtype=torch.float32, device=partial.device)
    _scale_kernel[(1,)](partial, scale, COUNT=len(partial))
    return scale


def allocate_partial_maxima(device: torch.device) -> Tensor:
    return torch.empty(REDUCING_PROGRAMS, dtype=torch.float32, device=device)


def find_scale(x: Tensor) -> Tensor:
    """Return the scale of x."""
    partial = allocate_partial_maxima(x.device)
    _amax_kernel[(REDUCING_PROGRAMS,)](x, partial, x.numel(), BLOCK=FLAT_BLOCK)
    return finish_scale(partial)
