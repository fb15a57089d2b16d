"""Comparing matrices in fp8."""

import torch
from torch import Tensor

from workloads.llama.fp8_quantize import Fp8Matrix

E4M3_MAX = 448.0


def assert_same_matrix(actual: Fp8Matrix, expected: Fp8Matrix) -> None:
    """Assert equality but for one number in 10,000, which a last bit of fp32 rounds to the neighbor."""
    assert torch.equal(actual.scale, expected.scale)
    assert actual.data.shape == expected.data.shape
    differing = actual.data.view(torch.uint8) != expected.data.view(torch.uint8)
    assert differing.float().mean() < 1e-4


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.float() - exact.float()).norm() / exact.float().norm())
