"""Fp8 casts and grouped GEMMs for experts. The Triton casts are in `workloads.llama.fp8_expert_kernels`.

Expert inputs and output gradients are cast with one scale before they are copied for each of a token's experts. Tensors
inside the experts have one scale per row, so a cast reads its inputs once and needs no pass for the largest magnitude.
GEMMs that sum over rows need one scale for all rows, the largest. Replacing one power of two by another re-rounds only
numbers below 2^-14 of the largest.

An expert has at least 16 rows, and always a multiple of 16: the matrix units read 16 bytes along the dimension that a
GEMM sums over, and CUTLASS does not compute empty sums.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from workloads.api.recipes import RECIPES
from workloads.instruments.trace import annotate
from workloads.llama.fp8_quantize import FP8, Fp8Matrix, scale_of
from workloads.llama.model import swiglu

ROW_MULTIPLE = RECIPES["fp8_tensorwise"].multiples[2]


def multiply_fp8_groups(a: Fp8Matrix, b: Fp8Matrix, ends: Tensor) -> Tensor:
    """Return a[rows of e] · b[e]ᵀ for every expert e in bf16: [rows, n] for a[rows, k] and b[experts, n, k].

    If b is [n, rows], the sum is over rows: a[:, rows of e] · b[:, rows of e]ᵀ, [experts, m, n] for a[m, rows]. Sums
    over features use the matrix units' own accumulators; sums over rows, which can be long, are in fp32. `ends`,
    [experts] int32, holds the index after each expert's last row. Results after the last expert's rows are undefined.
    """
    over_rows = b.data.dim() == 2
    with annotate("experts"):
        if a.data.device.type == "cpu":
            parts = [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]
            x, y = a.data.float(), b.data.float()
            if over_rows:
                return torch.stack([x[:, part] @ y[:, part].t() * (a.scale * b.scale) for part in parts]).bfloat16()
            products = torch.cat([x[part] @ matrix.t() for part, matrix in zip(parts, y, strict=True)])
            scale = (a.scale * b.scale).expand(len(x))[: len(products), None]
            return functional.pad(products * scale, (0, 0, 0, len(x) - len(products))).bfloat16()
        experts, rows = len(ends), functional.ScalingType.RowWise
        of_a = a.scale.expand(experts * len(a.data) if over_rows else len(a.data)).contiguous()
        of_b = b.scale.expand(experts * len(b.data) if over_rows else b.data.shape[:2]).contiguous()
        # PyTorch's type stubs lack this function.
        product: Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
            a.data, b.data.mT, of_a, rows, of_b, rows, offs=ends, use_fast_accum=not over_rows
        )
        return product


def copy_rows(x: Fp8Matrix, tokens: Tensor, *, rows: bool = False, columns: bool = False) -> list[Fp8Matrix]:
    """Return x[tokens[i, 0]] for every i (zeros for -1) with x's scale, by rows, by columns, or both in this order."""
    with annotate("permutation"):
        data = x.data.view(torch.uint8)
        if data.device.type != "cpu":
            from workloads.llama.fp8_expert_kernels import launch_arrange

            parts = launch_arrange(data, tokens, None, rows=rows, columns=columns)
        else:
            copied = data[tokens.flatten().clamp(min=0)] * (tokens >= 0)
            parts = [copied] * rows + [copied.t().contiguous()] * columns
        return [Fp8Matrix(part.view(FP8), x.scale) for part in parts]


def weigh(gate: Tensor, up: Tensor, weights: Tensor) -> Fp8Matrix:
    """Return silu(gate) * up * weights[rows, 1], quantized by rows with one scale per row."""
    with annotate("experts"):
        if gate.device.type != "cpu":
            from workloads.llama.fp8_expert_kernels import launch_weigh

            return launch_weigh(gate, up, weights)[0]
        return _cast_rows(swiglu(gate.float(), up.float()) * weights)


def weigh_backward(
    gate: Tensor, up: Tensor, weights: Tensor, d_hidden: Tensor, ends: Tensor
) -> tuple[Fp8Matrix, Fp8Matrix, Fp8Matrix, Tensor]:
    """Return `weigh` by columns, d_gate and d_up (side by side) by rows and by columns, and d_weights."""
    with annotate("experts"):
        if gate.device.type != "cpu":
            from workloads.llama.fp8_expert_kernels import launch_weigh

            hidden, d_gate_up, d_weights = launch_weigh(gate, up, weights, d_hidden)
        else:

            def weigh(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
                return swiglu(gate, up) * weights

            exact, vjp = torch.func.vjp(weigh, gate.float(), up.float(), weights)  # type: ignore[misc]
            d_gate, d_up, d_weights = vjp(d_hidden.float())
            hidden, d_gate_up = _cast_rows(exact), _cast_rows(torch.cat([d_gate, d_up], dim=1))
        return _transpose(hidden, ends), d_gate_up, _transpose(d_gate_up, ends), d_weights


def _cast_rows(x: Tensor) -> Fp8Matrix:
    scale = scale_of(x.abs().amax(1))
    return Fp8Matrix((x / scale[:, None]).to(FP8), scale)


def _transpose(x: Fp8Matrix, ends: Tensor) -> Fp8Matrix:
    """Return a matrix by columns with one scale, the largest scale among the rows before `ends[-1]`."""
    is_read = torch.arange(len(x.scale), device=ends.device) < ends[-1]
    scale = x.scale.where(is_read, 0.0).amax()
    factors = x.scale / scale
    if x.data.device.type != "cpu":
        from workloads.llama.fp8_expert_kernels import launch_arrange

        return Fp8Matrix(launch_arrange(x.data, None, factors, columns=True)[0], scale)
    return Fp8Matrix((x.data.float() * factors[:, None]).t().to(FP8).contiguous(), scale)
