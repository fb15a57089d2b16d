"""The casts of `workloads.llama.fp8` in Triton, each fused with the elementwise operations before it.

A matrix needs its largest magnitude before it can be cast, so every cast is two passes over its inputs: the first
computes the values and keeps their maximum alone, the second computes them again and writes them in fp8. Values are
computed in fp32 from bf16 inputs and rounded once.

The products of a Hopper GPU take operands that are contiguous along the summed dimension. So a matrix
[tokens, features] is written by rows for products that sum over features, by columns (transposed) for those that sum
over tokens, or both from one tile that is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workloads.llama.fp8 import FP8, Fp8Matrix, halve, multiply, norm_scale
from workloads.llama.fp8_scale_kernels import find_scale
from workloads.llama.fp8_swiglu_kernels import swiglu_backward, swiglu_rows
from workloads.llama.norm_kernels import differentiate_norm

__all__ = ["add_and_norm_rows", "cast_both", "cast_columns", "cast_rows", "cast_weight", "halve", "multiply"]
__all__ += ["norm_backward", "norm_rows", "norm_scale", "swiglu_backward", "swiglu_rows"]

CAST_TILE = {"BLOCK_TOKENS": 128, "BLOCK_FEATURES": 64, "num_warps": 8}  # the fastest of six on an H200


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    x,
    scale,
    row_factors,
    column_factors,
    rows,
    columns,
    tokens,
    features,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Cast x, or with NORM its norm: x times the factor of its row times that of its column."""
    tiles = tl.cdiv(features, BLOCK_FEATURES)
    t = ((tl.program_id(0) // tiles) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    n = ((tl.program_id(0) % tiles) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)
    inside = (t[:, None] < tokens) & (n[None, :] < features)
    value = tl.load(x + t[:, None] * features + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        row_factor = tl.load(row_factors + t, mask=t < tokens, other=0.0)
        column_factor = tl.load(column_factors + n, mask=n < features, other=0.0).to(tl.float32)
        value = value * row_factor[:, None] * column_factor[None, :]
    value *= 1.0 / tl.load(scale)
    if ROWS:
        tl.store(rows + t[:, None] * features + n[None, :], value.to(rows.dtype.element_ty), mask=inside)
    if COLUMNS:
        transposed = tl.trans(value.to(columns.dtype.element_ty))
        inside = (n[:, None] < features) & (t[None, :] < tokens)
        tl.store(columns + n[:, None] * tokens + t[None, :], transposed, mask=inside)


def _launch_cast(
    x: Tensor,
    scale: Tensor,
    *,
    rows: bool,
    columns: bool,
    factors: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    tile = CAST_TILE
    tokens, features = x.shape
    row_target = torch.empty(tokens, features, dtype=FP8, device=x.device) if rows else x
    column_target = torch.empty(features, tokens, dtype=FP8, device=x.device) if columns else x
    grid = (triton.cdiv(tokens, tile["BLOCK_TOKENS"]) * triton.cdiv(features, tile["BLOCK_FEATURES"]),)
    row_factors, column_factors = factors or (scale, scale)
    _cast_kernel[grid](
        x,
        scale,
        row_factors,
        column_factors,
        row_target,
        column_target,
        tokens,
        features,
        NORM=factors is not None,
        ROWS=rows,
        COLUMNS=columns,
        **tile,
    )
    return row_target, column_target


def cast_rows(x: Tensor) -> Fp8Matrix:
    """Return x in fp8."""
    scale = find_scale(x)
    return Fp8Matrix(_launch_cast(x, scale, rows=True, columns=False)[0], scale)


def cast_columns(x: Tensor) -> Fp8Matrix:
    """Return the transpose of x in fp8."""
    scale = find_scale(x)
    return Fp8Matrix(_launch_cast(x, scale, rows=False, columns=True)[1], scale)


def cast_both(x: Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return x and its transpose in fp8."""
    scale = find_scale(x)
    rows, columns = _launch_cast(x, scale, rows=True, columns=True)
    return Fp8Matrix(rows, scale), Fp8Matrix(columns, scale)


def cast_weight(weight: Tensor, *, rows: bool, columns: bool) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
    """Return a weight and its transpose in fp8, each where it is wanted."""
    scale = find_scale(weight)
    by_rows, by_columns = _launch_cast(weight, scale, rows=rows, columns=columns)
    return Fp8Matrix(by_rows, scale) if rows else None, Fp8Matrix(by_columns, scale) if columns else None


# ── the norm ──


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, addend, weight, scale, total, rows, features, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < features
    value = tl.load(x + t * features + n, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(addend + t * features + n, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + t * features + n, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / features + eps) / tl.load(scale)
    value *= factor * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(rows + t * features + n, value.to(rows.dtype.element_ty), mask=inside)


def norm_rows(x: Tensor, weight: Tensor, eps: float, scale: Tensor) -> Fp8Matrix:
    """Return the norm of x in fp8."""
    rows = torch.empty(x.shape, dtype=FP8, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _norm_kernel[(len(x),)](x, x, weight, scale, x, rows, x.shape[1], eps, ADD=False, BLOCK=block, num_warps=4)
    return Fp8Matrix(rows, scale)


def add_and_norm_rows(x: Tensor, addend: Tensor, weight: Tensor, eps: float, scale: Tensor) -> tuple[Tensor, Fp8Matrix]:
    """Return x + addend in their data type, and the norm of that in fp8."""
    total, rows = torch.empty_like(x), torch.empty(x.shape, dtype=FP8, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _norm_kernel[(len(x),)](x, addend, weight, scale, total, rows, x.shape[1], eps, ADD=True, BLOCK=block, num_warps=4)
    return total, Fp8Matrix(rows, scale)


def norm_backward(
    x: Tensor, weight: Tensor, d_out: Tensor, d_residual: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Fp8Matrix]:
    """Return the gradient of x plus `d_residual`, that of weight, and the transpose of the norm of x in fp8."""
    d_x, d_weight, factors = differentiate_norm(x, weight, d_out, d_residual, eps)
    columns = _launch_cast(x, scale, rows=False, columns=True, factors=(factors, weight))[1]
    return d_x, d_weight, Fp8Matrix(columns, scale)
