"""Each device's support for each number format."""

import pytest

from workloads.api import recipes

# The native formats, by hand from the vendors' documentation and PyTorch's kernels; no other may be native.
NATIVE = {
    "sm80": "fp32 tf32 fp16 bf16",  # A100
    "sm90": "fp32 tf32 fp16 bf16 fp8_tensorwise fp8_rowwise fp8_blockwise",  # H100, H200
    "sm100": "fp32 tf32 fp16 bf16 fp8_tensorwise fp8_rowwise mxfp8 nvfp4",  # B200
    "sm89": "fp32 tf32 fp16 bf16 fp8_tensorwise fp8_rowwise",  # RTX 4090
    "sm120": "fp32 tf32 fp16 bf16 fp8_tensorwise fp8_rowwise mxfp8 nvfp4",  # RTX 5090
    "gfx942": "fp32 tf32 fp16 bf16 fp8_tensorwise fp8_rowwise",  # MI300X
    "gfx950": "fp32 fp16 bf16 fp8_tensorwise fp8_rowwise mxfp8 mxfp4",  # MI355X
    "cpu": "fp32",
    "cpu bf16": "fp32 bf16",
    "cpu bf16 fp16": "fp32 fp16 bf16",
}


@pytest.mark.parametrize("architecture", NATIVE)
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_format_is_native_exactly_where_the_matrix_units_support_it(architecture: str, recipe: str) -> None:
    level, reason = recipes.support(recipe, architecture)
    assert (level is recipes.Support.NATIVE) == (recipe in NATIVE[architecture].split())
    assert bool(reason) == (level is not recipes.Support.NATIVE)
    assert bool(recipes.unsupported_rate_reason(recipe, architecture)) == (level is not recipes.Support.NATIVE)


def test_a_format_that_is_not_native_is_emulated_where_possible() -> None:
    assert recipes.support("mxfp8", "sm90")[0] is recipes.Support.EMULATED
    assert recipes.support("fp8_rowwise", "cpu")[0] is recipes.Support.EMULATED
    assert recipes.support("tf32", "cpu")[0] is recipes.Support.UNSUPPORTED
    assert recipes.unsupported_rate_reason("mxfp8", "sm90").startswith(
        "emulated on this device: sm90 lacks units with a scale"
    )


def test_the_features_in_an_amd_architecture_are_ignored() -> None:
    assert recipes.support("fp8_rowwise", "gfx942:sramecc+:xnack-")[0] is recipes.Support.NATIVE
    assert recipes.fp8_dtype("gfx942:sramecc+:xnack-") == "float8_e4m3fnuz"
    assert recipes.fp8_dtype("gfx950") == recipes.fp8_dtype("sm90") == "float8_e4m3fn"


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown architecture 'H100'"):
        recipes.support("bf16", "H100")


@pytest.mark.parametrize(
    ("recipe", "shape", "architecture", "reason"),
    [
        ("mxfp8", (32, 64, 96), "gfx950:sramecc+:xnack-", ""),
        ("mxfp8", (16, 64, 96), "gfx950", "mxfp8 needs m in multiples of 32, not 16"),
        ("mxfp8", (16, 64, 96), "sm100", ""),
        ("mxfp4", (32, 64, 96), "gfx950", "mxfp4 needs k in multiples of 64, not 96"),
        ("mxfp4", (32, 48, 128), "gfx950", "mxfp4 needs n in multiples of 32, not 48"),
        ("fp8_rowwise", (7, 48, 128), "gfx950", ""),
    ],
)
def test_shapes_follow_the_alignment_of_the_architecture(
    recipe: str, shape: tuple[int, int, int], architecture: str, reason: str
) -> None:
    assert recipes.unsupported_shape_reason(recipe, *shape, architecture) == reason


def test_outputs_that_raise_on_rocm_are_unsupported_there_alone() -> None:
    for output in ("fp16", "fp32"):
        assert "fp8_rowwise gives bf16 only" in recipes.unsupported_output_reason(
            "fp8_rowwise", output, "gfx942:xnack-"
        )
    assert "mxfp8 gives bf16 or fp16 only" in recipes.unsupported_output_reason("mxfp8", "fp32", "gfx950")
    supported = [("fp8_rowwise", "auto", "gfx942"), ("mxfp8", "fp16", "gfx950"), ("fp8_tensorwise", "fp32", "gfx942")]
    assert not any(recipes.unsupported_output_reason(*case) for case in [*supported, ("fp8_rowwise", "fp32", "sm90")])


def test_mx_formats_need_rocm_7() -> None:
    reason = "mxfp8 needs ROCm 7.0 or later; this PyTorch was built with 6.4.43482-0f2d60242"
    assert recipes.unsupported_rocm_reason("mxfp8", "6.4.43482-0f2d60242") == reason
    assert not recipes.unsupported_rocm_reason("mxfp8", "10.0.1") and not recipes.unsupported_rocm_reason("mxfp8", "")
    assert not recipes.unsupported_rocm_reason("fp8_rowwise", "6.4.43482")
