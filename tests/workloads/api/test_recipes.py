"""Each device's support for each number format."""

import pytest

from workloads.api.recipes import RECIPES, Support, fp8_dtype, support, unsupported_rate_reason

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
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_format_is_native_exactly_where_the_matrix_units_support_it(architecture: str, recipe: str) -> None:
    level, reason = support(recipe, architecture)
    assert (level is Support.NATIVE) == (recipe in NATIVE[architecture].split())
    assert bool(reason) == (level is not Support.NATIVE)
    assert bool(unsupported_rate_reason(recipe, architecture)) == (level is not Support.NATIVE)


def test_a_format_that_is_not_native_is_emulated_where_possible() -> None:
    assert support("mxfp8", "sm90")[0] is Support.EMULATED
    assert support("fp8_rowwise", "cpu")[0] is Support.EMULATED
    assert support("tf32", "cpu")[0] is Support.UNSUPPORTED
    assert unsupported_rate_reason("mxfp8", "sm90").startswith("emulated on this device: sm90 lacks units with a scale")


def test_the_features_in_an_amd_architecture_are_ignored() -> None:
    assert support("fp8_rowwise", "gfx942:sramecc+:xnack-")[0] is Support.NATIVE
    assert fp8_dtype("gfx942:sramecc+:xnack-") == "float8_e4m3fnuz"
    assert fp8_dtype("gfx950") == fp8_dtype("sm90") == "float8_e4m3fn"


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown architecture 'H100'"):
        support("bf16", "H100")
