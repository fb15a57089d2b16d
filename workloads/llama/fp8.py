"""Matrices in fp8 with one scale each, their products, and their casts in plain PyTorch.

The recipe is `fp8_tensorwise` in `workloads.api.recipes`: weights, activations and gradients are e4m3. A scale is the
power of two that brings a matrix's largest magnitude between 224 and 448, the largest number of the type. It is that of
the matrix itself, not of an earlier step. The norm of x is the exception: its scale is that of its upper bound, the
square root of its features times the norm's largest weight. The values of a matrix are so far above the smallest normal
number that a scale which is smaller by a power of two rounds nearly all of them alike.

`workloads.llama.fp8_kernels` has the same casts as Triton kernels for GPUs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

FP8 = torch.float8_e4m3fn


class Fp8Matrix(NamedTuple):
    """A matrix divided by its scale, contiguous along the dimension that products sum over.

    Attributes:
        data: [rows, summed] in fp8.
        scale: fp32 on the matrix's device: one number, or those of blocks (`workloads.llama.fp8_blocks`).
    """

    data: Tensor
    scale: Tensor


def scale_of(amax: Tensor) -> Tensor:
    """Return the scale of a matrix with this largest magnitude: the smallest power of two with amax / scale <= 448.

    It is computed on the bits of fp32: 448 is 1.75 x 2^8, so a mantissa above 1.75 adds one to the exponent. The scale
    of an infinite magnitude is NaN, because a conversion to fp8 would replace infinity by 448.
    """
    bits = amax.float().view(torch.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clamp_min(1)
    return (exponent << 23).view(torch.float32).where(amax.isfinite(), float("nan"))


def norm_scale(weight: Tensor) -> Tensor:
    """Return the scale of any RMS norm with this weight. No feature's norm exceeds the square root of their number."""
    return scale_of(weight.float().abs().amax() * math.sqrt(len(weight)))


def halve(matrix: Fp8Matrix) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return the upper and the lower half of a matrix's rows."""
    upper, lower = matrix.data.chunk(2)
    return Fp8Matrix(upper, matrix.scale), Fp8Matrix(lower, matrix.scale)


def multiply(a: Fp8Matrix, b: Fp8Matrix, bias: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """Return a @ bᵀ, both [rows, summed], in bf16.

    Args:
        bias: added to every row, in bf16.
        fast: sum in the matrix units' own accumulators, which have fewer bits than fp32.
    """
    if a.data.device.type == "cpu":
        out = (a.data.float() @ b.data.float().t()) * (a.scale * b.scale)
        return (out if bias is None else out + bias.float()).bfloat16()
    one_scale = functional.ScalingType.TensorWise
    return functional.scaled_mm(
        a.data, b.data.t(), a.scale, one_scale, b.scale, one_scale, bias=bias, use_fast_accum=fast
    )


# ── casts ──


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).to(FP8)


def cast_rows(x: Tensor) -> Fp8Matrix:
    """Return x in fp8."""
    scale = scale_of(x.abs().amax())
    return Fp8Matrix(_divide(x, scale), scale)


def cast_columns(x: Tensor) -> Fp8Matrix:
    """Return the transpose of x in fp8."""
    return transpose(cast_rows(x))


def cast_both(x: Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return x and its transpose in fp8."""
    rows = cast_rows(x)
    return rows, transpose(rows)


def cast_weight(weight: Tensor, *, rows: bool, columns: bool) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
    """Return a weight and its transpose in fp8, each where it is wanted."""
    matrix = cast_rows(weight)
    return matrix if rows else None, transpose(matrix) if columns else None


def transpose(matrix: Fp8Matrix) -> Fp8Matrix:
    return Fp8Matrix(matrix.data.t().contiguous(), matrix.scale)


def norm_rows(x: Tensor, weight: Tensor, eps: float, scale: Tensor) -> Fp8Matrix:
    """Return the norm of x in fp8."""
    return Fp8Matrix(_divide(norm(x, weight, eps), scale), scale)


def add_and_norm_rows(x: Tensor, addend: Tensor, weight: Tensor, eps: float, scale: Tensor) -> tuple[Tensor, Fp8Matrix]:
    """Return x + addend in their data type, and the norm of that in fp8."""
    total = x + addend
    return total, norm_rows(total, weight, eps, scale)


def norm_backward(
    x: Tensor, weight: Tensor, d_out: Tensor, d_residual: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Fp8Matrix]:
    """Return the gradient of x plus `d_residual`, that of weight, and the transpose of the norm of x in fp8."""
    d_x, d_weight = differentiate_norm(x, weight, d_out, d_residual, eps)
    return d_x, d_weight, transpose(norm_rows(x, weight, eps, scale))


def differentiate_norm(
    x: Tensor, weight: Tensor, d_out: Tensor, d_residual: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x plus `d_residual`, and that of weight."""

    def of_norm(x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight, eps)

    _, vjp = torch.func.vjp(of_norm, x.float(), weight.float())  # type: ignore[misc]
    d_x, d_weight = vjp(d_out.float())
    return (d_x + d_residual.float()).to(x.dtype), d_weight.to(weight.dtype)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x in fp32."""
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps)


def swiglu_rows(gate: Tensor, up: Tensor) -> Fp8Matrix:
    """Return silu(gate) * up in fp8."""
    return cast_rows(swiglu(gate.float(), up.float()))


def swiglu_backward(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Fp8Matrix, Fp8Matrix, Fp8Matrix]:
    """Return in fp8: the transpose of the output, and the gradients of gate and up side by side with their transpose.

    Both gradients have one scale, so that one product sums over both.
    """
    hidden, d_gate_up = differentiate_swiglu(gate, up, d_hidden)
    return cast_columns(hidden), *cast_both(d_gate_up)


def differentiate_swiglu(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up, and the gradients of gate and up side by side, in fp32."""
    hidden, vjp = torch.func.vjp(swiglu, gate.float(), up.float())  # type: ignore[misc]
    return hidden, torch.cat(vjp(d_hidden.float()), dim=1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up
