"""The two matrices of a product in any number format, and the call that multiplies them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workloads.api.contract import Infeasible
from workloads.api.recipes import RECIPES, fp8_dtype, unfit
from workloads.llama.shapes import GemmShape
from workloads.matmul import MatmulParameters, tinygrad_backend

TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OUTPUT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# The sixteen values of a 4-bit number with 2 bits of exponent and 1 of mantissa (OCP Microscaling v1.0, table 5).
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass(frozen=True)
class Operands:
    """a[m, k] and b[k, n] as the product takes them (two 4-bit numbers in one element of k), `multiply`, which
    computes C and returns it, into the same memory each time; `fetch` makes that PyTorch's where it is another's."""

    a: torch.Tensor
    b: torch.Tensor
    multiply: Callable[[], Any]
    fetch: Callable[[Any], torch.Tensor] = lambda c: c

    @property
    def layout(self) -> str:
        """As they lie in memory: n is row by row, t column by column."""
        return "".join("n" if matrix.stride(1) == 1 else "t" for matrix in (self.a, self.b))

    @property
    def bytes(self) -> int:
        """Of A and B."""
        return sum(t.numel() * t.element_size() for t in (self.a, self.b))


def make(parameters: MatmulParameters, device: torch.device, generator: torch.Generator, architecture: str) -> Operands:
    """Random operands (normal, scales of one: a product takes as long whatever the scales are), ready to multiply.

    Raises Infeasible where the format cannot have such a shape, or the route not such a format.
    """
    shape = parameters.shape()
    if RECIPES[parameters.dtype].matrix_dtype in ("fp8", "fp4"):
        return _scaled(parameters, shape, device, generator, architecture)
    return _plain(parameters, shape, device, generator)


def _plain(
    parameters: MatmulParameters, shape: GemmShape, device: torch.device, generator: torch.Generator
) -> Operands:
    dtype = TORCH_DTYPES[parameters.dtype]
    out_dtype = OUTPUT_DTYPES.get(parameters.output_dtype, dtype)

    def matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return torch.randn(columns, rows, device=device, dtype=dtype, generator=generator).t()
        return torch.randn(rows, columns, device=device, dtype=dtype, generator=generator)

    a = matrix(shape.m, shape.k, shape.layout[0] == "t")
    b = matrix(shape.k, shape.n, shape.layout[1] == "t")
    if parameters.route in ("triton", "tinygrad") and out_dtype != dtype:
        raise Infeasible(
            f"route={parameters.route} gives {parameters.dtype}, not output_dtype={parameters.output_dtype}"
        )
    if parameters.route == "tinygrad":
        if parameters.dtype == "tf32":
            raise Infeasible("route=tinygrad has no tf32")
        return Operands(a, b, *tinygrad_backend.product(a, b, tinygrad_backend.device_of(device)))
    if parameters.route == "triton":
        product = _inductor_product()
        try:
            product(a, b)  # tuned now, not in the first repeat
        except Exception as error:
            if "NoValidChoices" not in f"{type(error).__name__} {error}":
                raise
            raise Infeasible(f"Inductor has no Triton kernel for this product on this GPU: {error}") from error
        return Operands(a, b, lambda: product(a, b))
    c = torch.empty(shape.m, shape.n, device=device, dtype=out_dtype)
    if out_dtype == dtype:
        return Operands(a, b, lambda: torch.mm(a, b, out=c))
    if device.type == "cpu" or out_dtype != torch.float32:
        raise Infeasible(f"torch.mm does not give output_dtype={parameters.output_dtype} from {parameters.dtype} here")
    return Operands(a, b, lambda: torch.mm(a, b, out_dtype=torch.float32, out=c))


def _inductor_product() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Inductor's own Triton kernel for a product, the fastest of its tilings for the shape that it is called with."""
    from torch._inductor import config as inductor

    torch.compiler.reset()  # or the eighth shape in one process would run as torch.mm
    options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    if hasattr(inductor.triton, "enable_persistent_tma_matmul"):
        options["triton.enable_persistent_tma_matmul"] = True
    return torch.compile(torch.mm, dynamic=False, fullgraph=True, options=options)


def _scaled(
    parameters: MatmulParameters,
    shape: GemmShape,
    device: torch.device,
    generator: torch.Generator,
    architecture: str,
) -> Operands:
    from torch.nn import functional

    if parameters.route != "torch":
        raise Infeasible(f"route={parameters.route} has no {parameters.dtype}: route=torch has")
    if shape.layout != "nt":
        raise Infeasible(f"{parameters.dtype} is multiplied from layout=nt only")
    if why := unfit(parameters.dtype, shape.m, shape.n, shape.k):
        raise Infeasible(why)

    def matrix(rows: int) -> torch.Tensor:
        if RECIPES[parameters.dtype].matrix_dtype == "fp4":
            packed = torch.randint(0, 256, (rows, shape.k // 2), dtype=torch.uint8, device=device, generator=generator)
            return packed.view(torch.float4_e2m1fn_x2)
        values = torch.randn(rows, shape.k, device=device, dtype=torch.bfloat16, generator=generator)
        return values.to(getattr(torch, fp8_dtype(architecture)))

    a, b = matrix(shape.m), matrix(shape.n).t()
    scaling = _ones(parameters.dtype, shape, device)
    out_dtype = OUTPUT_DTYPES.get(parameters.output_dtype, torch.bfloat16)
    fast = parameters.accumulation == "reduced" and parameters.dtype in ("fp8_tensorwise", "fp8_rowwise")
    return Operands(
        a,
        b,
        lambda: functional.scaled_mm(a, b, **scaling, output_dtype=out_dtype, use_fast_accum=fast),
    )


def _ones(recipe: str, shape: GemmShape, device: torch.device) -> dict[str, Any]:
    """Scales of one, in the form in which `torch.nn.functional.scaled_mm` takes those of a recipe."""
    from torch.nn.functional import ScalingType, SwizzleType

    m, n, k = shape.m, shape.n, shape.k

    def fp32(*size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=torch.float32)

    if recipe == "fp8_tensorwise":
        a, b, kinds = fp32(), fp32(), (ScalingType.TensorWise, ScalingType.TensorWise)
    elif recipe == "fp8_rowwise":
        a, b, kinds = fp32(m, 1), fp32(1, n), (ScalingType.RowWise, ScalingType.RowWise)
    elif recipe == "fp8_blockwise":  # the activations' scales lie with m next to each other
        a, b = fp32(k // 128, m).t(), fp32(n // 128, 4 * math.ceil(k / 512)).t()  # and the weights' padded to 4
        kinds = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    else:
        block, kind = (16, ScalingType.BlockWise1x16) if recipe == "nvfp4" else (32, ScalingType.BlockWise1x32)
        kinds = (kind, kind)
        a, b = (_block_ones(rows, k // block, recipe, device) for rows in (m, n))
    scaling: dict[str, Any] = {
        "scale_a": a,
        "scale_b": b,
        "scale_recipe_a": kinds[0],
        "scale_recipe_b": kinds[1],
    }
    if recipe in ("mxfp8", "mxfp4", "nvfp4"):
        swizzle = SwizzleType.NO_SWIZZLE if torch.version.hip else SwizzleType.SWIZZLE_32_4_4
        scaling |= {"swizzle_a": swizzle, "swizzle_b": swizzle}
    return scaling


def _block_ones(rows: int, blocks: int, recipe: str, device: torch.device) -> torch.Tensor:
    """A one for each block, padded to the tiles of 128x4 in which the units load scales; order does not matter."""
    if torch.version.hip is None:
        rows, blocks = 128 * math.ceil(rows / 128), 4 * math.ceil(blocks / 4)
    if recipe == "nvfp4":
        return torch.ones(rows * blocks, device=device).to(torch.float8_e4m3fn)
    return torch.full((rows * blocks,), 127, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)


def decoded(rows: torch.Tensor) -> torch.Tensor:
    """The values of some rows in fp64, from any format."""
    if rows.dtype != torch.float4_e2m1fn_x2:
        return rows.double()
    packed = rows.view(torch.uint8).long()
    return E2M1.to(rows.device)[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)]


def take_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows in fp64. Formats of 8 bits or fewer are picked as bytes: torch has no indexing for them."""
    if matrix.element_size() == 1:
        return decoded(matrix.view(torch.uint8)[rows].view(matrix.dtype))
    return decoded(matrix[rows])
