"""The tolerance of tf32: what a device's rounding gives passes, a product in a coarser type does not."""

import pytest
import torch

from workloads.instruments.products import relative_error, tolerance

MI300X, H200 = "gfx942:sramecc+:xnack-", "sm90"


def drop_bits(x: torch.Tensor, bits: int, *, nearest: bool) -> torch.Tensor:
    """Return fp32 numbers without the last bits of their mantissa, rounded to nearest or truncated."""
    integers = x.view(torch.int32)
    if nearest:
        integers = integers + (1 << (bits - 1))
    return (integers & -(1 << bits)).view(torch.float32)


@pytest.fixture(params=[512, 4096])
def operands(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, request.param, generator=generator), torch.randn(request.param, 64, generator=generator)


def error_of(operands: tuple[torch.Tensor, torch.Tensor], bits: int, *, nearest: bool) -> float:
    a, b = operands
    rounded = [drop_bits(x, bits, nearest=nearest).double() for x in operands]
    return relative_error((a, b, (rounded[0] @ rounded[1]).float()))


def test_tf32_passes_with_the_rounding_of_either_vendor(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    rounded, truncated = (error_of(operands, 13, nearest=nearest) for nearest in (True, False))
    assert rounded == pytest.approx(2.9e-4, rel=0.1) and rounded < tolerance("tf32", H200)
    assert truncated == pytest.approx(7.7e-4, rel=0.1) and 2 * truncated < tolerance("tf32", MI300X)


def test_a_product_in_bf16_does_not_pass_for_tf32(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert error_of(operands, 16, nearest=True) > max(tolerance("tf32", H200), tolerance("tf32", MI300X))
