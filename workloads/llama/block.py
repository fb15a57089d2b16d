"""A Llama block with a manual backward pass, in which any activation can be saved, moved or recomputed.

It computes the same function as `workloads.llama.model.Block`, which autograd differentiates. A test compares the two.

Weights and gradients are dictionaries keyed by `Block`'s parameter names. Activations are [tokens, features] of one
chunk: `sequences` sequences of `length` tokens, or one piece of a sequence. A new gradient is added to the gradient in
the dictionary, or stored if there is none.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workloads.llama.attention import Pair, attend, attend_backward
from workloads.llama.attention_kernels import Gradients, Kernel
from workloads.llama.model import apply_rotary_emb, swiglu
from workloads.models.model import Model

HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
NamedTensors = dict[str, Tensor]
KeysValues = Tensor  # [sequences, tokens, 2 * kv_heads, head_size], keys rotated
Past = KeysValues | None  # keys and values of the sequences' earlier pieces; None for whole sequences

# The activations of one chunk that the backward pass can use, by name. Missing ones are recomputed.
#   x         the block's input [tokens, hidden_size]
#   q         rotated queries [sequences, length, heads, head_size]
#   kv        rotated keys, and values [sequences, length, 2 * kv_heads, head_size]
#   qkv       q and kv before norms and rotation, if the model normalizes heads; no plan saves it
#   attn_out  the output of attention [tokens, heads * head_size], and lse, the logsumexp of the scores
#   residual  x plus the attention branch [tokens, hidden_size]
#   gate, up  the two halves of the MLP's first GEMM, [tokens, intermediate_size] each. They are separate tensors,
#             because compiled code takes twice as long if it writes both gradients into one tensor
Activations = dict[str, Tensor]


class BlockMath:
    """The forward and backward passes of all blocks of one shape.

    Attributes:
        recipe: the matrix products' recipe from `workloads.api.recipes`; empty: they use the weights' data type.
        scales: how the recipe scales the operands of matrix products; empty without a recipe.
        norm: maps (x, weight) to the RMS norm of x[tokens, hidden_size].
        norm_backward: maps (x, weight, d_out, d_residual) to the norm of x, the gradient with respect to x plus
            `d_residual`, and the gradient with respect to weight.
    """

    scales = ""

    def __init__(self, shape: Model, kernel: Kernel, *, compiled: bool, recipe: str = "") -> None:
        """Use `torch.compile` for the elementwise operations if `compiled`."""
        self.shape, self.kernel, self.recipe = shape, kernel, recipe
        eps, hidden_size = shape.norm_eps, shape.hidden_size

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return functional.rms_norm(x, (hidden_size,), weight, eps)

        def norm_backward(x: Tensor, weight: Tensor, d_out: Tensor, d_residual: Tensor) -> Gradients:
            normed, vjp = torch.func.vjp(norm, x, weight)  # type: ignore[misc]
            d_x, d_weight = vjp(d_out)
            return normed, d_x + d_residual, d_weight

        def swiglu_backward(gate: Tensor, up: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden, vjp = torch.func.vjp(swiglu, gate, up)  # type: ignore[misc]
            return hidden, *vjp(d_out)

        heads = [shape.heads, shape.kv_heads, shape.kv_heads]

        def norm_heads(x: Tensor, weight: Tensor) -> Tensor:  # x[sequences, length, heads, head_size]
            rows = x.reshape(*x.shape[:2], -1, weight.numel())
            return functional.rms_norm(rows, weight.shape, weight, eps).view(x.shape)

        def rotate(qkv: Tensor, rope: Tensor, *norms: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = qkv.split(heads, dim=2)
            if norms:
                q, k = norm_heads(q, norms[0]), norm_heads(k, norms[1])
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            kv = torch.cat([apply_rotary_emb(k, rope), v], dim=1)
            return apply_rotary_emb(q, rope).transpose(1, 2).contiguous(), kv.transpose(1, 2).contiguous()

        def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, rope: Tensor) -> Tensor:
            inverse = torch.stack([rope[0], -rope[1]])
            parts = [apply_rotary_emb(dq, inverse), apply_rotary_emb(dk, inverse), dv]
            return torch.cat(parts, dim=1).transpose(1, 2).flatten(0, 1).flatten(1)

        def norm_heads_backward(qkv: Tensor, d_qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Gradients:
            (q, k, _), (dq, dk, dv) = qkv.split(heads, dim=2), d_qkv.view(qkv.shape).split(heads, dim=2)
            dq, d_q_norm = torch.func.vjp(norm_heads, q, q_norm)[1](dq)
            dk, d_k_norm = torch.func.vjp(norm_heads, k, k_norm)[1](dk)
            return torch.cat([dq, dk, dv], dim=2).flatten(0, 1).flatten(1), d_q_norm, d_k_norm

        def add_kv_gradients(dk: Tensor, dv: Tensor, d_kv: Tensor) -> tuple[Tensor, Tensor]:
            later_dk, later_dv = split_kv(d_kv)
            return (dk + later_dk).to(dk.dtype), (dv + later_dv).to(dv.dtype)

        def compile_if_enabled(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self.norm, self.norm_backward = compile_if_enabled(norm), compile_if_enabled(norm_backward)
        self._swiglu, self._swiglu_backward = compile_if_enabled(swiglu), compile_if_enabled(swiglu_backward)
        self._rotate, self._rotate_backward = compile_if_enabled(rotate), compile_if_enabled(rotate_backward)
        self._norm_heads_backward = compile_if_enabled(norm_heads_backward)
        self._add_kv_gradients = compile_if_enabled(add_kv_gradients)
        self.compile_if_enabled = compile_if_enabled

    @property
    def imbalance(self) -> float | None:
        """The busiest expert's tokens divided by the mean, averaged over all forward passes; None without experts."""
        return None

    def cast_weights(self, weights: NamedTensors, *, forward: bool = True, backward: bool = True) -> NamedTensors:
        """Return a block's weights as the forward pass (or a recomputation) and the backward pass read them."""
        return weights

    def forward(self, weights: NamedTensors, x: Tensor, rope: Tensor, past_kv: Past) -> tuple[Tensor, Activations]:
        """Return one chunk's output [tokens, hidden_size] and its activations; `rope` is the chunk's table."""
        activations = {"x": x}
        self._compute_missing(weights, activations, rope, past_kv)
        hidden = self._swiglu(activations["gate"], activations["up"])
        return torch.addmm(activations["residual"], hidden, weights["down.weight"].t()), activations

    def _compute_missing(self, weights: NamedTensors, activations: Activations, rope: Tensor, past_kv: Past) -> None:
        """Add the missing activations, except the last GEMM's output, which the backward pass does not need."""
        self._compute_residual(weights, activations, rope, past_kv)
        halves = dict(zip(("gate", "up"), weights["gate_up.weight"].chunk(2), strict=True))
        if missing := [name for name in halves if name not in activations]:
            normed = self.norm(activations["residual"], weights["mlp_norm.weight"])
            activations |= {name: torch.mm(normed, halves[name].t()) for name in missing}

    def _compute_residual(self, weights: NamedTensors, activations: Activations, rope: Tensor, past_kv: Past) -> None:
        self._compute_attention(weights, activations, rope, past_kv)
        if "residual" not in activations:
            activations["residual"] = self._multiply_output(weights, activations["x"], activations["attn_out"])

    def _multiply_output(self, weights: NamedTensors, x: Tensor, attn_out: Tensor) -> Tensor:
        return torch.addmm(x, attn_out, weights["output.weight"].t())

    def _compute_attention(self, weights: NamedTensors, activations: Activations, rope: Tensor, past_kv: Past) -> None:
        if "q" not in activations:
            activations |= self._project_qkv(weights, activations["x"], rope)
        if "attn_out" not in activations:
            past = split_kv(past_kv) if past_kv is not None else None
            q, k, v = split_heads(activations["q"], activations["kv"])
            out, activations["lse"] = attend(self.kernel, q, k, v, past)
            activations["attn_out"] = out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _project_qkv(self, weights: NamedTensors, x: Tensor, rope: Tensor) -> Activations:
        """Return q and kv and, if heads are normalized, the tensor that the norms' backward pass reads."""
        qkv = self._multiply_qkv(weights, x, rope)
        q, kv = self._rotate(qkv, rope, *(weights[name] for name in HEAD_NORMS if name in weights))
        return {"q": q, "kv": kv} | ({"qkv": qkv} if self.shape.qk_norm else {})

    def _multiply_qkv(self, weights: NamedTensors, x: Tensor, rope: Tensor) -> Tensor:
        normed = self.norm(x, weights["attention_norm.weight"])
        return self._split_heads(functional.linear(normed, weights["qkv.weight"], weights.get("qkv.bias")), rope)

    def _split_heads(self, qkv: Tensor, rope: Tensor) -> Tensor:
        return qkv.view(-1, rope.shape[1], self.shape.heads + 2 * self.shape.kv_heads, self.shape.head_size)

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        activations: Activations,
        rope: Tensor,
        d_out: Tensor,
        past_kv: Past = None,
        kv_gradients: Pair | None = None,
    ) -> Tensor:
        """Return the gradient of x, and add the weights' gradients to `gradients`.

        `weights`, `rope` and `past_kv` are as in `forward`.

        Args:
            activations: the saved activations, at least x. Missing ones are recomputed. All except x are removed after
                their last use to free memory.
            d_out: the gradient of the block's output [tokens, hidden_size].
            kv_gradients: for pieces only: the gradient of this piece's keys and values from later pieces, and the
                buffer to which the gradient of `past_kv` is added. Both are fp32 in the layout of `KeysValues`.
        """
        self._compute_missing(weights, activations, rope, past_kv)
        d_residual = self._mlp_backward(weights, gradients, activations, d_out)
        d_attn_out = self._output_backward(weights, gradients, activations["attn_out"], d_residual)
        dq, dk, dv = self._attention_backward(activations, d_attn_out, past_kv, kv_gradients)
        del d_attn_out
        d_qkv = self._rotate_backward(dq, dk, dv, rope)
        del dq, dk, dv
        if self.shape.qk_norm:
            norms = [weights[name] for name in HEAD_NORMS]
            if (qkv := activations.pop("qkv", None)) is None:
                qkv = self._multiply_qkv(weights, activations["x"], rope)
            d_qkv, *d_norms = self._norm_heads_backward(qkv, d_qkv, *norms)
            del qkv
            for name, d_weight in zip(HEAD_NORMS, d_norms, strict=True):
                accumulate(gradients, name, d_weight)
        if "qkv.bias" in weights:
            accumulate(gradients, "qkv.bias", d_qkv.sum(0))
        return self._qkv_backward(weights, gradients, activations["x"], d_qkv, d_residual)

    def _output_backward(
        self, weights: NamedTensors, gradients: NamedTensors, attn_out: Tensor, d_residual: Tensor
    ) -> Tensor:
        """Return the gradient of attn_out."""
        _accumulate_weight_gradient(gradients, "output.weight", attn_out, d_residual)
        return torch.mm(d_residual, weights["output.weight"])

    def _qkv_backward(
        self, weights: NamedTensors, gradients: NamedTensors, x: Tensor, d_qkv: Tensor, d_residual: Tensor
    ) -> Tensor:
        """Return the gradient of x, including the gradient of `residual`."""
        d_normed = torch.mm(d_qkv, weights["qkv.weight"])
        normed, d_x, d_norm = self.norm_backward(x, weights["attention_norm.weight"], d_normed, d_residual)
        _accumulate_weight_gradient(gradients, "qkv.weight", normed, d_qkv)
        accumulate(gradients, "attention_norm.weight", d_norm)
        return d_x

    def _mlp_backward(
        self, weights: NamedTensors, gradients: NamedTensors, activations: Activations, d_out: Tensor
    ) -> Tensor:
        """Return the gradient of `residual`."""
        d_hidden = torch.mm(d_out, weights["down.weight"])
        hidden, d_gate, d_up = self._swiglu_backward(activations.pop("gate"), activations.pop("up"), d_hidden)
        del d_hidden
        _accumulate_weight_gradient(gradients, "down.weight", hidden, d_out)
        del hidden
        gate_weight, up_weight = weights["gate_up.weight"].chunk(2)
        d_normed = torch.mm(d_gate, gate_weight).addmm_(d_up, up_weight)
        normed, d_residual, d_norm = self.norm_backward(
            activations.pop("residual"), weights["mlp_norm.weight"], d_normed, d_out
        )
        _accumulate_weight_gradient(gradients, "gate_up.weight", normed, d_gate, d_up)
        accumulate(gradients, "mlp_norm.weight", d_norm)
        return d_residual

    def _attention_backward(
        self, activations: Activations, d_attn_out: Tensor, past_kv: Past, kv_gradients: Pair | None
    ) -> Gradients:
        q, kv, attn_out, lse = (activations.pop(name) for name in ("q", "kv", "attn_out", "lse"))
        out, d_out = attn_out.view(q.shape).transpose(1, 2), d_attn_out.view(q.shape).transpose(1, 2)
        past = split_kv(past_kv) if past_kv is not None else None
        (dq, dk, dv), d_past = attend_backward(self.kernel, d_out, *split_heads(q, kv), out, lse, past)
        if kv_gradients is not None:
            d_kv, d_past_kv = kv_gradients
            dk, dv = self._add_kv_gradients(dk, dv, d_kv)
            if d_past is not None:
                for accumulated, gradient in zip(split_kv(d_past_kv), d_past, strict=True):
                    accumulated += gradient
        return dq, dk, dv


def split_heads(q: Tensor, kv: KeysValues) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of q, k and v in the layout of `workloads.llama.attention`."""
    return q.transpose(1, 2), *split_kv(kv)


def split_kv(kv: KeysValues) -> tuple[Tensor, Tensor]:
    """Return views of the keys and values, or of their gradients, in the layout of `workloads.llama.attention`."""
    k, v = kv.transpose(1, 2).chunk(2, dim=1)
    return k, v


class Unset(NamedTensors):
    """Marks gradients as missing, and holds the buffers in which each weight's first gradient is stored, not added."""

    def __init__(self, buffers: NamedTensors) -> None:
        super().__init__()
        self.buffers = buffers


def _accumulate_weight_gradient(gradients: NamedTensors, name: str, x: Tensor, *d_outs: Tensor) -> None:
    """Add the gradient of a weight that maps x to stacked outputs; `d_outs` are their gradients in row order."""
    sizes, is_stored = [d_out.shape[1] for d_out in d_outs], name in gradients
    if not is_stored:
        buffer = gradients.buffers[name] if isinstance(gradients, Unset) else x.new_empty(sum(sizes), x.shape[1])
        gradients[name] = buffer
    for rows, d_out in zip(gradients[name].split(sizes), d_outs, strict=True):
        if is_stored:
            rows.addmm_(d_out.t(), x)
        else:
            torch.mm(d_out.t(), x, out=rows)


def accumulate(gradients: NamedTensors, name: str, gradient: Tensor) -> None:
    if name in gradients:
        gradients[name] += gradient
    else:
        gradients[name] = gradients.buffers[name].copy_(gradient) if isinstance(gradients, Unset) else gradient
