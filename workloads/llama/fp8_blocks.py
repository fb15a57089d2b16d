"""Matrices in fp8 with a scale for each block of them, their products, and their casts in plain PyTorch.

The recipe is `fp8_blockwise` in `workloads.api.recipes`, that of DeepSeek-V3's training (arXiv 2412.19437, section 3.3)
with powers of two as scales: weights, activations and gradients are e4m3. An activation or a gradient has a scale for
each 128 numbers that a product sums over, so it is cast again for products that sum over tokens. A weight has one for
each 128 x 128, which holds for its transpose too. Each scale brings its block's largest magnitude between 224 and 448,
and no scale depends on other blocks: a cast reads its input once.

The functions are those of `workloads.llama.fp8`. `workloads.llama.fp8_blocks_kernels` has the casts as Triton kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from workloads.llama.fp8 import FP8, Fp8Matrix, differentiate_norm, differentiate_swiglu, norm, scale_of, swiglu

BLOCK = 128  # numbers along the dimension that a product sums over; of a weight along both
# cuBLASLt reads the scales of a weight in rows of a multiple of four.
SCALE_MULTIPLE = 4


def norm_scale(weight: Tensor) -> None:
    """Return no scale: each block of a norm has its own."""


def multiply(a: Fp8Matrix, b: Fp8Matrix, bias: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """Return a @ bᵀ, both [rows, summed], in bf16.

    Args:
        a: scales [summed / 128, rows].
        b: such scales, or those of a weight: [rows / 128, summed / 128, in multiples of 4].
        bias: added to every row, in bf16.
        fast: without effect. Each block's sum is added in fp32.
    """
    if a.data.device.type == "cpu":
        out = (dequantize(a) @ dequantize(b).t()).bfloat16()
    else:
        row_blocks = functional.ScalingType.BlockWise1x128
        b_blocks = functional.ScalingType.BlockWise128x128 if _is_weight(b) else row_blocks
        out = functional.scaled_mm(a.data, b.data.t(), a.scale.t(), row_blocks, b.scale.t(), b_blocks)
    return out if bias is None else out.add_(bias)


def halve(matrix: Fp8Matrix) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return the upper and the lower half of a weight's rows."""
    upper, lower = (Fp8Matrix(*parts) for parts in zip(matrix.data.chunk(2), matrix.scale.chunk(2), strict=True))
    return upper, lower


def dequantize(matrix: Fp8Matrix) -> Tensor:
    """Return a matrix in fp32."""
    rows, summed = matrix.data.shape
    scale = matrix.scale.repeat_interleave(BLOCK, 0)[:rows] if _is_weight(matrix) else matrix.scale.t()
    return matrix.data.float() * scale.repeat_interleave(BLOCK, 1)[:, :summed]


def _is_weight(matrix: Fp8Matrix) -> bool:
    """Return whether a matrix of more than four rows has scales of 128 x 128: those of 1 x 128 have another shape."""
    rows, summed = matrix.data.shape
    return matrix.scale.shape != (-(-summed // BLOCK), rows)


def allocate_matrix(rows: int, summed: int, device: torch.device) -> Fp8Matrix:
    """Return a matrix with scales of 1 x 128, not initialized."""
    data = torch.empty(rows, summed, dtype=FP8, device=device)
    return Fp8Matrix(data, torch.empty(-(-summed // BLOCK), rows, dtype=torch.float32, device=device))


# ── casts ──


def cast_rows(x: Tensor) -> Fp8Matrix:
    """Return x in fp8."""
    blocks = _split_blocks(x.float())  # [rows, blocks, 128]
    scale = scale_of(blocks.abs().amax(-1))
    data = (blocks / scale[..., None]).flatten(1)[:, : x.shape[1]].to(FP8)
    return Fp8Matrix(data.contiguous(), scale.t().contiguous())


def _split_blocks(x: Tensor) -> Tensor:
    """Return x[rows, summed] as [rows, blocks, 128], with zeros at the end of the last block."""
    return functional.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def cast_columns(x: Tensor) -> Fp8Matrix:
    """Return the transpose of x in fp8."""
    return cast_rows(x.t())


def cast_both(x: Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return x and its transpose in fp8."""
    return cast_rows(x), cast_columns(x)


def cast_weight(weight: Tensor, *, rows: bool, columns: bool) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
    """Return a weight and its transpose in fp8 with the same scales, each where it is wanted.

    Both dimensions are multiples of 128.
    """
    blocks = weight.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [rows / 128, 128, summed / 128, 128]
    scale = scale_of(blocks.abs().amax((1, 3)))
    data = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(FP8)
    by_columns = Fp8Matrix(data.t().contiguous(), _pad_scales(scale.t())) if columns else None
    return Fp8Matrix(data, _pad_scales(scale)) if rows else None, by_columns


def _pad_scales(scale: Tensor) -> Tensor:
    return functional.pad(scale, (0, -scale.shape[1] % SCALE_MULTIPLE), value=1.0)


def norm_rows(x: Tensor, weight: Tensor, eps: float, scale: None = None) -> Fp8Matrix:
    """Return the norm of x in fp8."""
    return cast_rows(norm(x, weight, eps))


def add_and_norm_rows(
    x: Tensor, addend: Tensor, weight: Tensor, eps: float, scale: None = None
) -> tuple[Tensor, Fp8Matrix]:
    """Return x + addend in their data type, and the norm of that in fp8."""
    total = x + addend
    return total, norm_rows(total, weight, eps)


def norm_backward(
    x: Tensor, weight: Tensor, d_out: Tensor, d_residual: Tensor, eps: float, scale: None = None
) -> tuple[Tensor, Tensor, Fp8Matrix]:
    """Return the gradient of x plus `d_residual`, that of weight, and the transpose of the norm of x in fp8."""
    d_x, d_weight = differentiate_norm(x, weight, d_out, d_residual, eps)
    return d_x, d_weight, cast_columns(norm(x, weight, eps))


def swiglu_rows(gate: Tensor, up: Tensor) -> Fp8Matrix:
    """Return silu(gate) * up in fp8."""
    return cast_rows(swiglu(gate.float(), up.float()))


def swiglu_backward(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Fp8Matrix, Fp8Matrix, Fp8Matrix]:
    """Return in fp8: the output's transpose, and the gradients of gate and up side by side with their transpose."""
    hidden, d_gate_up = differentiate_swiglu(gate, up, d_hidden)
    return cast_columns(hidden), *cast_both(d_gate_up)
