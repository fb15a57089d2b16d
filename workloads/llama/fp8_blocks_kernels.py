"""The casts of `workloads.llama.fp8_blocks` in Triton, each fused with the elementwise operations before it.

A block's scale depends on the block alone, so every cast reads its inputs once. Values are computed in fp32 from bf16
inputs and rounded once. A program writes whole blocks: 128 features of a token by rows, 128 tokens of a feature by
columns (transposed).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workloads.llama.fp8 import FP8, Fp8Matrix
from workloads.llama.fp8_block_tiles import store_columns, store_rows
from workloads.llama.fp8_blocks import BLOCK, SCALE_MULTIPLE, allocate_matrix, halve, multiply, norm_scale
from workloads.llama.fp8_blocks_swiglu_kernels import swiglu_backward, swiglu_rows
from workloads.llama.fp8_scale_kernels import scale_of
from workloads.llama.norm_kernels import differentiate_norm

__all__ = ["add_and_norm_rows", "cast_both", "cast_columns", "cast_rows", "cast_weight", "halve", "multiply"]
__all__ += ["norm_backward", "norm_rows", "norm_scale", "swiglu_backward", "swiglu_rows"]

# The fastest of three to eight each on an H200.
ROW_TILE = {"BLOCK_TOKENS": 64, "BLOCK_FEATURES": BLOCK, "num_warps": 8}
COLUMN_TILE = {"BLOCK_TOKENS": BLOCK, "BLOCK_FEATURES": 64, "num_warps": 4}
BOTH_TILE = {"BLOCK_TOKENS": BLOCK, "BLOCK_FEATURES": BLOCK, "num_warps": 8}


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    x,
    row_factors,
    column_factors,
    rows,
    row_scales,
    columns,
    column_scales,
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
    token_tile, feature_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    t = (token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    n = (feature_tile * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)
    has_token, has_feature = t < tokens, n < features
    inside = has_token[:, None] & has_feature[None, :]
    value = tl.load(x + t[:, None] * features + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        row_factor = tl.load(row_factors + t, mask=has_token, other=0.0)
        column_factor = tl.load(column_factors + n, mask=has_feature, other=0.0).to(tl.float32)
        value = value * row_factor[:, None] * column_factor[None, :]
    if ROWS:
        store_rows(value, rows, row_scales, t, n, has_token, has_feature, tokens, features, feature_tile)
    if COLUMNS:
        store_columns(value, columns, column_scales, t, n, has_token, has_feature, tokens, features, token_tile)


def _launch_cast(
    x: Tensor, *, rows: bool, columns: bool, factors: tuple[Tensor, Tensor] | None = None
) -> list[Fp8Matrix]:
    """Return x in fp8 (rows), its transpose (columns), or both."""
    tile = BOTH_TILE if rows and columns else ROW_TILE if rows else COLUMN_TILE
    tokens, features = x.shape
    by_rows = allocate_matrix(tokens, features, x.device) if rows else None
    by_columns = allocate_matrix(features, tokens, x.device) if columns else None
    grid = (triton.cdiv(tokens, tile["BLOCK_TOKENS"]) * triton.cdiv(features, tile["BLOCK_FEATURES"]),)
    _cast_kernel[grid](
        x,
        *(factors or (x, x)),
        *(by_rows or (x, x)),
        *(by_columns or (x, x)),
        tokens,
        features,
        NORM=factors is not None,
        ROWS=rows,
        COLUMNS=columns,
        **tile,
    )
    return [matrix for matrix in (by_rows, by_columns) if matrix is not None]


def cast_rows(x: Tensor) -> Fp8Matrix:
    """Return x in fp8."""
    return _launch_cast(x, rows=True, columns=False)[0]


def cast_columns(x: Tensor) -> Fp8Matrix:
    """Return the transpose of x in fp8."""
    return _launch_cast(x, rows=False, columns=True)[0]


def cast_both(x: Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return x and its transpose in fp8."""
    rows, columns = _launch_cast(x, rows=True, columns=True)
    return rows, columns


# ── weights ──


@triton.jit
def _cast_weight_kernel(  # type: ignore[no-untyped-def]
    weight,
    rows,
    row_scales,
    columns,
    column_scales,
    outputs,
    inputs,
    row_scales_stride,
    column_scales_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = inputs // BLOCK
    output_tile, input_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    m = (output_tile * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    k = (input_tile * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    value = tl.load(weight + m[:, None] * inputs + k[None, :]).to(tl.float32)
    scale = scale_of(tl.max(tl.max(tl.abs(value), 1), 0))
    value *= 1.0 / scale
    if ROWS:
        tl.store(row_scales + output_tile * row_scales_stride + input_tile, scale)
        tl.store(rows + m[:, None] * inputs + k[None, :], value.to(rows.dtype.element_ty))
    if COLUMNS:
        tl.store(column_scales + input_tile * column_scales_stride + output_tile, scale)
        tl.store(columns + k[:, None] * outputs + m[None, :], tl.trans(value.to(columns.dtype.element_ty)))


def _allocate_weight(rows: int, summed: int, device: torch.device) -> Fp8Matrix:
    padded = triton.cdiv(summed // BLOCK, SCALE_MULTIPLE) * SCALE_MULTIPLE
    data = torch.empty(rows, summed, dtype=FP8, device=device)
    return Fp8Matrix(data, torch.ones(rows // BLOCK, padded, dtype=torch.float32, device=device))


def cast_weight(weight: Tensor, *, rows: bool, columns: bool) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
    """Return a weight and its transpose in fp8 with the same scales, each where it is wanted.

    Both dimensions are multiples of 128.
    """
    outputs, inputs = weight.shape
    by_rows = _allocate_weight(outputs, inputs, weight.device) if rows else None
    by_columns = _allocate_weight(inputs, outputs, weight.device) if columns else None
    strides = [matrix.scale.stride(0) if matrix else 0 for matrix in (by_rows, by_columns)]
    targets = (*(by_rows or (weight, weight)), *(by_columns or (weight, weight)))
    _cast_weight_kernel[(outputs * inputs // BLOCK**2,)](
        weight, *targets, outputs, inputs, *strides, ROWS=rows, COLUMNS=columns, BLOCK=BLOCK, num_warps=8
    )
    return by_rows, by_columns


# ── the norm ──


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x,
    addend,
    weight,
    total,
    rows,
    row_scales,
    tokens,
    features,
    eps,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the norm of one token, and with ADD what it is of. SIZE: a power of two of at least `features`."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)
    inside = n < features
    value = tl.load(x + t * features + n, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(addend + t * features + n, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + t * features + n, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value *= 1.0 / tl.sqrt(tl.sum(value * value, 0) / features + eps)
    value *= tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    blocks = tl.reshape(value, (SIZE // BLOCK, BLOCK))
    scale = scale_of(tl.max(tl.abs(blocks), 1))
    b = tl.arange(0, SIZE // BLOCK)
    tl.store(row_scales + b.to(tl.int64) * tokens + t, scale, mask=b * BLOCK < features)
    cast = tl.reshape((blocks * (1.0 / scale)[:, None]).to(rows.dtype.element_ty), (SIZE,))
    tl.store(rows + t * features + n, cast, mask=inside)


def _launch_norm(x: Tensor, addend: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Fp8Matrix]:
    """Return x plus `addend`, x itself without one, and the norm of that in fp8."""
    total = x if addend is None else torch.empty_like(x)
    rows = allocate_matrix(len(x), x.shape[1], x.device)
    size = triton.next_power_of_2(x.shape[1])
    tensors = (x, x if addend is None else addend, weight, total, *rows)
    _norm_kernel[(len(x),)](*tensors, *x.shape, eps, ADD=addend is not None, SIZE=size, BLOCK=BLOCK, num_warps=4)
    return total, rows


def norm_rows(x: Tensor, weight: Tensor, eps: float, scale: None = None) -> Fp8Matrix:
    """Return the norm of x in fp8."""
    return _launch_norm(x, None, weight, eps)[1]


def add_and_norm_rows(
    x: Tensor, addend: Tensor, weight: Tensor, eps: float, scale: None = None
) -> tuple[Tensor, Fp8Matrix]:
    """Return x + addend in their data type, and the norm of that in fp8."""
    return _launch_norm(x, addend, weight, eps)


def norm_backward(
    x: Tensor, weight: Tensor, d_out: Tensor, d_residual: Tensor, eps: float, scale: None = None
) -> tuple[Tensor, Tensor, Fp8Matrix]:
    """Return the gradient of x plus `d_residual`, that of weight, and the transpose of the norm of x in fp8."""
    d_x, d_weight, factors = differentiate_norm(x, weight, d_out, d_residual, eps)
    return d_x, d_weight, _launch_cast(x, rows=False, columns=True, factors=(factors, weight))[0]
