"""`workloads.llama.block` with its matrix products in fp8: a scale for each matrix, or for each block of a matrix.

Weights, gradients and activations keep the data type of `BlockMath`, bf16, and so do attention, the rotary embedding,
norms and residuals. The operands of the products alone are cast: weights once for all chunks that use them, activations
and gradients in each chunk.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from workloads.llama import fp8, fp8_blocks
from workloads.llama.attention_kernels import Kernel
from workloads.llama.block import Activations, BlockMath, KeysValues, NamedTensors, accumulate
from workloads.llama.fp8 import Fp8Matrix
from workloads.models.model import Model

MATRICES = ("qkv.weight", "output.weight", "gate_up.weight", "down.weight")
NORMS = ("attention_norm.weight", "mlp_norm.weight")
# The names of a cast weight's parts, and of their scales, after its own.
ROWS, COLUMNS, SCALE = " rows", " columns", " scale"


class Fp8BlockMath(BlockMath):
    """`BlockMath` with fp8 operands in every matrix product. Both passes take what `cast_weights` returns."""

    recipe = "fp8_tensorwise"
    scales = "current, one for each matrix, powers of two"

    def __init__(self, shape: Model, kernel: Kernel, *, compiled: bool) -> None:
        super().__init__(shape, kernel, compiled=compiled)
        self._casts = self._import_casts(compiled)

    @staticmethod
    def _import_casts(compiled: bool) -> ModuleType:
        """Return the module with the casts: Triton's if `compiled`."""
        if not compiled:
            return fp8
        from workloads.llama import fp8_kernels

        return fp8_kernels

    def cast_weights(self, weights: NamedTensors, *, forward: bool = True, backward: bool = True) -> NamedTensors:
        """Return the weights, and beside each matrix its fp8 rows (forward) and columns (backward) with their scales.

        Beside the weight of a norm is the scale of what the norm returns, if the recipe knows it from the weight.
        """
        operands = dict(weights)
        for name in MATRICES:
            matrices = self._casts.cast_weight(weights[name], rows=forward, columns=backward)
            for part, matrix in zip((ROWS, COLUMNS), matrices, strict=True):
                if matrix is not None:
                    operands |= {name + part: matrix.data, name + part + SCALE: matrix.scale}
        for name in NORMS:
            if (scale := self._casts.norm_scale(weights[name])) is not None:
                operands[name + SCALE] = scale
        return operands

    # ── forward ──

    def forward(
        self, weights: NamedTensors, x: Tensor, rope: Tensor, past_kv: KeysValues | None
    ) -> tuple[Tensor, Activations]:
        activations = self._compute_missing(weights, {"x": x}, rope, past_kv)
        hidden = self._casts.swiglu_rows(activations["gate"], activations["up"])
        out = self._casts.multiply(hidden, _rows(weights, "down.weight"), fast=True)
        return out.add_(activations["residual"]), activations

    def _compute_missing(
        self, weights: NamedTensors, activations: Activations, rope: Tensor, past_kv: KeysValues | None
    ) -> Activations:
        self._compute_attention(weights, activations, rope, past_kv)
        norm_weight, eps = weights["mlp_norm.weight"], self.shape.norm_eps
        norm_scale = weights.get("mlp_norm.weight" + SCALE)
        normed: Fp8Matrix | None = None
        if "residual" not in activations:
            attn_out = self._casts.cast_rows(activations["attn_out"])
            branch = self._casts.multiply(attn_out, _rows(weights, "output.weight"), fast=True)
            activations["residual"], normed = self._casts.add_and_norm_rows(
                activations["x"], branch, norm_weight, eps, norm_scale
            )
        if missing := [name for name in ("gate", "up") if name not in activations]:
            normed = normed or self._casts.norm_rows(activations["residual"], norm_weight, eps, norm_scale)
            halves = dict(zip(("gate", "up"), self._casts.halve(_rows(weights, "gate_up.weight")), strict=True))
            activations |= {name: self._casts.multiply(normed, halves[name], fast=True) for name in missing}
        return activations

    def _project_qkv(self, weights: NamedTensors, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        name = "attention_norm.weight"
        normed = self._casts.norm_rows(x, weights[name], self.shape.norm_eps, weights.get(name + SCALE))
        qkv = self._casts.multiply(normed, _rows(weights, "qkv.weight"), weights.get("qkv.bias"), fast=True)
        return self._split_rotated(qkv, rope)

    # ── backward ──

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        activations: Activations,
        rope: Tensor,
        d_out: Tensor,
        past_kv: KeysValues | None = None,
        kv_gradients: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        self._compute_missing(weights, activations, rope, past_kv)
        d_residual = self._mlp_backward(weights, gradients, activations, d_out)
        rows, columns = self._casts.cast_both(d_residual)
        attn_out = self._casts.cast_columns(activations["attn_out"])
        self._accumulate_product(gradients, "output.weight", columns, attn_out)
        d_attn_out = self._casts.multiply(rows, _columns(weights, "output.weight"))
        del rows, columns, attn_out
        dq, dk, dv = self._attention_backward(activations, d_attn_out, past_kv, kv_gradients)
        del d_attn_out
        d_qkv = self._rotate_backward(dq, dk, dv, rope)
        del dq, dk, dv
        if "qkv.bias" in weights:
            accumulate(gradients, "qkv.bias", d_qkv.sum(0))
        rows, columns = self._casts.cast_both(d_qkv)
        del d_qkv
        d_normed = self._casts.multiply(rows, _columns(weights, "qkv.weight"))
        d_x, normed = self._norm_backward(
            weights, gradients, "attention_norm.weight", activations["x"], d_normed, d_residual
        )
        self._accumulate_product(gradients, "qkv.weight", columns, normed)
        return d_x

    def _mlp_backward(
        self, weights: NamedTensors, gradients: NamedTensors, activations: Activations, d_out: Tensor
    ) -> Tensor:
        rows, columns = self._casts.cast_both(d_out)
        d_hidden = self._casts.multiply(rows, _columns(weights, "down.weight"))
        hidden, d_rows, d_columns = self._casts.swiglu_backward(
            activations.pop("gate"), activations.pop("up"), d_hidden
        )
        del d_hidden
        self._accumulate_product(gradients, "down.weight", columns, hidden)
        del hidden, rows, columns
        d_normed = self._casts.multiply(d_rows, _columns(weights, "gate_up.weight"))
        del d_rows
        d_residual, normed = self._norm_backward(
            weights, gradients, "mlp_norm.weight", activations.pop("residual"), d_normed, d_out
        )
        self._accumulate_product(gradients, "gate_up.weight", d_columns, normed)
        return d_residual

    def _accumulate_product(self, gradients: NamedTensors, name: str, d_out: Fp8Matrix, x: Fp8Matrix) -> None:
        """Add the gradient of a weight [out, in] from the transposes of its output's gradient and of its input."""
        accumulate(gradients, name, self._casts.multiply(d_out, x))

    def _norm_backward(
        self, weights: NamedTensors, gradients: NamedTensors, name: str, x: Tensor, d_normed: Tensor, d_residual: Tensor
    ) -> tuple[Tensor, Fp8Matrix]:
        """Return the gradient of x plus `d_residual`, and the transpose of the norm of x in fp8."""
        d_x, d_weight, normed = self._casts.norm_backward(
            x, weights[name], d_normed, d_residual, self.shape.norm_eps, weights.get(name + SCALE)
        )
        accumulate(gradients, name, d_weight)
        return d_x, normed


class BlockwiseFp8BlockMath(Fp8BlockMath):
    """`Fp8BlockMath` with scales of blocks."""

    recipe = "fp8_blockwise"
    scales = "current, one for each 128 x 128 of a weight and 1 x 128 of activations and gradients, powers of two"

    @staticmethod
    def _import_casts(compiled: bool) -> ModuleType:
        if not compiled:
            return fp8_blocks
        from workloads.llama import fp8_blocks_kernels

        return fp8_blocks_kernels


BLOCK_MATH_CLASSES: dict[str, type[BlockMath]] = {
    math.recipe: math for math in (BlockMath, Fp8BlockMath, BlockwiseFp8BlockMath)
}
FP8_RECIPES = tuple(filter(None, BLOCK_MATH_CLASSES))


def build_block_math(shape: Model, kernel: Kernel, recipe: str, *, compiled: bool) -> BlockMath:
    """Return the mathematics of a block with its products in a recipe; empty: in the data type of the weights.

    Raises:
        KeyError: the recipe has no such mathematics.
    """
    return BLOCK_MATH_CLASSES[recipe](shape, kernel, compiled=compiled)


def _rows(weights: NamedTensors, name: str) -> Fp8Matrix:
    """Return a weight [out, in], for products that sum over the inputs."""
    return Fp8Matrix(weights[name + ROWS], weights[name + ROWS + SCALE])


def _columns(weights: NamedTensors, name: str) -> Fp8Matrix:
    """Return a weight's transpose [in, out], for products that sum over the outputs."""
    return Fp8Matrix(weights[name + COLUMNS], weights[name + COLUMNS + SCALE])
