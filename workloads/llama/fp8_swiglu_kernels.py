"""SwiGLU and its gradients in fp8, in Triton: the functions of `workloads.llama.fp8` of the same names."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workloads.llama.fp8 import FP8, Fp8Matrix
from workloads.llama.fp8_scale_kernels import FLAT_BLOCK, REDUCING_PROGRAMS, allocate_partial_maxima, finish_scale

BACKWARD_TILE = {"BLOCK_TOKENS": 64, "BLOCK_FEATURES": 64, "num_warps": 8}  # the fastest of six on an H200


@triton.jit
def _swiglu_amax_kernel(gate, up, partial, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(gate + at, mask=at < numel, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=at < numel, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(g * tl.sigmoid(g) * u))
    tl.store(partial + tl.program_id(0), tl.max(peak, 0))


@triton.jit
def swiglu_derivatives(g, u, d):  # type: ignore[no-untyped-def]
    """Return the output, and the gradients of gate and up."""
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    return silu * u, d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), d * silu


@triton.jit
def _swiglu_backward_amax_kernel(  # type: ignore[no-untyped-def]
    gate, up, d_hidden, hidden_partial, d_partial, numel, BLOCK: tl.constexpr
):
    hidden_peak = tl.zeros([BLOCK], tl.float32)
    d_peak = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(gate + at, mask=at < numel, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=at < numel, other=0.0).to(tl.float32)
        d = tl.load(d_hidden + at, mask=at < numel, other=0.0).to(tl.float32)
        hidden, d_gate, d_up = swiglu_derivatives(g, u, d)
        hidden_peak = tl.maximum(hidden_peak, tl.abs(hidden))
        d_peak = tl.maximum(d_peak, tl.maximum(tl.abs(d_gate), tl.abs(d_up)))
    tl.store(hidden_partial + tl.program_id(0), tl.max(hidden_peak, 0))
    tl.store(d_partial + tl.program_id(0), tl.max(d_peak, 0))


@triton.jit
def _swiglu_kernel(gate, up, scale, rows, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < numel, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < numel, other=0.0).to(tl.float32)
    value = g * tl.sigmoid(g) * u * (1.0 / tl.load(scale))
    tl.store(rows + at, value.to(rows.dtype.element_ty), mask=at < numel)


def swiglu_rows(gate: Tensor, up: Tensor) -> Fp8Matrix:
    """Return silu(gate) * up in fp8."""
    partial, numel = allocate_partial_maxima(gate.device), gate.numel()
    _swiglu_amax_kernel[(REDUCING_PROGRAMS,)](gate, up, partial, numel, BLOCK=FLAT_BLOCK)
    scale = finish_scale(partial)
    rows = torch.empty(gate.shape, dtype=FP8, device=gate.device)
    _swiglu_kernel[(triton.cdiv(numel, FLAT_BLOCK),)](gate, up, scale, rows, numel, BLOCK=FLAT_BLOCK)
    return Fp8Matrix(rows, scale)


@triton.jit
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    gate,
    up,
    d_hidden,
    hidden_scale,
    d_scale,
    hidden_columns,
    d_rows,
    d_columns,
    tokens,
    features,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    tiles = tl.cdiv(features, BLOCK_FEATURES)
    t = ((tl.program_id(0) // tiles) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    n = ((tl.program_id(0) % tiles) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)
    inside = (t[:, None] < tokens) & (n[None, :] < features)
    at = t[:, None] * features + n[None, :]
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_hidden + at, mask=inside, other=0.0).to(tl.float32)
    hidden, d_gate, d_up = swiglu_derivatives(g, u, d)
    inverse = 1.0 / tl.load(d_scale)
    dtype = d_rows.dtype.element_ty
    at = t[:, None] * (2 * features) + n[None, :]
    tl.store(d_rows + at, (d_gate * inverse).to(dtype), mask=inside)
    tl.store(d_rows + at + features, (d_up * inverse).to(dtype), mask=inside)
    inside = (n[:, None] < features) & (t[None, :] < tokens)
    at = n[:, None] * tokens + t[None, :]
    # The scale is read again, so that rows and columns are converted separately: with shared conversions ptxas 12.8
    # (Triton 3.6, sm90) writes a quarter of the columns wrong.
    inverse = 1.0 / tl.load(d_scale, volatile=True)
    tl.store(d_columns + at, tl.trans((d_gate * inverse).to(dtype)), mask=inside)
    tl.store(d_columns + at + features.to(tl.int64) * tokens, tl.trans((d_up * inverse).to(dtype)), mask=inside)
    hidden *= 1.0 / tl.load(hidden_scale)
    tl.store(hidden_columns + at, tl.trans(hidden.to(dtype)), mask=inside)


def swiglu_backward(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Fp8Matrix, Fp8Matrix, Fp8Matrix]:
    """Return in fp8: the output's transpose, and the gradients of gate and up side by side with their transpose."""
    tile = BACKWARD_TILE
    device, (tokens, features) = gate.device, gate.shape
    partials = allocate_partial_maxima(device), allocate_partial_maxima(device)
    _swiglu_backward_amax_kernel[(REDUCING_PROGRAMS,)](gate, up, d_hidden, *partials, gate.numel(), BLOCK=FLAT_BLOCK)
    hidden_scale, d_scale = (finish_scale(partial) for partial in partials)

    def allocate(*size: int) -> Tensor:
        return torch.empty(size, dtype=FP8, device=device)

    hidden, d_columns = allocate(features, tokens), allocate(2 * features, tokens)
    d_rows = allocate(tokens, 2 * features)
    grid = (triton.cdiv(tokens, tile["BLOCK_TOKENS"]) * triton.cdiv(features, tile["BLOCK_FEATURES"]),)
    _swiglu_backward_kernel[grid](
        gate, up, d_hidden, hidden_scale, d_scale, hidden, d_rows, d_columns, tokens, features, **tile
    )
    return Fp8Matrix(hidden, hidden_scale), Fp8Matrix(d_rows, d_scale), Fp8Matrix(d_columns, d_scale)
