"""Matrices in torchao's number formats, the order of block scales that PyTorch expects, and their GEMM."""

import importlib.util
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from workloads.api.contract import Infeasible
from workloads.api.recipes import fp8_dtype, rocm_version

# torchao warns at import about missing kernels that this device could not run anyway.
for _logger_name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_logger_name).setLevel(logging.ERROR)

# Since these versions of ROCm, hipBLASLt expects scales on gfx950 in tiles of 32 x 8. PyTorch builds with the scaling
# type BlockWiseBlk32Ue8m0_32_8_EXT require these tiles (ATen's ScaledBlas.cpp). Builds before this type, up to 2.13,
# and after it (pytorch/pytorch#190290) accept untiled scales.
FIRST_TILED_ROCM = {"mxfp4": (7, 13), "mxfp8": (7, 14)}
TILED_TYPE = "BlockWiseBlk32Ue8m0_32_8_EXT"


class ScaleLayout(NamedTuple):
    """The memory layout of the scales of a matrix [rows, blocks]."""

    scaling_type: Any  # as passed to `torch.nn.functional.scaled_mm`
    swizzle: Any  # likewise
    tile: tuple[int, int]  # rows and blocks are padded to multiples of these numbers

    def numel(self, rows: int, blocks: int) -> int:
        row_tile, block_tile = self.tile
        return row_tile * math.ceil(rows / row_tile) * block_tile * math.ceil(blocks / block_tile)


def rocm_of_build() -> str:
    """Return the ROCm version of the PyTorch build (HIP's version up to ROCm 7); empty for other builds."""
    return getattr(torch.version, "rocm", None) or torch.version.hip or ""


def scale_layout(recipe: str) -> ScaleLayout:
    """Return the layout of the scales of mxfp8, mxfp4 or nvfp4."""
    from torch.nn.functional import ScalingType, SwizzleType

    rocm = rocm_of_build()
    if not rocm:
        block = ScalingType.BlockWise1x16 if recipe == "nvfp4" else ScalingType.BlockWise1x32
        return ScaleLayout(block, SwizzleType.SWIZZLE_32_4_4, (128, 4))
    tiled = getattr(ScalingType, TILED_TYPE, None)
    if tiled is not None and rocm_version(rocm) >= FIRST_TILED_ROCM[recipe]:
        return ScaleLayout(tiled, SwizzleType.SWIZZLE_32_4_4, (32, 8))
    return ScaleLayout(ScalingType.BlockWise1x32, SwizzleType.NO_SWIZZLE, (1, 1))


def require_torchao() -> None:
    """Check that torchao is installed. Raises Infeasible if it is not."""
    if importlib.util.find_spec("torchao") is None:
        raise Infeasible("torchao is not installed: pip install 'gpu-sweeper[precision]'")


def convert(recipe: str, matrix: torch.Tensor, role: str, architecture: str) -> Any:
    """Convert matrix[rows, k] from bf16 to torchao's tensor in a format with scales along k.

    The result has the attributes `qdata` and `scale` and the method `dequantize`. In fp8_blockwise, a "weight" has
    blocks of 128 x 128, and an "activation" has blocks of 1 x 128. The architecture determines the fp8 type.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor
    from torchao.quantization.granularity import PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.common import KernelPreference

    if recipe.startswith("fp8"):
        blocks = PerBlock([128, 128] if role == "weight" else [1, 128])
        # The source is fp32, because torchao stores scales in the matrix's data type, and bf16 would round them.
        return Float8Tensor.from_hp(
            matrix.float(),
            float8_dtype=getattr(torch, fp8_dtype(architecture)),
            granularity={"fp8_tensorwise": PerTensor(), "fp8_rowwise": PerRow(), "fp8_blockwise": blocks}[recipe],
            kernel_preference=KernelPreference.TORCH,
        )
    if recipe == "nvfp4":
        return NVFP4Tensor.to_nvfp4(matrix, per_tensor_scale=per_tensor_amax_to_scale(matrix.abs().max()))
    element = torch.float8_e4m3fn if recipe == "mxfp8" else torch.float4_e2m1fn_x2
    return MXTensor.to_mx(matrix, element, 32, ScaleCalculationMode.RCEIL, KernelPreference.EMULATED)


def native_gemm(recipe: str, a: Any, b: Any) -> Callable[[], torch.Tensor]:
    """Return a function that computes C[m, n] = A[m, k] · B[n, k]ᵀ on the matrix units, for `convert`ed A and B.

    C is in bf16. Raises Infeasible if this PyTorch build expects block scales in an order that torchao does not write.
    """
    from torch.nn import functional
    from torch.nn.functional import ScalingType, SwizzleType

    data, scales = [a.qdata, b.qdata], [a.scale, b.scale]
    types: list[Any] = [ScalingType.RowWise] * 2
    options: dict[str, Any] = {"use_fast_accum": recipe in ("fp8_tensorwise", "fp8_rowwise")}
    if recipe == "fp8_tensorwise":
        scales, types = [scale.reshape(()) for scale in scales], [ScalingType.TensorWise] * 2
    elif recipe == "fp8_rowwise":
        scales[1] = scales[1].t()
    elif recipe == "fp8_blockwise":
        for i, matrix in enumerate((a, b)):  # in cuBLASLt's layout
            if matrix.block_size[0] == 1:  # [rows, k / 128], contiguous along the rows
                scales[i], types[i] = matrix.scale.t().contiguous().t(), ScalingType.BlockWise1x128
            else:  # [k / 128, rows / 128], contiguous along k, with k / 128 padded to a multiple of four
                padded = functional.pad(matrix.scale, (0, -matrix.scale.shape[1] % 4), value=1.0)
                scales[i], types[i] = padded.t(), ScalingType.BlockWise128x128
    else:
        layout = scale_layout(recipe)
        scales, types = [_order_block_scales(scale, layout) for scale in scales], [layout.scaling_type] * 2
        options |= {"swizzle_a": layout.swizzle, "swizzle_b": layout.swizzle}
        if recipe != "mxfp8":
            data = [x.view(torch.float4_e2m1fn_x2) for x in data]
        if recipe == "nvfp4":  # one scale for every 16 numbers and one for the whole matrix
            scales = [[scale, x.per_tensor_scale] for scale, x in zip(scales, (a, b), strict=True)]
            types = [[layout.scaling_type, ScalingType.TensorWise]] * 2
            options |= {name: [layout.swizzle, SwizzleType.NO_SWIZZLE] for name in ("swizzle_a", "swizzle_b")}
    return lambda: functional.scaled_mm(data[0], data[1].t(), scales[0], types[0], scales[1], types[1], **options)


def _order_block_scales(scale: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    if layout.tile == (1, 1):
        return scale
    if rocm_of_build():
        raise Infeasible(
            f"PyTorch for ROCm {rocm_of_build()} takes block scales in tiles of 32 x 8, which torchao does not write; "
            "workload=matmul measures the rate"
        )
    from torchao.prototype.mx_formats.utils import to_blocked

    return to_blocked(scale)


def sqnr_db(exact: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the signal-to-quantization-noise ratio, 20·log10(‖exact‖ / ‖exact - actual‖) dB, computed in fp64."""
    from torchao.float8.float8_utils import compute_error

    return float(compute_error(exact.double(), actual.double()))
