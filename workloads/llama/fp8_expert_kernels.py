"""Triton casts for `workloads.llama.fp8_experts`."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workloads.llama.fp8_kernels import scale_of, swiglu_derivatives
from workloads.llama.fp8_quantize import FP8, Fp8Matrix

# Elements that a program holds at a time; fewer if it holds more tensors.
WEIGH_TILE, WEIGH_BACKWARD_TILE = 4096, 2048
ROWS_TILE = {"BLOCK_ROWS": 16, "BLOCK_FEATURES": 512, "num_warps": 4}
COLUMNS_TILE = {"BLOCK_ROWS": 128, "BLOCK_FEATURES": 128, "num_warps": 8}


@triton.jit
def arrange_kernel(
    x,
    sources,
    factors,
    rows,
    columns,
    count,
    features,
    COPY: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Write x by rows and columns. COPY selects the rows `sources` (-1: zeros); SCALE multiplies rows by `factors`."""
    tiles = tl.cdiv(features, BLOCK_FEATURES)
    t = ((tl.program_id(0) // tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    n = ((tl.program_id(0) % tiles) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)
    has_row, has_feature = t < count, n < features
    if COPY:
        source = tl.load(sources + t, mask=has_row, other=-1)
        inside = (source >= 0)[:, None] & has_feature[None, :]
        value = tl.load(x + source[:, None] * features + n[None, :], mask=inside, other=0)
    else:
        value = tl.load(x + t[:, None] * features + n[None, :], mask=has_row[:, None] & has_feature[None, :])
    if SCALE:
        factor = tl.load(factors + t, mask=has_row, other=0.0)
        value = (value.to(tl.float32) * factor[:, None]).to(columns.dtype.element_ty)
    if ROWS:
        tl.store(rows + t[:, None] * features + n[None, :], value, mask=has_row[:, None] & has_feature[None, :])
    if COLUMNS:
        inside = has_feature[:, None] & has_row[None, :]
        tl.store(columns + n[:, None] * count + t[None, :], tl.trans(value), mask=inside)


def launch_arrange(
    x: Tensor, sources: Tensor | None, factors: Tensor | None, *, rows: bool = False, columns: bool = False
) -> list[Tensor]:
    """Return selected rows of x[rows, features], stored by rows and by columns (transposed). sources[rows, 1] selects
    the rows (zeros for -1), by default all of x. If given, factors[rows] scale them."""
    count, features = len(x if sources is None else sources), x.shape[1]
    by_rows = x.new_empty(count, features) if rows else x
    by_columns = x.new_empty(features, count) if columns else x
    tile = COLUMNS_TILE if columns else ROWS_TILE
    grid = (triton.cdiv(count, tile["BLOCK_ROWS"]) * triton.cdiv(features, tile["BLOCK_FEATURES"]),)
    inputs = (x, x if sources is None else sources.contiguous(), x if factors is None else factors)
    flags = {"COPY": sources is not None, "SCALE": factors is not None, "ROWS": rows, "COLUMNS": columns}
    arrange_kernel[grid](*inputs, by_rows, by_columns, count, features, **flags, **tile)
    return [by_rows] * rows + [by_columns] * columns


@triton.jit
def weigh_kernel(
    gate,
    up,
    weights,
    d_hidden,
    hidden,
    hidden_scales,
    d,
    d_scales,
    d_weights,
    rows,
    features,
    stride,
    BACKWARD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Cast whole rows of silu(gate) * up * weights, and of the gradients if BACKWARD. SIZE is a power of two."""
    t = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    n = tl.arange(0, SIZE)
    has_row = t < rows
    inside = has_row[:, None] & (n < features)[None, :]
    at = t[:, None] * stride + n[None, :]
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weights + t, mask=has_row, other=0.0)
    at = t[:, None] * features + n[None, :]
    dtype = hidden.dtype.element_ty
    if BACKWARD:
        later = tl.load(d_hidden + at, mask=inside, other=0.0).to(tl.float32)
        value, d_gate, d_up = swiglu_derivatives(g, u, later)
        tl.store(d_weights + t, tl.sum(value * later, 1), mask=has_row)
        scale = scale_of(tl.maximum(tl.max(tl.abs(d_gate), 1), tl.max(tl.abs(d_up), 1)) * tl.abs(w))
        tl.store(d_scales + t, scale, mask=has_row)
        factor = (w / scale)[:, None]
        d_at = t[:, None] * (2 * features) + n[None, :]
        tl.store(d + d_at, (d_gate * factor).to(dtype), mask=inside)
        tl.store(d + d_at + features, (d_up * factor).to(dtype), mask=inside)
    else:
        value = g * tl.sigmoid(g) * u
    value *= w[:, None]
    scale = scale_of(tl.max(tl.abs(value), 1))
    tl.store(hidden_scales + t, scale, mask=has_row)
    tl.store(hidden + at, (value * (1.0 / scale)[:, None]).to(dtype), mask=inside)


def launch_weigh(
    gate: Tensor, up: Tensor, weights: Tensor, d_hidden: Tensor | None = None
) -> tuple[Fp8Matrix, Fp8Matrix, Tensor]:
    """Compute `workloads.llama.fp8_experts.weigh` for gate and up, which have the same stride. If `d_hidden` is given,
    also return the gradients of gate and up (side by side, by rows) and of the weights."""
    (rows, features), is_backward = gate.shape, d_hidden is not None
    hidden, d = (
        Fp8Matrix(gate.new_empty(rows, width, dtype=FP8), gate.new_empty(rows, dtype=torch.float32))
        for width in (features, 2 * features * is_backward)
    )
    d_weights, size = torch.empty_like(weights), triton.next_power_of_2(features)
    block = max(1, (WEIGH_BACKWARD_TILE if is_backward else WEIGH_TILE) // size)
    tensors = (gate, up, weights, gate if d_hidden is None else d_hidden, *hidden, *d, d_weights)
    options = {"BACKWARD": is_backward, "BLOCK_ROWS": block, "SIZE": size, "num_warps": min(16, max(4, size // 512))}
    weigh_kernel[(triton.cdiv(rows, block),)](*tensors, rows, features, gate.stride(0), **options)
    return hidden, d, d_weights
