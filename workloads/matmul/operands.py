"""Create the two matrices of a product in any number format, and the call that multiplies them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workloads.api.contract import Infeasible
from workloads.api.recipes import RECIPES, fp8_dtype
from workloads.instruments.torch_internals import supports_persistent_tma
from workloads.matmul import MatmulParameters, tinygrad_backend
from workloads.matmul.rules import executed_accumulation
from workloads.models.model import GemmShape
from workloads.precision.formats import ScaleLayout, scale_layout

TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OUTPUT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# The sixteen values of a 4-bit number with 2 bits of exponent and 1 of mantissa (OCP Microscaling v1.0, table 5).
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass(frozen=True)
class Operands:
    """The operands of a product and its implementation.

    Attributes:
        a: A[m, k] as the product takes it; two 4-bit numbers share one element of k.
        b: B[k, n] likewise.
        multiply: computes C into the same memory at each call and returns it.
        fetch: converts the result of `multiply` to a PyTorch tensor where the backend has its own type.
    """

    a: torch.Tensor
    b: torch.Tensor
    multiply: Callable[[], Any]
    fetch: Callable[[Any], torch.Tensor] = lambda c: c

    @property
    def layout(self) -> str:
        """Return the layout of A and B in memory: n is row-major, t is column-major."""
        return "".join("n" if matrix.stride(1) == 1 else "t" for matrix in (self.a, self.b))

    @property
    def bytes(self) -> int:
        """Return the size of A and B in bytes."""
        return sum(matrix.numel() * matrix.element_size() for matrix in (self.a, self.b))


def make_operands(
    parameters: MatmulParameters, device: torch.device, generator: torch.Generator, architecture: str
) -> Operands:
    """Create normally distributed operands. Scales are one: the time of a product does not depend on their values.

    Raises:
        Infeasible: the backend does not support this product. `rules` has what is known beforehand.
    """
    shape = parameters.shape()
    if RECIPES[parameters.dtype].matrix_dtype in ("fp8", "fp4"):
        return _make_scaled(parameters, shape, device, generator, architecture)
    return _make_unscaled(parameters, shape, device, generator)


def _make_unscaled(
    parameters: MatmulParameters, shape: GemmShape, device: torch.device, generator: torch.Generator
) -> Operands:
    """Create the operands of a format without scales: fp32, tf32, fp16 or bf16."""
    dtype = TORCH_DTYPES[parameters.dtype]
    out_dtype = OUTPUT_DTYPES.get(parameters.output_dtype, dtype)

    def matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return torch.randn(columns, rows, device=device, dtype=dtype, generator=generator).t()
        return torch.randn(rows, columns, device=device, dtype=dtype, generator=generator)

    a = matrix(shape.m, shape.k, shape.layout[0] == "t")
    b = matrix(shape.k, shape.n, shape.layout[1] == "t")
    if parameters.backend == "tinygrad":
        multiply, fetch = tinygrad_backend.build_gemm(a, b, tinygrad_backend.device_name(device))
        return Operands(a, b, multiply, fetch)
    if parameters.backend == "triton":
        gemm = _build_inductor_gemm()
        _tune(gemm, a, b)
        return Operands(a, b, lambda: gemm(a, b))
    c = torch.empty(shape.m, shape.n, device=device, dtype=out_dtype)
    if out_dtype == dtype:
        return Operands(a, b, lambda: torch.mm(a, b, out=c))
    if device.type == "cpu" or out_dtype != torch.float32:
        raise Infeasible(
            f"torch.mm on this device does not support output_dtype={parameters.output_dtype} of {parameters.dtype}"
        )
    return Operands(a, b, lambda: torch.mm(a, b, out_dtype=torch.float32, out=c))


def _tune(gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> None:
    """Call an Inductor product once, so that it is tuned before the first repeat.

    Raises:
        Infeasible: Inductor has no Triton kernel for it.
    """
    try:
        gemm(a, b)
    except Exception as error:
        if "NoValidChoices" not in f"{type(error).__name__} {error}":
            raise
        raise Infeasible(f"Inductor has no Triton kernel for this product on this GPU: {error}") from error


def _build_inductor_gemm() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return Inductor's Triton kernel for a product; its fastest tiling is chosen for the shape of the first call."""
    torch.compiler.reset()  # otherwise the eighth shape in one process runs as torch.mm
    options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    if supports_persistent_tma():
        options["triton.enable_persistent_tma_matmul"] = True
    return torch.compile(torch.mm, dynamic=False, fullgraph=True, options=options)


def _make_scaled(
    parameters: MatmulParameters,
    shape: GemmShape,
    device: torch.device,
    generator: torch.Generator,
    architecture: str,
) -> Operands:
    """Create the operands of a format with scales, of 8 or 4 bits."""
    from torch.nn import functional

    def matrix(rows: int) -> torch.Tensor:
        if RECIPES[parameters.dtype].matrix_dtype == "fp4":
            packed = torch.randint(0, 256, (rows, shape.k // 2), dtype=torch.uint8, device=device, generator=generator)
            return packed.view(torch.float4_e2m1fn_x2)
        values = torch.randn(rows, shape.k, device=device, dtype=torch.bfloat16, generator=generator)
        return values.to(getattr(torch, fp8_dtype(architecture)))

    a, b = matrix(shape.m), matrix(shape.n).t()
    scaling = _unit_scales(parameters.dtype, shape, device)
    out_dtype = OUTPUT_DTYPES.get(parameters.output_dtype, torch.bfloat16)
    fast = executed_accumulation(parameters, architecture) == "reduced"
    return Operands(
        a,
        b,
        lambda: functional.scaled_mm(a, b, **scaling, output_dtype=out_dtype, use_fast_accum=fast),
    )


def _unit_scales(recipe: str, shape: GemmShape, device: torch.device) -> dict[str, Any]:
    """Return scales of one as the arguments that `torch.nn.functional.scaled_mm` takes for a recipe."""
    from torch.nn.functional import ScalingType

    m, n, k = shape.m, shape.n, shape.k
    swizzles: dict[str, Any] = {}

    def fp32(*size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=torch.float32)

    if recipe == "fp8_tensorwise":
        a, b, kinds = fp32(), fp32(), (ScalingType.TensorWise, ScalingType.TensorWise)
    elif recipe == "fp8_rowwise":
        a, b, kinds = fp32(m, 1), fp32(1, n), (ScalingType.RowWise, ScalingType.RowWise)
    elif recipe == "fp8_blockwise":  # the activations' scales are contiguous in m, the weights' are padded to 4 in k
        a, b = fp32(k // 128, m).t(), fp32(n // 128, 4 * math.ceil(k / 512)).t()
        kinds = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    else:
        layout, blocks = scale_layout(recipe), k // (16 if recipe == "nvfp4" else 32)
        kinds = (layout.scaling_type, layout.scaling_type)
        a, b = (_unit_block_scales(layout, rows, blocks, recipe, device) for rows in (m, n))
        swizzles = {"swizzle_a": layout.swizzle, "swizzle_b": layout.swizzle}
    return {"scale_a": a, "scale_b": b, "scale_recipe_a": kinds[0], "scale_recipe_b": kinds[1], **swizzles}


def _unit_block_scales(layout: ScaleLayout, rows: int, blocks: int, recipe: str, device: torch.device) -> torch.Tensor:
    """Return a scale of one for each block. All are equal, so that their order in a tile does not matter."""
    numel = layout.numel(rows, blocks)
    if recipe == "nvfp4":
        return torch.ones(numel, device=device).to(torch.float8_e4m3fn)
    return torch.full((numel,), 127, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)


def _decode(rows: torch.Tensor) -> torch.Tensor:
    """Return the values of rows of any format in fp64."""
    if rows.dtype != torch.float4_e2m1fn_x2:
        return rows.double()
    packed = rows.view(torch.uint8).long()
    return E2M1.to(rows.device)[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)]


def take_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a matrix in fp64. Formats of 8 bits or fewer are indexed as bytes: torch cannot index them."""
    if matrix.element_size() == 1:
        return _decode(matrix.view(torch.uint8)[rows].view(matrix.dtype))
    return _decode(matrix[rows])
