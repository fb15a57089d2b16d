"""Fp8 matrices, their GEMMs, and their casts in plain PyTorch. The Triton casts are in `workloads.llama.fp8_launch`.

Weights, activations and gradients are e4m3. A scale is a power of two that brings the largest magnitude of its matrix
or block into the range from 224 to 448, the largest e4m3 number. Scales come from the current values, not from an
earlier step. There are two granularities of scales, for two recipes of `workloads.api.recipes`:

- tensor (`fp8_tensorwise`): a matrix has one scale. The norm of x is the exception: its scale comes from its upper
  bound, the square root of the number of features times the norm's largest weight. The values of a matrix lie so far
  above the smallest normal number that a scale half as large rounds nearly all of them the same way.
- block (`fp8_blockwise`): the scheme of DeepSeek-V3's training (arXiv 2412.19437, section 3.3) with powers of two as
  scales. An activation or a gradient has one scale per 128 numbers along the summed dimension, so it is cast again for
  products that sum over tokens. A weight has one scale per 128 x 128 block, which also serves its transpose. Each scale
  depends only on its own block, so a cast reads its input once.
"""

import math
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from workloads.llama.model import swiglu

Granularity = Literal["tensor", "block"]
FP8 = torch.float8_e4m3fn
BLOCK = 128  # elements along the dimension that a GEMM sums over; for a weight, along both dimensions
# cuBLASLt reads the scales of a weight in rows padded to a multiple of four.
SCALE_MULTIPLE = 4


class Fp8Matrix(NamedTuple):
    """A matrix (for experts, a stack) divided by its scale, contiguous along the dimension that GEMMs sum over."""

    data: Tensor  # [rows, summed] in fp8, or [experts, rows, summed]
    # fp32 on the matrix's device: one number, one per row [rows], one per block [summed / 128, rows], or one per block
    # of a weight [rows / 128, summed / 128, padded to a multiple of 4].
    scale: Tensor


def scale_of(amax: Tensor) -> Tensor:
    """Return the scale for a largest magnitude: the smallest power of two for which amax / scale <= 448.

    The scale is computed from the bits of fp32: 448 is 1.75 x 2^8, so a mantissa above 1.75 adds one to the exponent.
    The scale of an infinite magnitude is NaN, because a conversion to fp8 would replace infinity with 448.
    """
    bits = amax.float().view(torch.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clamp_min(1)
    return (exponent << 23).view(torch.float32).where(amax.isfinite(), float("nan"))


def halve(matrix: Fp8Matrix) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return the upper and the lower half of a weight's rows."""
    scales = matrix.scale.chunk(2) if matrix.scale.dim() else (matrix.scale, matrix.scale)
    upper, lower = (Fp8Matrix(*parts) for parts in zip(matrix.data.chunk(2), scales, strict=True))
    return upper, lower


def multiply(a: Fp8Matrix, b: Fp8Matrix, bias: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """Return a @ bᵀ in bf16. Both are [rows, summed] with scales of the same granularity; `b` may be a weight.

    The bias is added to every row, in bf16. `fast` sums in the matrix units' own accumulators, which have fewer bits
    than fp32. `fast` has no effect with block scales, where sums are added in fp32.
    """
    is_tensorwise, on_cpu = a.scale.dim() == 0, a.data.device.type == "cpu"
    if is_tensorwise and on_cpu:
        out = (a.data.float() @ b.data.float().t()) * (a.scale * b.scale)
        return (out if bias is None else out + bias.float()).bfloat16()
    if is_tensorwise:
        whole = functional.ScalingType.TensorWise
        return functional.scaled_mm(a.data, b.data.t(), a.scale, whole, b.scale, whole, bias=bias, use_fast_accum=fast)
    if on_cpu:
        out = (dequantize(a) @ dequantize(b).t()).bfloat16()
    else:
        row_blocks = functional.ScalingType.BlockWise1x128
        b_blocks = functional.ScalingType.BlockWise128x128 if _has_weight_blocks(b) else row_blocks
        out = functional.scaled_mm(a.data, b.data.t(), a.scale.t(), row_blocks, b.scale.t(), b_blocks)
    return out if bias is None else out.add_(bias)


def dequantize(matrix: Fp8Matrix) -> Tensor:
    """Return a matrix with block scales as fp32."""
    rows, summed = matrix.data.shape
    scale = matrix.scale.repeat_interleave(BLOCK, 0)[:rows] if _has_weight_blocks(matrix) else matrix.scale.t()
    return matrix.data.float() * scale.repeat_interleave(BLOCK, 1)[:, :summed]


def _has_weight_blocks(matrix: Fp8Matrix) -> bool:
    """Return whether a matrix of more than four rows has a scale per 128 x 128 block, judging by the scales' shape."""
    rows, summed = matrix.data.shape
    return matrix.scale.shape != (-(-summed // BLOCK), rows)


class Casts:
    """Casts of a transformer block's operands, each including the elementwise operations before it.

    Weights [out, in] and activations [tokens, features] are cast by rows for products that sum over the second
    dimension, or by columns (as their transpose) for products that sum over the first.
    """

    def __init__(self, granularity: Granularity) -> None:
        self.granularity = granularity

    def norm_scale(self, weight: Tensor) -> Tensor | None:
        """Return the scale for an RMS norm's output, from an upper bound; None if each block has its own scale."""
        return scale_of(weight.float().abs().amax() * math.sqrt(len(weight))) if self.granularity == "tensor" else None

    def cast(
        self, x: Tensor, *, rows: bool = False, columns: bool = False, scale: Tensor | None = None
    ) -> list[Fp8Matrix]:
        """Return x, or each matrix of a stack, by rows, by columns, or both in this order, with `scale` if given."""
        return [self._quantize(matrix, scale) for matrix in (x,) * rows + (x.mT,) * columns]

    def _quantize(self, x: Tensor, scale: Tensor | None = None) -> Fp8Matrix:
        if self.granularity == "tensor":
            scale = scale_of(x.abs().amax()) if scale is None else scale
            return Fp8Matrix((x.float() / scale).to(FP8).contiguous(), scale)
        padded = functional.pad(x.float(), (0, -x.shape[1] % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK))  # [rows, blocks, 128]
        scale = scale_of(blocks.abs().amax(-1))
        data = (blocks / scale[..., None]).flatten(1)[:, : x.shape[1]].to(FP8)
        return Fp8Matrix(data.contiguous(), scale.t().contiguous())

    def cast_weight(
        self, weight: Tensor, scale: Tensor | None = None, *, rows: bool = False, columns: bool = False
    ) -> list[Fp8Matrix]:
        """Return a weight by rows, by columns, or both in this order, with the same scales. Blocks must be whole.
        `scale` is the whole weight's scale, if it is known."""
        if self.granularity == "tensor":
            return self.cast(weight, rows=rows, columns=columns, scale=scale)
        blocks = weight.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [out / 128, 128, in / 128, 128]
        scale = scale_of(blocks.abs().amax((1, 3)))
        data = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(FP8)
        return [
            Fp8Matrix(part.contiguous(), functional.pad(scales, (0, -scales.shape[1] % SCALE_MULTIPLE), value=1.0))
            for part, scales in ((data, scale),) * rows + ((data.t(), scale.t()),) * columns
        ]

    def add_and_norm(
        self, x: Tensor, addend: Tensor | None, weight: Tensor, eps: float, scale: Tensor | None
    ) -> tuple[Tensor, Fp8Matrix]:
        """Return x + addend (or x if there is no addend) in their data type, and the norm of the sum by rows."""
        total = x if addend is None else x + addend
        return total, self._quantize(_norm(total, weight, eps), scale)

    def norm_backward(
        self, x: Tensor, weight: Tensor, d_out: Tensor, d_residual: Tensor, eps: float, scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Fp8Matrix]:
        """Return the gradient of x plus `d_residual`, the gradient of the weight, and the norm of x by columns."""
        _, vjp = torch.func.vjp(partial(_norm, eps=eps), x.float(), weight.float())  # type: ignore[misc]
        d_x, d_weight = vjp(d_out.float())
        d_x, d_weight = (d_x + d_residual.float()).to(x.dtype), d_weight.to(weight.dtype)
        return d_x, d_weight, self._quantize(_norm(x, weight, eps).t(), scale)

    def swiglu(self, gate: Tensor, up: Tensor) -> Fp8Matrix:
        """Return silu(gate) * up by rows."""
        return self._quantize(swiglu(gate.float(), up.float()))

    def swiglu_backward(self, gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Fp8Matrix, Fp8Matrix, Fp8Matrix]:
        """Return the output by columns, and the gradients of gate and up side by side, by rows and by columns. With
        granularity `tensor`, both gradients share one scale so that one GEMM can sum over both."""
        hidden, vjp = torch.func.vjp(swiglu, gate.float(), up.float())  # type: ignore[misc]
        d_gate_up = torch.cat(vjp(d_hidden.float()), dim=1)
        (by_columns,) = self.cast(hidden, columns=True)
        d_rows, d_columns = self.cast(d_gate_up, rows=True, columns=True)
        return by_columns, d_rows, d_columns


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
