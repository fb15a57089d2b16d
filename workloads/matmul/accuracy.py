"""The error of a product, and the largest one that a correct product has."""

from __future__ import annotations

import torch

from workloads.matmul.operands import take_rows

# Largest relative error ‖C - ref‖ / ‖ref‖ of a correct product: the rounding of the result itself (half a unit in the
# last place: 2^-9 for bf16, 2^-12 for fp16), and for fp32 its accumulation over k, each with a margin for a library's
# order of summation. The fast accumulators of fp8 keep 14 bits.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1e-2, "fp8": 2e-2, "fp4": 1e-2}

# tf32 rounds its operands to 11 bits. Rounded to nearest, random operands give 2.9e-4, truncated ones 7.7e-4, at any k
# up to 20480. An H200 gives 2.8e-4 to 3.0e-4 (k from 512 to 16384, both libraries, torch 2.11). gfx942 truncates them
# and rounds the sum of every four products down (MMA-Sim, arXiv:2511.10909): hipBLASLt on an MI300X gave 7.7e-4 at
# k=1024 (pytorch/pytorch#180926, github.com/jeffdaily/tf32_analysis). gfx950 has no tf32 units: hipBLASLt emulates tf32
# by bf16 there (ROCm/hipBLASLt#1806), which is not native.
TF32_TOLERANCE = {"gfx942": 2e-3}
TF32_TOLERANCE_ELSEWHERE = 1e-3


def tolerance(matrix_dtype: str, architecture: str) -> float:
    """Return the largest relative error of a correct product on a device."""
    if matrix_dtype == "tf32":
        return TF32_TOLERANCE.get(architecture.partition(":")[0], TF32_TOLERANCE_ELSEWHERE)
    return TOLERANCE[matrix_dtype]


def relative_error(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, rows: int = 8, columns: int = 256) -> float:
    """Return ‖C - A·B‖ / ‖A·B‖ over evenly spaced rows and columns of C, with A·B computed in fp64."""
    i = torch.linspace(0, c.shape[0] - 1, min(rows, c.shape[0]), device=c.device).long()
    j = torch.linspace(0, c.shape[1] - 1, min(columns, c.shape[1]), device=c.device).long()
    reference = take_rows(a, i) @ take_rows(b.t(), j).t()
    return float((c[i][:, j].double() - reference).norm() / reference.norm())
