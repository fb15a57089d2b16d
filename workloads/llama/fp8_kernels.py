"""Triton kernels that fuse fp8 casts with the elementwise operations before them; `fp8_launch` calls the kernels.

Values are computed in fp32 from bf16 inputs and rounded once. Kernels with granularity `tensor` take a scale that an
earlier kernel has computed. Kernels with granularity `block` compute the scales of the blocks that they write
(`workloads.llama.fp8_quantize`).
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(amax):
    """Return the scales for the largest magnitudes, as `workloads.llama.fp8_quantize.scale_of` does."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    value = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where(bits >= 0x7F800000, float("nan"), value)


@triton.jit
def amax_kernel(x, up, partial, numel, SWIGLU: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest magnitude of x, or of silu(x) * up if SWIGLU; each program covers one part."""
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
        if SWIGLU:
            value = value * tl.sigmoid(value) * tl.load(up + at, mask=at < numel, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(value))
    tl.store(partial + tl.program_id(0), tl.max(peak, 0))


@triton.jit
def swiglu_derivatives(g, u, d):
    """Return the SwiGLU output and the gradients of gate and up."""
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    return silu * u, d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), d * silu


@triton.jit
def swiglu_backward_amax_kernel(gate, up, d_hidden, hidden_partial, d_partial, numel, BLOCK: tl.constexpr):
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
def scale_kernel(partial, scale, COUNT: tl.constexpr):
    tl.store(scale, scale_of(tl.max(tl.load(partial + tl.arange(0, COUNT)), 0)))


@triton.jit
def swiglu_tensor_kernel(gate, up, scale, rows, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < numel, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < numel, other=0.0).to(tl.float32)
    value = g * tl.sigmoid(g) * u * (1.0 / tl.load(scale))
    tl.store(rows + at, value.to(rows.dtype.element_ty), mask=at < numel)


@triton.jit
def swiglu_backward_tensor_kernel(
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
    # The scale is read again to make the compiler convert rows and columns separately. With shared conversions, ptxas
    # 12.8 (Triton 3.6, sm90) writes a quarter of the columns wrong.
    inverse = 1.0 / tl.load(d_scale, volatile=True)
    tl.store(d_columns + at, tl.trans((d_gate * inverse).to(dtype)), mask=inside)
    tl.store(d_columns + at + features.to(tl.int64) * tokens, tl.trans((d_up * inverse).to(dtype)), mask=inside)
    hidden *= 1.0 / tl.load(hidden_scale)
    tl.store(hidden_columns + at, tl.trans(hidden.to(dtype)), mask=inside)


# Casts with granularity `block`. A program writes whole blocks: 128 features of a token by rows, and 128 tokens of a
# feature by columns (transposed).


@triton.jit
def store_rows(value, rows, scales, t, n, has_token, has_feature, tokens, features, block):
    """Write a tile [tokens, 128 features] to rows[tokens, features] at tokens t and the block's features n."""
    scale = scale_of(tl.max(tl.abs(value), 1))
    tl.store(scales + block.to(tl.int64) * tokens + t, scale, mask=has_token)
    cast = (value * (1.0 / scale)[:, None]).to(rows.dtype.element_ty)
    tl.store(rows + t[:, None] * features + n[None, :], cast, mask=has_token[:, None] & has_feature[None, :])


@triton.jit
def store_columns(value, columns, scales, t, n, has_token, has_feature, tokens, features, block):
    """Write a tile [128 tokens, features] to columns[features, tokens] at features n and the block's tokens t."""
    scale = scale_of(tl.max(tl.abs(value), 0))
    tl.store(scales + block.to(tl.int64) * features + n, scale, mask=has_feature)
    cast = tl.trans((value * (1.0 / scale)[None, :]).to(columns.dtype.element_ty))
    tl.store(columns + n[:, None] * tokens + t[None, :], cast, mask=has_feature[:, None] & has_token[None, :])


@triton.jit
def cast_kernel(
    x,
    scale,
    row_factors,
    column_factors,
    rows,
    row_scales,
    columns,
    column_scales,
    tokens,
    features,
    group,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Cast x, or the norm of x if NORM: x times the factor of the row times the factor of the column.

    If SCALED, all blocks share one `scale`, and columns belong to matrices of `group` tokens each. Otherwise, each
    block gets its own scale.
    """
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
    if SCALED:
        value *= 1.0 / tl.load(scale)
        if ROWS:
            tl.store(rows + t[:, None] * features + n[None, :], value.to(rows.dtype.element_ty), mask=inside)
        if COLUMNS:
            transposed = tl.trans(value.to(columns.dtype.element_ty))
            inside = has_feature[:, None] & has_token[None, :]
            at = n[:, None] * group + (t // group * group * features + t % group)[None, :]
            tl.store(columns + at, transposed, mask=inside)
    else:
        if ROWS:
            store_rows(value, rows, row_scales, t, n, has_token, has_feature, tokens, features, feature_tile)
        if COLUMNS:
            store_columns(value, columns, column_scales, t, n, has_token, has_feature, tokens, features, token_tile)


@triton.jit
def cast_weight_block_kernel(
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


@triton.jit
def norm_kernel(
    x,
    addend,
    weight,
    scale,
    total,
    rows,
    row_scales,
    tokens,
    features,
    eps,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the norm of one token and, if ADD, the sum that is normalized. SIZE is a power of two >= `features`. If
    SCALED, all blocks share one `scale`; otherwise each block gets its own scale."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)
    inside = n < features
    value = tl.load(x + t * features + n, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(addend + t * features + n, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + t * features + n, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / features + eps)
    if SCALED:
        value *= factor / tl.load(scale) * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
        cast = value.to(rows.dtype.element_ty)
    else:
        value *= factor
        value *= tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
        blocks = tl.reshape(value, (SIZE // BLOCK, BLOCK))
        block_scales = scale_of(tl.max(tl.abs(blocks), 1))
        b = tl.arange(0, SIZE // BLOCK)
        tl.store(row_scales + b.to(tl.int64) * tokens + t, block_scales, mask=b * BLOCK < features)
        cast = tl.reshape((blocks * (1.0 / block_scales)[:, None]).to(rows.dtype.element_ty), (SIZE,))
    tl.store(rows + t * features + n, cast, mask=inside)


@triton.jit
def swiglu_block_kernel(
    gate, up, rows, scales, tokens, features, BLOCK_TOKENS: tl.constexpr, BLOCK_FEATURES: tl.constexpr
):
    tiles = tl.cdiv(features, BLOCK_FEATURES)
    tile = tl.program_id(0) % tiles
    t = ((tl.program_id(0) // tiles) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    n = (tile * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)
    at, inside = t[:, None] * features + n[None, :], (t[:, None] < tokens) & (n[None, :] < features)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    store_rows(g * tl.sigmoid(g) * u, rows, scales, t, n, t < tokens, n < features, tokens, features, tile)


@triton.jit
def swiglu_backward_block_kernel(
    gate,
    up,
    d_hidden,
    hidden,
    hidden_scales,
    d,
    d_scales,
    tokens,
    features,
    ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Write the gradients of gate and up side by side: by rows if ROWS, else by columns together with `hidden`."""
    tiles = tl.cdiv(features, BLOCK_FEATURES)
    token_tile, feature_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    t = (token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    n = (feature_tile * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)
    has_token, has_feature = t < tokens, n < features
    at, inside = t[:, None] * features + n[None, :], has_token[:, None] & has_feature[None, :]
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    later = tl.load(d_hidden + at, mask=inside, other=0.0).to(tl.float32)
    value, d_gate, d_up = swiglu_derivatives(g, u, later)
    width = 2 * features
    if ROWS:
        store_rows(d_gate, d, d_scales, t, n, has_token, has_feature, tokens, width, feature_tile)
        store_rows(d_up, d, d_scales, t, n + features, has_token, has_feature, tokens, width, feature_tile + tiles)
    else:
        store_columns(value, hidden, hidden_scales, t, n, has_token, has_feature, tokens, features, token_tile)
        store_columns(d_gate, d, d_scales, t, n, has_token, has_feature, tokens, width, token_tile)
        store_columns(d_up, d, d_scales, t, n + features, has_token, has_feature, tokens, width, token_tile)


@triton.jit
def norm_backward_kernel(
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
