"""`workloads.llama.block` with the experts of `workloads.llama.experts` instead of the MLP, without autograd.

The block saves the gate and up projections of all rows; a token has one row per chosen expert. The two projections are
views of one product, so saving one saves both. The router, the sort order and the copied rows are recomputed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from workloads.instruments.trace import annotate
from workloads.llama.attention_kernels import Gradients, Kernel
from workloads.llama.block import Activations, BlockMath, NamedTensors, Past, accumulate
from workloads.llama.experts import Choice, Order, choose_experts, force_experts, sort_by_expert
from workloads.llama.grouped import multiply_groups, sum_rows
from workloads.llama.model import swiglu
from workloads.models.model import Model
from workloads.models.routing import Routing

ROUTER, GATE_UP, DOWN = "experts.router.weight", "experts.gate_up", "experts.down"


class Routed(NamedTuple):
    """The rows of a chunk's tokens, sorted by expert."""

    normed: Tensor  # the input of the experts and the router [tokens, hidden_size]
    logits: Tensor  # [tokens, experts]
    choice: Choice
    order: Order
    weights: Tensor  # of the rows' outputs, [rows, 1] fp32


class ExpertBlockMath(BlockMath):
    """`BlockMath` with routed experts. `routing` assigns tokens to experts, without router losses or biases."""

    row_multiple = 1  # each expert's rows are padded to a multiple of this

    def __init__(self, shape: Model, kernel: Kernel, routing: Routing, *, compiled: bool, recipe: str = "") -> None:
        super().__init__(shape, kernel, compiled=compiled, recipe=recipe)
        self._routing, self._forced = routing, torch.empty(0)
        self._busiest = torch.zeros(2, dtype=torch.float64)  # [sum over forward passes of busiest/mean, passes]

        def weigh(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
            return (swiglu(gate, up) * weights).to(gate.dtype)

        def weigh_backward(gate: Tensor, up: Tensor, weights: Tensor, d_out: Tensor) -> Gradients:
            hidden, vjp = torch.func.vjp(weigh, gate, up, weights)  # type: ignore[misc]
            d_gate, d_up, d_weights = vjp(d_out)
            return hidden, torch.cat([d_gate, d_up], dim=-1), d_weights

        self._weigh, self._weigh_backward = self.compile_if_enabled(weigh), self.compile_if_enabled(weigh_backward)

    def forward(self, weights: NamedTensors, x: Tensor, rope: Tensor, past_kv: Past) -> tuple[Tensor, Activations]:
        activations = {"x": x}
        self._compute_residual(weights, activations, rope, past_kv)
        routed = self._route(weights, activations["residual"])
        share = routed.order.counts.max() * self.shape.experts / routed.order.rows.numel()
        self._busiest = self._busiest.to(share.device) + torch.stack([share, torch.ones_like(share)])
        rows = self._run_experts(weights, activations, routed)
        return sum_rows(rows, routed.order.rows, routed.order.tokens).add_(activations["residual"]), activations

    def _run_experts(self, weights: NamedTensors, activations: Activations, routed: Routed) -> Tensor:
        """Return each row's output [rows, hidden_size], and add `gate` and `up` [rows, features] to `activations`."""
        order = routed.order
        rows = sum_rows(routed.normed, order.tokens, order.rows)
        activations |= halve_product(multiply_groups(rows, weights[GATE_UP].mT, order.ends))
        with annotate("experts"):
            hidden = self._weigh(activations["gate"], activations["up"], routed.weights)
        return multiply_groups(hidden, weights[DOWN].mT, order.ends)

    def _compute_missing(self, weights: NamedTensors, activations: Activations, rope: Tensor, past_kv: Past) -> None:
        self._compute_residual(weights, activations, rope, past_kv)

    def _route(self, weights: NamedTensors, residual: Tensor) -> Routed:
        normed = self.norm(residual, weights["mlp_norm.weight"])
        forced = None
        if (imbalance := self._routing.imbalance) is not None:
            if len(self._forced) != len(normed):  # all but a measurement's last few chunks have the same size
                self._forced = force_experts(len(normed), self.shape, imbalance, self._routing.seed).to(normed.device)
            forced = self._forced
        with annotate("router"):
            logits = torch.mm(normed, weights[ROUTER].t())
            choice = choose_experts(logits, logits.new_zeros(()), self.shape, forced)
        with annotate("permutation"):
            order = sort_by_expert(choice.experts, self.shape.experts, multiple=self.row_multiple)
            row_weights = choice.weights.flatten()[order.places]  # arbitrary for an empty row
        return Routed(normed, logits, choice, order, row_weights)

    @property
    def imbalance(self) -> float:
        busiest, passes = self._busiest.tolist()
        return float(busiest / passes)

    def _mlp_backward(
        self, weights: NamedTensors, gradients: NamedTensors, activations: Activations, d_out: Tensor
    ) -> Tensor:
        residual = activations.pop("residual")
        normed, logits, choice, order, _ = routed = self._route(weights, residual)
        d_rows, d_row_weights = self._experts_backward(weights, gradients, activations, routed, d_out)
        d_normed = sum_rows(d_rows, order.rows, order.tokens)
        del d_rows
        with annotate("router"):

            def weigh(logits: Tensor) -> Tensor:  # keeps the experts of `choice`
                return choose_experts(logits, logits.new_zeros(()), self.shape, choice.experts).weights

            d_logits: Tensor = torch.func.vjp(weigh, logits)[1](d_row_weights.flatten()[order.rows])[0]
            accumulate(gradients, ROUTER, torch.mm(d_logits.t(), normed))
            d_normed.addmm_(d_logits, weights[ROUTER])
        _, d_residual, d_norm = self.norm_backward(residual, weights["mlp_norm.weight"], d_normed, d_out)
        accumulate(gradients, "mlp_norm.weight", d_norm)
        return d_residual

    def _experts_backward(
        self, weights: NamedTensors, gradients: NamedTensors, activations: Activations, routed: Routed, d_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of each row's normed input [rows, hidden_size] and of each row's weight [rows, 1]."""
        order = routed.order
        rows = sum_rows(routed.normed, order.tokens, order.rows)
        if "gate" not in activations or "up" not in activations:
            activations |= halve_product(multiply_groups(rows, weights[GATE_UP].mT, order.ends))
        d_rows = sum_rows(d_out, order.tokens, order.rows)
        d_hidden = multiply_groups(d_rows, weights[DOWN], order.ends)
        gate, up = activations.pop("gate"), activations.pop("up")
        with annotate("experts"):
            hidden, d_gate_up, d_row_weights = self._weigh_backward(gate, up, routed.weights, d_hidden)
        del gate, up, d_hidden
        accumulate(gradients, DOWN, multiply_groups(d_rows.t(), hidden, order.ends))
        del d_rows, hidden
        accumulate(gradients, GATE_UP, multiply_groups(d_gate_up.t(), rows, order.ends))
        del rows
        return multiply_groups(d_gate_up, weights[GATE_UP], order.ends), d_row_weights


def halve_product(product: Tensor) -> Activations:
    """Return `gate` and `up`, two views of one product."""
    return dict(zip(("gate", "up"), product.chunk(2, dim=-1), strict=True))
