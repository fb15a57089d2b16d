"""Matrices in fp8 with a scale for each block: scales, casts, kernels and products."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.fp8_matrices import E4M3_MAX, assert_same_matrix, relative_error
from workloads.llama import fp8_blocks
from workloads.llama.fp8 import Fp8Matrix
from workloads.models.model import TRAINED_MODELS


def draw_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a matrix whose blocks differ in magnitude by up to a million."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-10, 10, (-(-rows // 128), -(-columns // 128)), generator=generator)
    magnitudes = (2.0**exponents).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return torch.randn(rows, columns, generator=generator) * magnitudes


@given(rows=st.integers(5, 300), columns=st.integers(1, 300), seed=st.integers(0, 1000))
def test_each_number_is_rounded_as_its_block_allows(rows: int, columns: int, seed: int) -> None:
    """A number has at least three bits of mantissa, or an error of half of fp8's smallest step in its block."""
    x = draw_matrix(rows, columns, seed)
    for matrix, exact in zip(fp8_blocks.cast_both(x), (x, x.t()), strict=True):
        block_amax = torch.stack([part.abs().amax(1) for part in exact.split(128, dim=1)])
        largest = block_amax / matrix.scale
        assert matrix.scale.shape == block_amax.shape
        assert bool(((largest <= E4M3_MAX) & ((largest > E4M3_MAX / 2) | (block_amax == 0))).all())
        error = (fp8_blocks.dequantize(matrix) - exact).abs()
        smallest_step = matrix.scale.t().repeat_interleave(128, 1)[:, : exact.shape[1]] * 2.0**-9
        assert bool((error <= torch.maximum(exact.abs() * 2.0**-4, smallest_step / 2)).all())


def test_a_weight_and_its_transpose_have_the_same_numbers() -> None:
    weight = draw_matrix(384, 640)
    rows, columns = fp8_blocks.cast_weight(weight, rows=True, columns=True)
    assert rows is not None and columns is not None
    assert rows.scale.shape == (3, 8) and columns.scale.shape == (5, 4)  # five blocks, and three, in multiples of four
    assert torch.equal(fp8_blocks.dequantize(rows), fp8_blocks.dequantize(columns).t())
    assert relative_error(fp8_blocks.dequantize(rows), weight) < 0.03
    assert fp8_blocks.cast_weight(weight, rows=True, columns=False)[1] is None


def test_halves_of_a_weight_are_those_of_its_matrix() -> None:
    weight = draw_matrix(768, 256)
    rows, _ = fp8_blocks.cast_weight(weight, rows=True, columns=False)
    assert rows is not None
    halves = [fp8_blocks.dequantize(half) for half in fp8_blocks.halve(rows)]
    assert torch.equal(torch.cat(halves), fp8_blocks.dequantize(rows))


def test_every_model_has_features_in_whole_blocks() -> None:
    for name, shape in TRAINED_MODELS.items():
        heads = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        assert all(size % 128 == 0 for size in (shape.hidden_size, shape.intermediate_size, heads)), name


def test_a_block_with_infinity_is_nan_and_the_others_are_not() -> None:
    x = torch.ones(8, 384)
    x[3, 130] = math.inf
    data = fp8_blocks.dequantize(fp8_blocks.cast_rows(x))
    assert bool(data[3, 128:256].isnan().all()) and int(data.isnan().sum()) == 128


# ── kernels ──


def cast_as_both(
    arguments: dict[str, Tensor],
) -> list[tuple[str, Fp8Matrix | Tensor | None, Fp8Matrix | Tensor | None]]:
    """Return the name, the kernel's result and PyTorch's, for every cast."""
    from workloads.llama import fp8_blocks_kernels as kernels

    x, addend, d_out, later, weight = arguments.values()
    eps, results = 1e-5, []
    calls = {
        "cast_rows": (x,),
        "cast_columns": (x,),
        "cast_both": (x,),
        "norm_rows": (x, weight, eps),
        "add_and_norm_rows": (x, addend, weight, eps),
        "norm_backward": (x, weight, d_out, later, eps),
        "swiglu_rows": (x, addend),
        "swiglu_backward": (x, addend, d_out),
    }
    for name, values in calls.items():
        actual, expected = getattr(kernels, name)(*values), getattr(fp8_blocks, name)(*values)
        if isinstance(actual, Fp8Matrix):
            actual, expected = (actual,), (expected,)
        results += [(name, *pair) for pair in zip(actual, expected, strict=True)]
    return results


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "features"), [(384, 1280), (1152, 3584), (4096, 4096)])
def test_kernels_compute_what_the_casts_in_pytorch_do(tokens: int, features: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator).bfloat16()

    names = ("x", "addend", "d_out", "later")
    arguments = {name: draw(tokens, features) for name in names} | {"weight": draw(features)}
    for name, actual, expected in cast_as_both(arguments):
        if isinstance(actual, Fp8Matrix):
            assert isinstance(expected, Fp8Matrix)
            assert_same_blocks(actual, expected)
        else:
            assert isinstance(actual, Tensor) and isinstance(expected, Tensor)
            assert relative_error(actual, expected) < 1e-3, name


def assert_same_blocks(actual: Fp8Matrix, expected: Fp8Matrix) -> None:
    """Assert equality but for the few blocks whose scale changes with the last bit of their largest magnitude."""
    differing = actual.scale != expected.scale
    assert actual.scale.shape == expected.scale.shape and differing.float().mean() < 1e-4
    assert actual.data.shape == expected.data.shape
    same = actual.data.view(torch.uint8) == expected.data.view(torch.uint8)
    assert (~same).float().mean() < 1e-4 + float(differing.float().mean())


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(384, 640), (1024, 4096)])
def test_the_kernel_of_weights_computes_what_the_cast_in_pytorch_does(outputs: int, inputs: int) -> None:
    from workloads.llama import fp8_blocks_kernels as kernels

    weight = draw_matrix(outputs, inputs).bfloat16().cuda()
    for rows, columns in ((True, True), (True, False), (False, True)):
        actual = kernels.cast_weight(weight, rows=rows, columns=columns)
        for kernel, expected in zip(actual, fp8_blocks.cast_weight(weight, rows=rows, columns=columns), strict=True):
            assert (kernel is None) == (expected is None)
            if kernel is not None and expected is not None:
                assert_same_matrix(kernel, expected)


@pytest.mark.gpu
def test_products_on_the_gpu_are_those_of_the_rounded_operands() -> None:
    a, b = (fp8_blocks.cast_rows(draw_matrix(256, 640, seed).cuda()) for seed in (1, 2))
    weight, _ = fp8_blocks.cast_weight(draw_matrix(384, 640, 3).cuda(), rows=True, columns=False)
    assert weight is not None
    bias = torch.randn(384, device="cuda", dtype=torch.bfloat16)
    for other, added in ((b, None), (weight, None), (weight, bias), (fp8_blocks.halve(weight)[0], None)):
        product = fp8_blocks.multiply(a, other, added)
        on_cpu = [Fp8Matrix(matrix.data.cpu(), matrix.scale.cpu()) for matrix in (a, other)]
        expected = fp8_blocks.multiply(*on_cpu, None if added is None else added.cpu())
        assert relative_error(product.cpu(), expected) < 5e-3
