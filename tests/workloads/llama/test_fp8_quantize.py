"""Matrices in fp8 with one scale or with a scale for each block: scales, casts, kernels and products."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.support.fp8_matrices import E4M3_MAX, assert_same_matrix, relative_error
from workloads.llama.fp8_quantize import Casts, Fp8Matrix, Granularity, dequantize, halve, multiply, scale_of
from workloads.models.model import MODELS, ModelName

TENSOR, BLOCK = Casts("tensor"), Casts("block")


def draw_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a matrix whose blocks differ in magnitude by up to a million."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-10, 10, (-(-rows // 128), -(-columns // 128)), generator=generator)
    magnitudes = (2.0**exponents).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return torch.randn(rows, columns, generator=generator) * magnitudes


def cast_rows(casts: Casts, x: Tensor) -> Fp8Matrix:
    return casts.cast(x, rows=True)[0]


# ── one scale ──


@pytest.mark.parametrize("amax", [448.0, 448.01, 447.9, 1.75, 1.7500001, 2.0, 1e-20, 3e38])
def test_a_scale_is_the_smallest_power_of_two_that_fits(amax: float) -> None:
    scale = float(scale_of(torch.tensor(amax)))
    exact = float(torch.tensor(amax))
    assert math.frexp(scale)[0] == 0.5
    assert exact / scale <= E4M3_MAX < exact / (scale / 2)


def test_a_matrix_of_zeros_has_a_scale_and_one_with_infinity_has_none() -> None:
    zeros = cast_rows(TENSOR, torch.zeros(16, 16))
    assert 0 < float(zeros.scale) < 1e-30 and zeros.data.float().count_nonzero() == 0
    assert math.isnan(float(scale_of(torch.tensor(math.inf))))
    assert math.isnan(float(scale_of(torch.tensor(math.nan))))


def test_no_norm_exceeds_the_bound_that_its_scale_is_from() -> None:
    """The worst case is a row with one number that is not zero, at the largest weight."""
    x, weight = torch.randn(4, 256), torch.rand(256) + 0.5
    x[0] = 0
    x[0, weight.argmax()] = 1e4
    scale = TENSOR.norm_scale(weight)
    assert scale is not None and BLOCK.norm_scale(weight) is None
    normed = functional.rms_norm(x, (256,), weight, 1e-5) / scale
    assert E4M3_MAX / 2 <= normed.abs().max() <= E4M3_MAX
    assert not TENSOR.add_and_norm(x, None, weight, 1e-5, scale)[1].data.float().isnan().any()


# ── a scale for each block ──


@given(rows=st.integers(5, 300), columns=st.integers(1, 300), seed=st.integers(0, 1000))
def test_each_number_is_rounded_as_its_block_allows(rows: int, columns: int, seed: int) -> None:
    """A number has at least three bits of mantissa, or an error of half of fp8's smallest step in its block."""
    x = draw_matrix(rows, columns, seed)
    for matrix, exact in zip(BLOCK.cast(x, rows=True, columns=True), (x, x.t()), strict=True):
        block_amax = torch.stack([part.abs().amax(1) for part in exact.split(128, dim=1)])
        largest = block_amax / matrix.scale
        assert matrix.scale.shape == block_amax.shape
        assert bool(((largest <= E4M3_MAX) & ((largest > E4M3_MAX / 2) | (block_amax == 0))).all())
        error = (dequantize(matrix) - exact).abs()
        smallest_step = matrix.scale.t().repeat_interleave(128, 1)[:, : exact.shape[1]] * 2.0**-9
        assert bool((error <= torch.maximum(exact.abs() * 2.0**-4, smallest_step / 2)).all())


def test_a_weight_and_its_transpose_have_the_same_numbers() -> None:
    weight = draw_matrix(384, 640)
    rows, columns = BLOCK.cast_weight(weight, rows=True, columns=True)
    assert rows.scale.shape == (3, 8) and columns.scale.shape == (5, 4)  # five blocks, and three, in multiples of four
    assert torch.equal(dequantize(rows), dequantize(columns).t())
    assert relative_error(dequantize(rows), weight) < 0.03
    (alone,) = BLOCK.cast_weight(weight, columns=True)
    assert torch.equal(dequantize(alone), dequantize(columns))


def test_halves_of_a_weight_are_those_of_its_matrix() -> None:
    (rows,) = BLOCK.cast_weight(draw_matrix(768, 256), rows=True)
    assert torch.equal(torch.cat([dequantize(half) for half in halve(rows)]), dequantize(rows))


def test_every_model_has_features_in_whole_blocks() -> None:
    for name in get_args(ModelName):
        shape = MODELS[name]
        heads = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        assert all(size % 128 == 0 for size in (shape.hidden_size, shape.intermediate_size, heads)), name


def test_a_block_with_infinity_is_nan_and_the_others_are_not() -> None:
    x = torch.ones(8, 384)
    x[3, 130] = math.inf
    data = dequantize(cast_rows(BLOCK, x))
    assert bool(data[3, 128:256].isnan().all()) and int(data.isnan().sum()) == 128


# ── kernels ──


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("granularity", "tokens", "features"),
    [
        *(("tensor", *size) for size in ((272, 1200), (1040, 3584), (4096, 4096))),
        *(("block", *size) for size in ((384, 1280), (1152, 3584), (4096, 4096))),
    ],
)
def test_kernels_compute_what_the_casts_in_pytorch_do(granularity: Granularity, tokens: int, features: int) -> None:
    from workloads.llama.fp8_launch import TritonCasts

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator).bfloat16()

    x, addend, d_out, later = (draw(tokens, features) for _ in range(4))
    weight, eps = draw(features), 1e-5

    def call(casts: Casts) -> dict[str, tuple[Fp8Matrix | Tensor, ...]]:
        scale = casts.norm_scale(weight)
        return {
            "rows": tuple(casts.cast(x, rows=True)),
            "columns": tuple(casts.cast(x, columns=True)),
            "both": tuple(casts.cast(x, rows=True, columns=True)),
            "norm": casts.add_and_norm(x, None, weight, eps, scale),
            "add and norm": casts.add_and_norm(x, addend, weight, eps, scale),
            "norm backward": casts.norm_backward(x, weight, d_out, later, eps, scale),
            "swiglu": (casts.swiglu(x, addend),),
            "swiglu backward": casts.swiglu_backward(x, addend, d_out),
        }

    expected = call(Casts(granularity))
    for name, results in call(TritonCasts(granularity)).items():
        for actual, exact in zip(results, expected[name], strict=True):
            if isinstance(actual, Fp8Matrix):
                assert isinstance(exact, Fp8Matrix)
                (assert_same_matrix if granularity == "tensor" else assert_same_blocks)(actual, exact)
            else:
                assert isinstance(exact, Tensor)
                assert relative_error(actual, exact) < (1e-3 if name == "norm backward" else 1e-9), name


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
    from workloads.llama.fp8_launch import TritonCasts

    weight = draw_matrix(outputs, inputs).bfloat16().cuda()
    for rows, columns in ((True, True), (True, False), (False, True)):
        actual = TritonCasts("block").cast_weight(weight, rows=rows, columns=columns)
        for kernel, expected in zip(actual, BLOCK.cast_weight(weight, rows=rows, columns=columns), strict=True):
            assert_same_matrix(kernel, expected)


@pytest.mark.gpu
def test_a_product_on_the_gpu_is_that_of_the_rounded_operands() -> None:
    a, b = (cast_rows(TENSOR, torch.randn(256, 512, device="cuda")) for _ in range(2))
    expected = multiply(*(Fp8Matrix(matrix.data.cpu(), matrix.scale.cpu()) for matrix in (a, b)))
    for fast in (False, True):
        assert relative_error(multiply(a, b, fast=fast).cpu(), expected) < 5e-3


@pytest.mark.gpu
def test_products_of_blocks_on_the_gpu_are_those_of_the_rounded_operands() -> None:
    a, b = (cast_rows(BLOCK, draw_matrix(256, 640, seed).cuda()) for seed in (1, 2))
    (weight,) = BLOCK.cast_weight(draw_matrix(384, 640, 3).cuda(), rows=True)
    bias = torch.randn(384, device="cuda", dtype=torch.bfloat16)
    for other, added in ((b, None), (weight, None), (weight, bias), (halve(weight)[0], None)):
        product = multiply(a, other, added)
        on_cpu = [Fp8Matrix(matrix.data.cpu(), matrix.scale.cpu()) for matrix in (a, other)]
        expected = multiply(*on_cpu, None if added is None else added.cpu())
        assert relative_error(product.cpu(), expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", get_args(Granularity))
def test_numbers_that_are_not_finite_are_not_hidden(granularity: Granularity) -> None:
    from workloads.llama.fp8_launch import TritonCasts

    casts = TritonCasts(granularity)
    for bad in (math.inf, math.nan):
        x = torch.ones(128, 128, device="cuda", dtype=torch.bfloat16)
        x[3, 5] = bad
        assert multiply(cast_rows(casts, x), cast_rows(casts, torch.ones_like(x))).isnan().any()
