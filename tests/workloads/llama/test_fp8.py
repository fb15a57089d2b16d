"""Matrix products of a block in fp8: scales, casts and kernels, and the block beside plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from workloads.llama import fp8
from workloads.llama.attention import KERNELS
from workloads.llama.block import BlockMath
from workloads.llama.fp8 import FP8, Fp8Matrix
from workloads.llama.fp8_block import Fp8BlockMath
from workloads.llama.model import Block, apply_rotary_emb, rope_table
from workloads.llama.shapes import MODELS, LlamaShape

CPU = torch.device("cpu")
SHAPE = MODELS["llama_tiny"]
LENGTH = 64
E4M3_MAX = 448.0


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


# ── the block beside autograd ──


def round_to_fp8(x: Tensor, amax: float | None = None) -> Tensor:
    """Return x rounded to fp8 with one scale, in fp32."""
    scale = 2.0 ** math.ceil(math.log2((amax or float(x.abs().max())) / E4M3_MAX))
    return (x.float() / scale).to(FP8).float() * scale


class Fp8Product(torch.autograd.Function):
    """x @ weightᵀ + bias with every operand of the three products rounded to fp8, in plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, amax: float | None, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.amax = amax
        return (round_to_fp8(x, amax) @ round_to_fp8(weight).t() + bias).bfloat16().float()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        x, weight = ctx.saved_tensors
        d_bias, d_out = d_out.sum(0), round_to_fp8(d_out)
        return (d_out @ round_to_fp8(weight)).bfloat16().float(), d_out.t() @ round_to_fp8(x, ctx.amax), None, d_bias


class Bf16(torch.autograd.Function):
    """Rounds a value, and its gradient, to bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        return d_out.bfloat16().float()


def run_fp8_block_under_autograd(weights: dict[str, Tensor], x: Tensor, shape: LlamaShape) -> Tensor:
    """Return the output of a block whose products are `Fp8Product`. Its activations are rounded to bf16."""
    rope, bf16 = rope_table(shape, LENGTH, CPU), Bf16.apply

    def product(x: Tensor, layer: str, bound: float | None = None) -> Tensor:
        weight = weights[f"{layer}.weight"]
        bias = weights.get(f"{layer}.bias", torch.zeros(len(weight)))
        return Fp8Product.apply(x, weight, bound, bias)

    def project(x: Tensor, norm: str, layer: str) -> Tensor:
        weight = weights[norm]
        bound = float(weight.detach().abs().max()) * math.sqrt(len(weight))
        return product(functional.rms_norm(x, weight.shape, weight, shape.norm_eps), layer, bound)

    qkv = project(x, "attention_norm.weight", "qkv")
    heads = qkv.view(1, LENGTH, -1, shape.head_size).transpose(1, 2).bfloat16()
    q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    q, k = apply_rotary_emb(q, rope), apply_rotary_emb(k, rope)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    attn_out = out.transpose(1, 2).reshape(LENGTH, -1).float()
    residual = bf16(x + product(attn_out, "output"))
    gate, up = project(residual, "mlp_norm.weight", "gate_up").chunk(2, dim=1)
    return bf16(residual + product(functional.silu(gate) * up, "down"))


def draw_block(shape: LlamaShape) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the weights of a block, an input and the gradient of an output, in bf16."""
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: torch.randn(parameter.shape, generator=generator).mul(0.05).add(parameter.dim() == 1).bfloat16()
        for name, parameter in Block(shape).named_parameters()
    }
    x, d_out = (torch.randn(LENGTH, shape.hidden_size, generator=generator).bfloat16() for _ in range(2))
    return weights, x, d_out


def differentiate(block_math: BlockMath, saved: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """Return a block's output and gradients. `saved`: the activations that the backward pass gets; None: all."""
    weights, x, d_out = draw_block(block_math.shape)
    rope, gradients = rope_table(block_math.shape, LENGTH, CPU), dict[str, Tensor]()
    out, activations = block_math.forward(block_math.cast_weights(weights, backward=False), x, rope, None)
    activations = {name: value for name, value in activations.items() if saved is None or name in saved}
    operands = block_math.cast_weights(weights, forward=saved is not None)
    d_x = block_math.backward(operands, gradients, activations, rope, d_out)
    return {"out": out, "x": d_x} | gradients


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("model", ["llama_tiny", "with biases"])
def test_a_block_in_fp8_is_autograds_with_rounded_operands(model: str) -> None:
    """They differ by the last bit of bf16, far less than the recipe changes them."""
    shape = MODELS["llama_tiny"] if model == "llama_tiny" else LlamaShape(2, 128, 4, 2, 32, 384, 512, qkv_bias=True)
    weights, x, d_out = draw_block(shape)
    leaves = {name: weight.float().requires_grad_() for name, weight in weights.items()}
    leaf_x = x.float().requires_grad_()
    out = run_fp8_block_under_autograd(leaves, leaf_x, shape)
    out.backward(d_out.float())
    expected = {"out": out.detach(), "x": leaf_x.grad} | {name: leaf.grad for name, leaf in leaves.items()}
    in_fp8 = differentiate(Fp8BlockMath(shape, KERNELS["cpu"], compiled=False))
    in_bf16 = differentiate(BlockMath(shape, KERNELS["cpu"], compiled=False))
    assert in_fp8.keys() == expected.keys()
    for name, value in expected.items():
        assert value is not None
        error = relative_error(in_fp8[name], value)
        assert error < 0.003 and error < 0.15 * relative_error(in_fp8[name], in_bf16[name]), name


def test_gradients_in_fp8_point_where_those_in_bf16_do() -> None:
    in_fp8 = differentiate(Fp8BlockMath(SHAPE, KERNELS["cpu"], compiled=False))
    in_bf16 = differentiate(BlockMath(SHAPE, KERNELS["cpu"], compiled=False))
    for name, value in in_bf16.items():
        cosine = functional.cosine_similarity(in_fp8[name].float().flatten(), value.float().flatten(), dim=0)
        assert 0.995 < cosine < 0.99999, name  # fp8 changes them, so they are not the same


@pytest.mark.parametrize("saved", [("x",), ("x", "attn_out", "lse"), ("x", "q", "kv", "attn_out", "lse", "residual")])
def test_recomputed_activations_give_the_same_gradients_in_fp8(saved: tuple[str, ...]) -> None:
    block_math = Fp8BlockMath(SHAPE, KERNELS["cpu"], compiled=False)
    expected = differentiate(block_math)
    for name, value in differentiate(block_math, saved).items():
        assert torch.equal(value, expected[name]), name


# ── kernels ──


def assert_same_matrix(actual: Fp8Matrix, expected: Fp8Matrix) -> None:
    """Assert equality but for one number in 10,000, which a last bit of fp32 rounds to the neighbour."""
    assert float(actual.scale) == float(expected.scale)
    assert actual.data.shape == expected.data.shape
    differing = actual.data.view(torch.uint8) != expected.data.view(torch.uint8)
    assert differing.float().mean() < 1e-4


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
