"""The memory layout of block scales that this build of PyTorch multiplies with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from workloads.api.recipes import rocm_version

# hipBLASLt takes the scales of gfx950 in tiles of 32 x 8 from these versions of ROCm on. PyTorch builds with the
# scaling type BlockWiseBlk32Ue8m0_32_8_EXT demand that (ATen's ScaledBlas.cpp); builds before it, up to 2.13, and after
# it (pytorch/pytorch#190290) take scales as they are.
FIRST_TILED_ROCM = {"mxfp4": (7, 13), "mxfp8": (7, 14)}
TILED_TYPE = "BlockWiseBlk32Ue8m0_32_8_EXT"


class ScaleLayout(NamedTuple):
    """How the scales of a matrix [rows, blocks] lie in memory.

    Attributes:
        scaling_type, swizzle: as `torch.nn.functional.scaled_mm` takes them.
        tile: rows and blocks are padded to multiples of these numbers.
    """

    scaling_type: Any
    swizzle: Any
    tile: tuple[int, int]

    @property
    def is_tiled(self) -> bool:
        """Return whether scales have to be reordered into tiles."""
        return self.tile != (1, 1)

    def numel(self, rows: int, blocks: int) -> int:
        """Return the number of scales in memory, padding included."""
        row_tile, block_tile = self.tile
        return row_tile * math.ceil(rows / row_tile) * block_tile * math.ceil(blocks / block_tile)


def rocm_of_build() -> str:
    """Return the version of ROCm that PyTorch was built with; empty for another build.

    HIP's version, which older builds have alone, has the same numbers up to ROCm 7.
    """
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
