"""The order of block scales by the build of PyTorch. ROCm's builds are stand-ins, and so is the type that some have."""

from enum import Enum

import pytest
import torch
from torch.nn import functional

from tests.support.amd_device import MI355X, amd_device
from workloads.api.contract import Infeasible
from workloads.precision import formats
from workloads.precision.formats import TILED_TYPE, rocm_of_build, scale_layout

WithTiledType = Enum("WithTiledType", ["BlockWise1x32", TILED_TYPE])  # type: ignore[misc]


def test_without_rocm_scales_are_tiled_for_the_units_of_nvidia() -> None:
    assert rocm_of_build() == ""
    layout = scale_layout("mxfp8")
    assert layout.tile == (128, 4) and layout.numel(100, 3) == 128 * 4
    assert scale_layout("nvfp4").scaling_type is functional.ScalingType.BlockWise1x16


def test_rocm_takes_scales_as_they_are_unless_the_build_has_the_tiled_type() -> None:
    with amd_device(MI355X, rocm="7.14.0"):
        layout = scale_layout("mxfp4")
    assert (layout.scaling_type, layout.swizzle) == (
        functional.ScalingType.BlockWise1x32,
        functional.SwizzleType.NO_SWIZZLE,
    )
    assert layout.tile == (1, 1) and layout.numel(96, 3) == 96 * 3


@pytest.mark.parametrize(
    ("recipe", "rocm", "tiled"),
    [("mxfp4", "7.12.1", False), ("mxfp4", "7.13.0", True), ("mxfp8", "7.13.0", False), ("mxfp8", "10.0.0", True)],
)
def test_a_build_with_the_tiled_type_demands_it_from_a_version_of_rocm_on(
    recipe: str, rocm: str, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "ScalingType", WithTiledType)
    with amd_device(MI355X, rocm=rocm):
        layout = scale_layout(recipe)
        assert layout.tile == ((32, 8) if tiled else (1, 1))
        if tiled:
            assert layout.scaling_type.name == TILED_TYPE and layout.numel(40, 9) == 64 * 16
            with pytest.raises(Infeasible, match="tiles of 32 x 8, which torchao does not write"):
                formats._order_block_scales(torch.ones(32, 8), layout)


def test_an_older_build_has_the_version_of_hip_alone() -> None:
    with amd_device(MI355X, hip="7.2.26015-fc0010cf6a", rocm=""):
        assert rocm_of_build() == "7.2.26015-fc0010cf6a"
