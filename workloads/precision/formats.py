"""torchao's number formats: a matrix in one of them, and the product of two."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

from workloads.api.contract import Infeasible
from workloads.api.recipes import fp8_dtype

# What torchao says while it is imported: kernels that this device could not run anyway.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def require_torchao() -> None:
    """Raises Infeasible where it is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise Infeasible("torchao is not installed: pip install 'gpu-sweeper[precision]'")


def convert(recipe: str, matrix: torch.Tensor, role: str, architecture: str) -> Any:
    """matrix[rows, k] in a format with scales along k, as torchao's tensor of it: `.qdata`, `.scale`, `.dequantize`.

    role: "weight" has 128 x 128 blocks where the format has blocks, "activation" 1 x 128.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor
    from torchao.quantization.granularity import PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.common import KernelPreference

    if recipe.startswith("fp8"):
        blocks = [128, 128] if role == "weight" else [1, 128]
        granularity = {
            "fp8_tensorwise": PerTensor(),
            "fp8_rowwise": PerRow(),
            "fp8_blockwise": PerBlock(blocks),
        }[recipe]
        # From fp32: of a bf16 matrix it would round the scales to bf16 as well.
        return Float8Tensor.from_hp(
            matrix.float(),
            float8_dtype=getattr(torch, fp8_dtype(architecture)),
            granularity=granularity,
            kernel_preference=KernelPreference.TORCH,
        )
    if recipe == "nvfp4":
        return NVFP4Tensor.to_nvfp4(matrix, per_tensor_scale=per_tensor_amax_to_scale(matrix.abs().max()))
    element = torch.float8_e4m3fn if recipe == "mxfp8" else torch.float4_e2m1fn_x2
    return MXTensor.to_mx(matrix, element, 32, ScaleCalculationMode.RCEIL, KernelPreference.EMULATED)


def native_product(recipe: str, a: Any, b: Any) -> Callable[[], torch.Tensor]:
    """C[m, n] = A[m, k] · B[n, k]ᵀ by the matrix units, in bf16, of two matrices from `convert`."""
    from torch.nn import functional
    from torch.nn.functional import ScalingType, SwizzleType
    from torchao.prototype.mx_formats.utils import to_blocked

    options: dict[str, Any] = {"use_fast_accum": recipe in ("fp8_tensorwise", "fp8_rowwise")}
    data = [a.qdata, b.qdata]
    if recipe == "fp8_tensorwise":
        scales, kinds = [a.scale.reshape(()), b.scale.reshape(())], [ScalingType.TensorWise] * 2
    elif recipe == "fp8_rowwise":
        scales, kinds = [a.scale, b.scale.t()], [ScalingType.RowWise] * 2
    elif recipe == "fp8_blockwise":
        (scale_a, kind_a), (scale_b, kind_b) = _block_scales(a), _block_scales(b)
        scales, kinds = [scale_a, scale_b], [kind_a, kind_b]
    else:
        kind = ScalingType.BlockWise1x16 if recipe == "nvfp4" else ScalingType.BlockWise1x32
        swizzle = SwizzleType.NO_SWIZZLE if torch.version.hip else SwizzleType.SWIZZLE_32_4_4
        ordered = [x.scale if torch.version.hip else to_blocked(x.scale) for x in (a, b)]
        if recipe != "mxfp8":
            data = [x.view(torch.float4_e2m1fn_x2) for x in data]
        if recipe == "nvfp4":  # a scale for each 16, and one for the whole
            each = [[block, x.per_tensor_scale] for block, x in zip(ordered, (a, b), strict=True)]
            options |= {name: [swizzle, SwizzleType.NO_SWIZZLE] for name in ("swizzle_a", "swizzle_b")}
            two = [kind, ScalingType.TensorWise]
            return lambda: functional.scaled_mm(data[0], data[1].t(), each[0], two, each[1], two, **options)
        scales, kinds = ordered, [kind] * 2
        options |= {"swizzle_a": swizzle, "swizzle_b": swizzle}
    return lambda: functional.scaled_mm(data[0], data[1].t(), scales[0], kinds[0], scales[1], kinds[1], **options)


def _block_scales(matrix: Any) -> tuple[torch.Tensor, Any]:
    """The scales of 1 x 128 or 128 x 128 blocks as cuBLASLt reads them: [rows, k / 128] with rows next to each other,
    or [k / 128, rows / 128] with k next to each other and padded to four."""
    from torch.nn.functional import ScalingType

    if matrix.block_size[0] == 1:
        return matrix.scale.t().contiguous().t(), ScalingType.BlockWise1x128
    padded = torch.nn.functional.pad(matrix.scale, (0, -matrix.scale.shape[1] % 4), value=1.0)
    return padded.t(), ScalingType.BlockWise128x128


def sqnr_db(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Signal over the noise of quantisation, 20·log10(‖exact‖ / ‖exact - found‖), in fp64."""
    from torchao.float8.float8_utils import compute_error

    return float(compute_error(exact.double(), found.double()))
