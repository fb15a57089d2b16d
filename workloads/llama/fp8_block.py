"""`workloads.llama.block` with fp8 matrix products and one scale per matrix or per block of a matrix.

Weights, gradients and activations stay in bf16, the data type of `BlockMath`, as do attention, the rotary embedding,
norms and residuals. Only GEMM operands are cast: weights once for all chunks that use them, activations and gradients
once per chunk.
"""

from torch import Tensor

from workloads.llama.attention_kernels import Kernel
from workloads.llama.block import Activations, BlockMath, NamedTensors, Past, accumulate
from workloads.llama.expert_block import DOWN, GATE_UP, ExpertBlockMath, Routed, halve_product
from workloads.llama.fp8_experts import ROW_MULTIPLE, copy_rows, multiply_fp8_groups, weigh, weigh_backward
from workloads.llama.fp8_quantize import Casts, Fp8Matrix, Granularity, halve, multiply
from workloads.models.model import Model
from workloads.models.routing import NATURAL, Routing

GRANULARITIES: dict[str, Granularity] = {"fp8_tensorwise": "tensor", "fp8_blockwise": "block"}
FP8_RECIPES = tuple(GRANULARITIES)
SCALES: dict[Granularity, str] = {
    "tensor": "current, one for each matrix, powers of two",
    "block": "current, one for each 128 x 128 of a weight and 1 x 128 of activations and gradients, powers of two",
}
MATRICES = ("qkv.weight", "output.weight", "gate_up.weight", "down.weight", GATE_UP, DOWN)
NORMS = ("attention_norm.weight", "mlp_norm.weight")
# Suffixes that name a cast weight's parts and their scales.
ROWS, COLUMNS, SCALE = " rows", " columns", " scale"


def build_block_math(
    shape: Model, kernel: Kernel, recipe: str, *, compiled: bool, routing: Routing = NATURAL
) -> BlockMath:
    """Return a block's math with matrix products in `recipe`, or in the weights' data type if it is empty. `routing`
    applies to experts, which compute their products in bf16 or fp8_tensorwise."""
    if shape.experts:
        experts_math = Fp8ExpertBlockMath if recipe else ExpertBlockMath
        return experts_math(shape, kernel, routing, compiled=compiled, recipe=recipe)
    if recipe:
        return Fp8BlockMath(shape, kernel, compiled=compiled, recipe=recipe)
    return BlockMath(shape, kernel, compiled=compiled)


class Fp8BlockMath(BlockMath):
    """`BlockMath` with fp8 operands in every GEMM, cast by Triton kernels if `compiled`."""

    def __init__(self, shape: Model, kernel: Kernel, *, compiled: bool, recipe: str) -> None:
        super().__init__(shape, kernel, compiled=compiled, recipe=recipe)
        granularity = GRANULARITIES[recipe]
        self.scales = SCALES[granularity]
        self._casts = Casts(granularity)
        if compiled:
            from workloads.llama.fp8_launch import TritonCasts

            self._casts = TritonCasts(granularity)

    def cast_weights(self, weights: NamedTensors, *, forward: bool = True, backward: bool = True) -> NamedTensors:
        """Return the weights plus, for each matrix, its fp8 rows (forward) and columns (backward) with their scales.

        For a norm, the scale is that of its output, and is included if the recipe derives it from the norm's weight.
        Scales of whole weights that are already in `weights` are not recomputed.
        """
        operands = dict(weights)
        for name in (name for name in MATRICES if name in weights):
            matrices = self._casts.cast_weight(weights[name], weights.get(name + SCALE), rows=forward, columns=backward)
            if self._casts.granularity == "tensor":
                operands[name + SCALE] = matrices[0].scale
            for part, matrix in zip((ROWS,) * forward + (COLUMNS,) * backward, matrices, strict=True):
                operands |= {name + part: matrix.data, name + part + SCALE: matrix.scale}
        for name in (name for name in NORMS if name + SCALE not in weights):
            if (scale := self._casts.norm_scale(weights[name])) is not None:
                operands[name + SCALE] = scale
        return operands

    def forward(self, weights: NamedTensors, x: Tensor, rope: Tensor, past_kv: Past) -> tuple[Tensor, Activations]:
        activations = {"x": x}
        self._compute_missing(weights, activations, rope, past_kv)
        hidden = self._casts.swiglu(activations["gate"], activations["up"])
        out = multiply(hidden, _operand(weights, "down.weight", ROWS), fast=True)
        return out.add_(activations["residual"]), activations

    def _compute_missing(self, weights: NamedTensors, activations: Activations, rope: Tensor, past_kv: Past) -> None:
        self._compute_attention(weights, activations, rope, past_kv)
        normed: Fp8Matrix | None = None
        if "residual" not in activations:
            branch = self._multiply_attention(weights, activations["attn_out"])
            activations["residual"], normed = self._add_and_norm(weights, "mlp_norm.weight", activations["x"], branch)
        if missing := [name for name in ("gate", "up") if name not in activations]:
            normed = normed or self._add_and_norm(weights, "mlp_norm.weight", activations["residual"])[1]
            halves = dict(zip(("gate", "up"), halve(_operand(weights, "gate_up.weight", ROWS)), strict=True))
            activations |= {name: multiply(normed, halves[name], fast=True) for name in missing}

    def _add_and_norm(
        self, weights: NamedTensors, name: str, x: Tensor, addend: Tensor | None = None
    ) -> tuple[Tensor, Fp8Matrix]:
        return self._casts.add_and_norm(x, addend, weights[name], self.shape.norm_eps, weights.get(name + SCALE))

    def _multiply_qkv(self, weights: NamedTensors, x: Tensor, rope: Tensor) -> Tensor:
        _, normed = self._add_and_norm(weights, "attention_norm.weight", x)
        qkv = multiply(normed, _operand(weights, "qkv.weight", ROWS), weights.get("qkv.bias"), fast=True)
        return self._split_heads(qkv, rope)

    def _multiply_output(self, weights: NamedTensors, x: Tensor, attn_out: Tensor) -> Tensor:
        return self._multiply_attention(weights, attn_out).add_(x)

    def _multiply_attention(self, weights: NamedTensors, attn_out: Tensor) -> Tensor:
        (rows,) = self._casts.cast(attn_out, rows=True)
        return multiply(rows, _operand(weights, "output.weight", ROWS), fast=True)

    def _output_backward(
        self, weights: NamedTensors, gradients: NamedTensors, attn_out: Tensor, d_residual: Tensor
    ) -> Tensor:
        rows, columns = self._casts.cast(d_residual, rows=True, columns=True)
        (inputs,) = self._casts.cast(attn_out, columns=True)
        # The gradient of a weight [out, in] is a GEMM of the transposed output gradient and the transposed input.
        accumulate(gradients, "output.weight", multiply(columns, inputs))
        return multiply(rows, _operand(weights, "output.weight", COLUMNS))

    def _qkv_backward(
        self, weights: NamedTensors, gradients: NamedTensors, x: Tensor, d_qkv: Tensor, d_residual: Tensor
    ) -> Tensor:
        rows, columns = self._casts.cast(d_qkv, rows=True, columns=True)
        d_normed = multiply(rows, _operand(weights, "qkv.weight", COLUMNS))
        d_x, normed = self._norm_backward(weights, gradients, "attention_norm.weight", x, d_normed, d_residual)
        accumulate(gradients, "qkv.weight", multiply(columns, normed))
        return d_x

    def _mlp_backward(
        self, weights: NamedTensors, gradients: NamedTensors, activations: Activations, d_out: Tensor
    ) -> Tensor:
        rows, columns = self._casts.cast(d_out, rows=True, columns=True)
        d_hidden = multiply(rows, _operand(weights, "down.weight", COLUMNS))
        hidden, d_rows, d_columns = self._casts.swiglu_backward(
            activations.pop("gate"), activations.pop("up"), d_hidden
        )
        del d_hidden
        accumulate(gradients, "down.weight", multiply(columns, hidden))
        del hidden, rows, columns
        d_normed = multiply(d_rows, _operand(weights, "gate_up.weight", COLUMNS))
        del d_rows
        d_residual, normed = self._norm_backward(
            weights, gradients, "mlp_norm.weight", activations.pop("residual"), d_normed, d_out
        )
        accumulate(gradients, "gate_up.weight", multiply(d_columns, normed))
        return d_residual

    def _norm_backward(
        self, weights: NamedTensors, gradients: NamedTensors, name: str, x: Tensor, d_normed: Tensor, d_residual: Tensor
    ) -> tuple[Tensor, Fp8Matrix]:
        """Return the gradient of x plus `d_residual`, and the transposed norm of x in fp8."""
        d_x, d_weight, normed = self._casts.norm_backward(
            x, weights[name], d_normed, d_residual, self.shape.norm_eps, weights.get(name + SCALE)
        )
        accumulate(gradients, name, d_weight)
        return d_x, normed


class Fp8ExpertBlockMath(ExpertBlockMath, Fp8BlockMath):
    """`ExpertBlockMath` with fp8 operands in every GEMM except the router's."""

    row_multiple = ROW_MULTIPLE

    def __init__(self, shape: Model, kernel: Kernel, routing: Routing, *, compiled: bool, recipe: str) -> None:
        super().__init__(shape, kernel, routing, compiled=compiled, recipe=recipe)
        self.scales += "; inside experts one for each row where products sum over features"

    def _run_experts(self, weights: NamedTensors, activations: Activations, routed: Routed) -> Tensor:
        (rows,), ends = self._copy_normed(weights, routed, rows=True), routed.order.ends
        activations |= halve_product(multiply_fp8_groups(rows, _operand(weights, GATE_UP, ROWS), ends))
        hidden = weigh(activations["gate"], activations["up"], routed.weights)
        return multiply_fp8_groups(hidden, _operand(weights, DOWN, ROWS), ends)

    def _copy_normed(
        self, weights: NamedTensors, routed: Routed, *, rows: bool, columns: bool = False
    ) -> list[Fp8Matrix]:
        scale = weights["mlp_norm.weight" + SCALE]
        (normed,) = self._casts.cast(routed.normed, rows=True, scale=scale)
        return copy_rows(normed, routed.order.tokens, rows=rows, columns=columns)

    def _experts_backward(
        self, weights: NamedTensors, gradients: NamedTensors, activations: Activations, routed: Routed, d_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        order, is_missing = routed.order, "gate" not in activations or "up" not in activations
        *rows, columns = self._copy_normed(weights, routed, rows=is_missing, columns=True)
        if rows:
            product = multiply_fp8_groups(rows.pop(), _operand(weights, GATE_UP, ROWS), order.ends)
            activations |= halve_product(product)
            del product
        (cast_d_out,) = self._casts.cast(d_out, rows=True)
        d_rows, d_columns = copy_rows(cast_d_out, order.tokens, rows=True, columns=True)
        d_hidden = multiply_fp8_groups(d_rows, _operand(weights, DOWN, COLUMNS), order.ends)
        del d_rows, cast_d_out
        inputs = (activations.pop("gate"), activations.pop("up"), routed.weights, d_hidden)
        hidden, d_gate_up, d_gate_up_columns, d_row_weights = weigh_backward(*inputs, order.ends)
        del inputs, d_hidden
        accumulate(gradients, DOWN, multiply_fp8_groups(d_columns, hidden, order.ends))
        del d_columns, hidden
        accumulate(gradients, GATE_UP, multiply_fp8_groups(d_gate_up_columns, columns, order.ends))
        del d_gate_up_columns, columns
        return multiply_fp8_groups(d_gate_up, _operand(weights, GATE_UP, COLUMNS), order.ends), d_row_weights


def _operand(weights: NamedTensors, name: str, part: str) -> Fp8Matrix:
    """Return a weight [out, in] for GEMMs that sum over inputs, or its transpose for GEMMs that sum over outputs."""
    return Fp8Matrix(weights[name + part], weights[name + part + SCALE])
