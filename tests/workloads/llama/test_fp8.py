"""Matrices in fp8 with one scale: scales, casts, kernels and products."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.fp8_matrices import E4M3_MAX, assert_same_matrix, relative_error
from workloads.llama import fp8
from workloads.llama.fp8 import Fp8Matrix


@pytest.mark.parametrize("amax", [448.0, 448.01, 447.9, 1.75, 1.7500001, 2.0, 1e-20, 3e38])
def test_a_scale_is_the_smallest_power_of_two_that_fits(amax: float) -> None:
    scale = float(fp8.scale_of(torch.tensor(amax)))
    exact = float(torch.tensor(amax))
    assert math.frexp(scale)[0] == 0.5
    assert exact / scale <= E4M3_MAX < exact / (scale / 2)


def test_a_matrix_of_zeros_has_a_scale_and_one_with_infinity_has_none() -> None:
    zeros = fp8.cast_rows(torch.zeros(16, 16))
    assert 0 < float(zeros.scale) < 1e-30 and zeros.data.float().count_nonzero() == 0
    assert math.isnan(float(fp8.scale_of(torch.tensor(math.inf))))
    assert math.isnan(float(fp8.scale_of(torch.tensor(math.nan))))


def test_no_norm_exceeds_the_bound_that_its_scale_is_from() -> None:
    """The worst case is a row with one number that is not zero, at the largest weight."""
    x, weight = torch.randn(4, 256), torch.rand(256) + 0.5
    x[0] = 0
    x[0, weight.argmax()] = 1e4
    scale = fp8.norm_scale(weight)
    normed = functional.rms_norm(x, (256,), weight, 1e-5) / scale
    assert E4M3_MAX / 2 <= normed.abs().max() <= E4M3_MAX
    assert not fp8.norm_rows(x, weight, 1e-5, scale).data.float().isnan().any()


# ── kernels ──


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "features"), [(272, 1200), (1040, 3584), (4096, 4096)])
def test_kernels_compute_what_the_casts_in_pytorch_do(tokens: int, features: int) -> None:
    from workloads.llama import fp8_kernels as kernels

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator).bfloat16()

    x, addend, d_out, later = (draw(tokens, features) for _ in range(4))
    weight, eps = draw(features), 1e-5
    scale = fp8.norm_scale(weight)
    assert_same_matrix(kernels.cast_rows(x), fp8.cast_rows(x))
    assert_same_matrix(kernels.cast_columns(x), fp8.cast_columns(x))
    pairs = [
        *zip(kernels.cast_both(x), fp8.cast_both(x), strict=True),
        (kernels.norm_rows(x, weight, eps, scale), fp8.norm_rows(x, weight, eps, scale)),
        (kernels.swiglu_rows(x, addend), fp8.swiglu_rows(x, addend)),
        *zip(kernels.swiglu_backward(x, addend, d_out), fp8.swiglu_backward(x, addend, d_out), strict=True),
    ]
    total, normed = kernels.add_and_norm_rows(x, addend, weight, eps, scale)
    pairs.append((normed, fp8.norm_rows(x + addend, weight, eps, scale)))
    assert torch.equal(total, x + addend)
    arguments = (x, weight, d_out, later, eps, scale)
    d_x, d_weight, columns = kernels.norm_backward(*arguments)
    expected_d_x, expected_d_weight, expected_columns = fp8.norm_backward(*arguments)
    pairs.append((columns, expected_columns))
    for actual, expected in pairs:
        assert_same_matrix(actual, expected)
    assert relative_error(d_x, expected_d_x) < 1e-3 and relative_error(d_weight, expected_d_weight) < 1e-3


@pytest.mark.gpu
def test_a_product_on_the_gpu_is_that_of_the_rounded_operands() -> None:
    a, b = (fp8.cast_rows(torch.randn(256, 512, device="cuda")) for _ in range(2))
    expected = fp8.multiply(*(Fp8Matrix(matrix.data.cpu(), matrix.scale.cpu()) for matrix in (a, b)))
    for fast in (False, True):
        assert relative_error(fp8.multiply(a, b, fast=fast).cpu(), expected) < 5e-3


@pytest.mark.gpu
def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    from workloads.llama import fp8_kernels as kernels

    for bad in (math.inf, math.nan):
        x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
        x[3, 5] = bad
        assert fp8.multiply(kernels.cast_rows(x), kernels.cast_rows(torch.ones_like(x))).isnan().any()
