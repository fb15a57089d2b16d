"""One block of a Llama, forward and backward written out: each thing between the two can be kept, moved, or computed
again, and gradients are added where they are gathered.

The same mathematics as `workloads.llama.model.Block`, which PyTorch differentiates; a test compares them. Weights and
gradients are dictionaries by that module's names, activations are [tokens, features] of one chunk: `sequences` of
`length` tokens, or one piece of a sequence. Gradients are added to those that are there, the others begin with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workloads.llama.attention import Kernel, attend, attend_backward
from workloads.llama.model import apply_rotary_emb, swiglu
from workloads.llama.shapes import LlamaShape

Weights = dict[str, Tensor]
KeysValues = Tensor  # [sequences, tokens, 2 * kv_heads, head_size], keys rotated


# What a chunk leaves at a block for the backward pass, by name; what is missing is computed again:
#   x       the block's input [tokens, hidden_size]
#   q       queries, rotated [sequences, length, heads, head_size]
#   kv      keys, rotated, and values [sequences, length, 2 * kv_heads, head_size]
#   attn_out  what attention makes of them [tokens, heads * head_size], and lse, the logarithm of its sums
#   residual  x and what attention adds to it [tokens, hidden_size]
#   gate      the MLP's first product, the half that is gated, [tokens, intermediate_size], and up, the other. Each by
#           itself: a compiler that writes the gradients of both into one tensor takes twice as long for it
Activations = dict[str, Tensor]


class BlockMath:
    """Forward and backward of any block of `shape`. Elementwise parts are compiled where `compiled` says so."""

    def __init__(self, shape: LlamaShape, kernel: Kernel, *, compiled: bool) -> None:
        self.shape, self.kernel = shape, kernel
        eps, hidden_size = shape.norm_eps, shape.hidden_size

        def norm(x: Tensor, w: Tensor) -> Tensor:
            return functional.rms_norm(x, (hidden_size,), w, eps)

        def norm_backward(x: Tensor, w: Tensor, d: Tensor, beside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """The norm again, the gradient of x with that of what runs `beside` it, and the gradient of w."""
            normed, pull = torch.func.vjp(norm, x, w)  # type: ignore[misc]
            d_x, d_w = pull(d)
            return normed, d_x + beside, d_w

        def swiglu_backward(gate: Tensor, up: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden, pull = torch.func.vjp(swiglu, gate, up)  # type: ignore[misc]
            return hidden, *pull(d)

        def rotate(qkv: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = qkv.transpose(1, 2).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            kv = torch.cat([apply_rotary_emb(k, rope), v], dim=1)
            return apply_rotary_emb(q, rope).transpose(1, 2).contiguous(), kv.transpose(1, 2).contiguous()

        def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, rope: Tensor) -> Tensor:
            back = torch.stack([rope[0], -rope[1]])
            parts = [apply_rotary_emb(dq, back), apply_rotary_emb(dk, back), dv]
            return torch.cat(parts, dim=1).transpose(1, 2).flatten(0, 1).flatten(1)

        def with_later(dk: Tensor, dv: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
            dk_later, dv_later = _parts(later)
            return (dk + dk_later).to(dk.dtype), (dv + dv_later).to(dv.dtype)

        def maybe(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self.norm, self.norm_backward = maybe(norm), maybe(norm_backward)
        self._swiglu, self._swiglu_backward = maybe(swiglu), maybe(swiglu_backward)
        self._rotate, self._rotate_backward = maybe(rotate), maybe(rotate_backward)
        self._with_later = maybe(with_later)

    # ── forward ──

    def forward(self, w: Weights, x: Tensor, rope: Tensor, earlier: KeysValues | None) -> tuple[Tensor, Activations]:
        """A chunk's way through the block, and all that the backward pass can use of it. `rope` is of its positions."""
        a = self._complete(w, {"x": x}, rope, earlier)
        return torch.addmm(a["residual"], self._swiglu(a["gate"], a["up"]), w["down.weight"].t()), a

    def _complete(self, w: Weights, a: Activations, rope: Tensor, earlier: KeysValues | None) -> Activations:
        """Compute what is missing. Nothing after `gate` and `up` is needed a second time."""
        if "q" not in a:
            a["q"], a["kv"] = self._queries_keys_values(w, a["x"], rope)
        if "attn_out" not in a:
            before = _parts(earlier) if earlier is not None else None
            out, a["lse"] = attend(self.kernel, *_heads(a["q"], a["kv"]), earlier=before)
            a["attn_out"] = out.transpose(1, 2).flatten(2).flatten(0, 1)
        if "residual" not in a:
            a["residual"] = torch.addmm(a["x"], a["attn_out"], w["output.weight"].t())
        halves = dict(zip(("gate", "up"), w["gate_up.weight"].chunk(2), strict=True))
        if missing := [name for name in halves if name not in a]:
            normed = self.norm(a["residual"], w["mlp_norm.weight"])
            a |= {name: torch.mm(normed, halves[name].t()) for name in missing}
        return a

    def _queries_keys_values(self, w: Weights, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        qkv = functional.linear(self.norm(x, w["attention_norm.weight"]), w["qkv.weight"], w.get("qkv.bias"))
        heads = self.shape.heads + 2 * self.shape.kv_heads
        return self._rotate(qkv.view(-1, rope.shape[1], heads, self.shape.head_size), rope)

    # ── backward ──

    def backward(
        self,
        w: Weights,
        g: Weights,
        a: Activations,
        rope: Tensor,
        d_out: Tensor,
        earlier: KeysValues | None = None,
        d_keys_values: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The gradient of x; those of the weights go to `g`. Uses up `a`.

        d_keys_values: what later pieces of the sequence have found for this one's keys and values, fp32, and where to
        add what this one finds for the `earlier` ones'
        """
        self._complete(w, a, rope, earlier)
        d_residual = self._mlp_backward(w, g, a, d_out)
        _add_product(g, "output.weight", a["attn_out"], d_residual)
        dq, dk, dv = self._attention_backward(a, torch.mm(d_residual, w["output.weight"]), earlier, d_keys_values)
        d_qkv = self._rotate_backward(dq, dk, dv, rope)
        del dq, dk, dv
        d_normed = torch.mm(d_qkv, w["qkv.weight"])
        normed, d_x, d_norm = self.norm_backward(a["x"], w["attention_norm.weight"], d_normed, d_residual)
        _add_product(g, "qkv.weight", normed, d_qkv)
        _add(g, "attention_norm.weight", d_norm)
        if "qkv.bias" in w:
            _add(g, "qkv.bias", d_qkv.sum(0))
        return d_x

    def _mlp_backward(self, w: Weights, g: Weights, a: Activations, d_out: Tensor) -> Tensor:
        """The gradient of `middle`."""
        d_hidden = torch.mm(d_out, w["down.weight"])
        hidden, d_gate, d_up = self._swiglu_backward(a.pop("gate"), a.pop("up"), d_hidden)
        del d_hidden
        _add_product(g, "down.weight", hidden, d_out)
        del hidden
        w_gate, w_up = w["gate_up.weight"].chunk(2)
        d_normed = torch.mm(d_gate, w_gate).addmm_(d_up, w_up)
        normed, d_residual, d_norm = self.norm_backward(a.pop("residual"), w["mlp_norm.weight"], d_normed, d_out)
        _add_product(g, "gate_up.weight", normed, d_gate, d_up)
        _add(g, "mlp_norm.weight", d_norm)
        return d_residual

    def _attention_backward(
        self,
        a: Activations,
        d_attn_out: Tensor,
        earlier: KeysValues | None,
        d_keys_values: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of queries, keys and values."""
        q, kv, attn_out, lse = (a.pop(name) for name in ("q", "kv", "attn_out", "lse"))
        out, d_out = attn_out.view(q.shape).transpose(1, 2), d_attn_out.view(q.shape).transpose(1, 2)
        before = _parts(earlier) if earlier is not None else None
        gradients, d_earlier = attend_backward(self.kernel, d_out, *_heads(q, kv), out, lse, before)
        dq, dk, dv = gradients
        if d_keys_values is not None:
            later, gathered = d_keys_values
            dk, dv = self._with_later(dk, dv, later)
            if d_earlier is not None:
                for there, found in zip(_parts(gathered), d_earlier, strict=True):
                    there += found
        return dq, dk, dv


def _heads(q: Tensor, kv: KeysValues) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as attention takes them."""
    return q.transpose(1, 2), *_parts(kv)


def _parts(kv: KeysValues) -> tuple[Tensor, Tensor]:
    """Keys and values, or the gradients of both, as attention takes them: views."""
    k, v = kv.transpose(1, 2).chunk(2, dim=1)
    return k, v


def _add_product(g: Weights, name: str, x: Tensor, *d_outs: Tensor) -> None:
    """Of a matrix whose rows made `d_outs`, one after the other, from x."""
    sizes, begun = [d_out.shape[1] for d_out in d_outs], name in g
    if not begun:
        g[name] = x.new_empty(sum(sizes), x.shape[1])
    for rows, d_out in zip(g[name].split(sizes), d_outs, strict=True):
        if begun:
            rows.addmm_(d_out.t(), x)
        else:
            torch.mm(d_out.t(), x, out=rows)


def _add(g: Weights, name: str, gradient: Tensor) -> None:
    if name in g:
        g[name] += gradient
    else:
        g[name] = gradient
