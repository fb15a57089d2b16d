"""SwiGLU and its gradients in fp8 with a scale for each block, in Triton: functions of `workloads.llama.fp8_blocks`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workloads.llama.fp8 import Fp8Matrix
from workloads.llama.fp8_block_tiles import store_columns, store_rows
from workloads.llama.fp8_blocks import BLOCK, allocate_matrix
from workloads.llama.fp8_swiglu_kernels import swiglu_derivatives

# The fastest of six to eight each on an H200.
FORWARD_TILE = {"BLOCK_TOKENS": 32, "BLOCK_FEATURES": BLOCK, "num_warps": 4}
ROW_TILE = {"BLOCK_TOKENS": 64, "BLOCK_FEATURES": BLOCK, "num_warps": 8}
COLUMN_TILE = {"BLOCK_TOKENS": BLOCK, "BLOCK_FEATURES": 64, "num_warps": 8}


@triton.jit
def _swiglu_kernel(  # type: ignore[no-untyped-def]
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


def swiglu_rows(gate: Tensor, up: Tensor) -> Fp8Matrix:
    """Return silu(gate) * up in fp8."""
    tokens, features = gate.shape
    rows = allocate_matrix(tokens, features, gate.device)
    _swiglu_kernel[_grid(tokens, features, FORWARD_TILE)](gate, up, *rows, tokens, features, **FORWARD_TILE)
    return rows


@triton.jit
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
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
    """Write the gradients of gate and up side by side: by rows with ROWS, else by columns, and then `hidden` too."""
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


def swiglu_backward(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Fp8Matrix, Fp8Matrix, Fp8Matrix]:
    """Return in fp8: the output's transpose, and the gradients of gate and up side by side with their transpose.

    Two kernels, since a tile of 128 x 128 with three results does not fit into registers. `features` is a multiple of
    128.
    """
    device, (tokens, features) = gate.device, gate.shape
    hidden, columns = (allocate_matrix(width, tokens, device) for width in (features, 2 * features))
    rows = allocate_matrix(tokens, 2 * features, device)
    for is_rows, d, tile in ((True, rows, ROW_TILE), (False, columns, COLUMN_TILE)):
        _swiglu_backward_kernel[_grid(tokens, features, tile)](
            gate, up, d_hidden, *hidden, *d, tokens, features, ROWS=is_rows, **tile
        )
    return hidden, rows, columns


def _grid(tokens: int, features: int, tile: dict[str, int]) -> tuple[int]:
    return (triton.cdiv(tokens, tile["BLOCK_TOKENS"]) * triton.cdiv(features, tile["BLOCK_FEATURES"]),)
