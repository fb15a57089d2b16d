"""Create the two operands of a GEMM in any number format, and the call that multiplies them."""

import math
from collections.abc import Callable
from typing import Any

import torch

from workloads.api.contract import Infeasible
from workloads.api.recipes import RECIPES, fp8_dtype
from workloads.instruments.products import TORCH_DTYPES, Operands
from workloads.instruments.torch_internals import supports_persistent_tma
from workloads.matmul import MatmulParameters
from workloads.matmul.rules import executed_accumulation
from workloads.models.model import GemmShape
from workloads.precision.formats import scale_layout


def make_operands(
    parameters: MatmulParameters, device: torch.device, generator: torch.Generator, architecture: str
) -> Operands:
    """Create normally distributed operands. Scales are one, since a GEMM's time does not depend on their values.

    Raises Infeasible if the backend does not support this GEMM. `rules` lists the combinations that are known to be
    unsupported.
    """
    shape = parameters.shape()
    if RECIPES[parameters.dtype].is_scaled:
        return _make_scaled(parameters, shape, device, generator, architecture)
    dtype = TORCH_DTYPES[parameters.dtype]
    out_dtype = TORCH_DTYPES.get(parameters.output_dtype, dtype)

    def matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return torch.randn(columns, rows, device=device, dtype=dtype, generator=generator).t()
        return torch.randn(rows, columns, device=device, dtype=dtype, generator=generator)

    a = matrix(shape.m, shape.k, shape.layout[0] == "t")
    b = matrix(shape.k, shape.n, shape.layout[1] == "t")
    if parameters.backend == "triton":
        gemm = _build_inductor_gemm(a, b)
        return Operands(a, b, lambda: gemm(a, b))
    c = torch.empty(shape.m, shape.n, device=device, dtype=out_dtype)
    if out_dtype == dtype:
        return Operands(a, b, lambda: torch.mm(a, b, out=c))
    if device.type == "cpu" or out_dtype != torch.float32:
        raise Infeasible(
            f"torch.mm on this device does not support output_dtype={parameters.output_dtype} of {parameters.dtype}"
        )
    return Operands(a, b, lambda: torch.mm(a, b, out_dtype=torch.float32, out=c))


def _build_inductor_gemm(a: torch.Tensor, b: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    torch.compiler.reset()  # otherwise the eighth shape in one process runs as torch.mm
    options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    if supports_persistent_tma():
        options["triton.enable_persistent_tma_matmul"] = True
    gemm = torch.compile(torch.mm, dynamic=False, fullgraph=True, options=options)
    try:
        gemm(a, b)
    except Exception as error:
        if "NoValidChoices" not in f"{type(error).__name__} {error}":
            raise
        raise Infeasible(f"Inductor has no Triton kernel for this product on this GPU: {error}") from error
    return gemm


def _make_scaled(
    parameters: MatmulParameters, shape: GemmShape, device: torch.device, generator: torch.Generator, architecture: str
) -> Operands:
    from torch.nn.functional import ScalingType, scaled_mm

    recipe, m, n, k = parameters.dtype, shape.m, shape.n, shape.k
    options: dict[str, Any] = {
        "output_dtype": TORCH_DTYPES.get(parameters.output_dtype, torch.bfloat16),
        "use_fast_accum": executed_accumulation(parameters, architecture) == "reduced",
    }

    def matrix(rows: int) -> torch.Tensor:
        if RECIPES[recipe].matrix_dtype == "fp4":
            packed = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device, generator=generator)
            return packed.view(torch.float4_e2m1fn_x2)
        values = torch.randn(rows, k, device=device, dtype=torch.bfloat16, generator=generator)
        return values.to(getattr(torch, fp8_dtype(architecture)))

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=torch.float32)

    a, b = matrix(m), matrix(n).t()
    if recipe == "fp8_tensorwise":
        scale_a, scale_b, kinds = ones(), ones(), (ScalingType.TensorWise, ScalingType.TensorWise)
    elif recipe == "fp8_rowwise":
        scale_a, scale_b, kinds = ones(m, 1), ones(1, n), (ScalingType.RowWise, ScalingType.RowWise)
    elif recipe == "fp8_blockwise":  # activation scales are contiguous in m, weight scales are padded to 4 in k
        scale_a, scale_b = ones(k // 128, m).t(), ones(n // 128, 4 * math.ceil(k / 512)).t()
        kinds = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    else:  # one scale per block: all scales are equal, so their order in a tile does not matter
        layout, blocks = scale_layout(recipe), k // (16 if recipe == "nvfp4" else 32)
        kinds = (layout.scaling_type, layout.scaling_type)
        value, dtype = (0x38, torch.float8_e4m3fn) if recipe == "nvfp4" else (127, torch.float8_e8m0fnu)  # one
        scale_a, scale_b = (
            torch.full((layout.numel(rows, blocks),), value, dtype=torch.uint8, device=device).view(dtype)
            for rows in (m, n)
        )
        options |= {"swizzle_a": layout.swizzle, "swizzle_b": layout.swizzle}
    return Operands(a, b, lambda: scaled_mm(a, b, scale_a, kinds[0], scale_b, kinds[1], **options))
