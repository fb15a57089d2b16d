"""GEMMs in any number format, and checks of their results against fp64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# The sixteen values of 4-bit numbers with 2 exponent bits and 1 mantissa bit (OCP Microscaling v1.0, table 5).
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)

# The largest relative error ‖C - ref‖ / ‖ref‖ of a correct GEMM. This limit allows for rounding of the result (half a
# unit in the last place: 2^-9 for bf16, 2^-12 for fp16), and for accumulation over k in fp32, with a margin for the
# library's order of summation. fp8's fast accumulators keep 14 bits.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1e-2, "fp8": 2e-2, "fp4": 1e-2}

# tf32 rounds its operands to 11 bits. With random operands, rounding to nearest gives 2.9e-4 and truncation 7.7e-4, at
# any k up to 20480. An H200 gives 2.8e-4 to 3.0e-4 (k from 512 to 16384, both libraries, torch 2.11). gfx942 truncates
# and rounds the sum of every four products down (MMA-Sim, arXiv:2511.10909): hipBLASLt on an MI300X gave 7.7e-4 at
# k=1024 (pytorch/pytorch#180926, github.com/jeffdaily/tf32_analysis). gfx950 has no tf32 units: hipBLASLt emulates tf32
# with bf16 on gfx950 (ROCm/hipBLASLt#1806), which is not native.
TF32_TOLERANCE = {"gfx942": 2e-3}
TF32_TOLERANCE_ELSEWHERE = 1e-3


@dataclass(frozen=True)
class Operands:
    """A GEMM's operands, A[m, k] and B[k, n], and its implementation. One element holds two 4-bit numbers."""

    a: Tensor
    b: Tensor
    multiply: Callable[[], Tensor]  # computes C into the same memory at each call and returns C

    @property
    def layout(self) -> str:
        """Return the memory layout of A and B: n is row-major, t is column-major."""
        return "".join("n" if matrix.stride(1) == 1 else "t" for matrix in (self.a, self.b))

    @property
    def bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


def tolerance(matrix_dtype: str, architecture: str) -> float:
    if matrix_dtype == "tf32":
        return TF32_TOLERANCE.get(architecture.partition(":")[0], TF32_TOLERANCE_ELSEWHERE)
    return TOLERANCE[matrix_dtype]


def take_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a matrix in fp64. Torch cannot index formats of 8 bits or fewer, so they are indexed as bytes."""
    if matrix.element_size() > 1:
        return matrix[rows].double()
    taken = matrix.view(torch.uint8)[rows]
    if matrix.dtype != torch.float4_e2m1fn_x2:
        return taken.view(matrix.dtype).double()
    packed = taken.long()
    return E2M1.to(rows.device)[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)]


def relative_error(*products: tuple[Tensor, Tensor, Tensor], rows: int = 8, columns: int = 256) -> float:
    """Return ‖C - A·B‖ / ‖A·B‖ for (A, B, C) over evenly spaced rows and columns of each C, with A·B in fp64."""
    difference = norm = 0.0
    for a, b, c in products:
        i, j = (
            torch.linspace(0, size - 1, min(count, size), device=c.device).long()
            for size, count in zip(c.shape, (rows, columns), strict=True)
        )
        exact = take_rows(a, i) @ take_rows(b.t(), j).t()
        difference += float((c[i][:, j].double() - exact).square().sum())
        norm += float(exact.square().sum())
    return (difference / norm) ** 0.5
