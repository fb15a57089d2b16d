"""Writing a tile of numbers in fp8 with scales of 1 x 128, by rows or by columns, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from workloads.llama.fp8_scale_kernels import scale_of


@triton.jit
def store_rows(value, rows, scales, t, n, has_token, has_feature, tokens, features, block):  # type: ignore[no-untyped-def]
    """Write a tile [tokens, 128 features] to rows[tokens, features] at t and n, which are the block's features."""
    scale = scale_of(tl.max(tl.abs(value), 1))
    tl.store(scales + block.to(tl.int64) * tokens + t, scale, mask=has_token)
    cast = (value * (1.0 / scale)[:, None]).to(rows.dtype.element_ty)
    tl.store(rows + t[:, None] * features + n[None, :], cast, mask=has_token[:, None] & has_feature[None, :])


@triton.jit
def store_columns(value, columns, scales, t, n, has_token, has_feature, tokens, features, block):  # type: ignore[no-untyped-def]
    """Write a tile [128 tokens, features] to columns[features, tokens] at n and t, which are the block's tokens."""
    scale = scale_of(tl.max(tl.abs(value), 0))
    tl.store(scales + block.to(tl.int64) * features + n, scale, mask=has_feature)
    cast = tl.trans((value * (1.0 / scale)[None, :]).to(columns.dtype.element_ty))
    tl.store(columns + n[:, None] * tokens + t[None, :], cast, mask=has_feature[:, None] & has_token[None, :])
