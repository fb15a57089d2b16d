"""The floating-point operations of training a decoder: forward and backward, per token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from workloads.llama.shapes import LlamaShape


def per_token(shape: LlamaShape, sequence_length: int, *, layers: int | None = None, lm_head: bool = True) -> float:
    """Model FLOPs per token, causal: half of the attention scores are never computed, so they do not count.

    L(6D(2D + 2K + 3F) + 6SD) + 6DV with D the width, K kv heads x head size, F the feed-forward width, S the sequence
    length and V the vocabulary: six for each weight of a linear layer (Kaplan et al. 2020, table 1), twelve for each
    pair of token and earlier token and width, of which half. `layers` and `head` count a part of the model.
    """
    hidden_size, kv, attention = shape.hidden_size, shape.kv_heads * shape.head_size, shape.heads * shape.head_size
    linear = hidden_size * (attention + 2 * kv) + attention * hidden_size + 3 * hidden_size * shape.intermediate_size
    block = 6 * linear + 6 * sequence_length * attention
    return (shape.layers if layers is None else layers) * block + (6 * hidden_size * shape.vocabulary if lm_head else 0)


Remeasurement = Literal["qkv", "attention", "output", "gate", "up"]


def hardware_per_token(shape: LlamaShape, sequence_length: int, again: Mapping[Remeasurement, int]) -> float:
    """FLOPs per token that a device really does: the model's, what so many layers compute `again` in the backward pass,
    and the scores that a fused attention's backward pass computes again in any case (Dao 2023: one more product of two,
    causal)."""
    attention = sequence_length * shape.heads * shape.head_size  # of one of two products, causal
    more = again.get("attention", 0) * 2 * attention
    half = shape.hidden_size * shape.intermediate_size
    products: dict[Remeasurement, int] = {"gate": half, "up": half}
    products |= {"qkv": math.prod(shape.linear("qkv")), "output": math.prod(shape.linear("output"))}
    more += sum(2 * again.get(layer, 0) * size for layer, size in products.items())
    return per_token(shape, sequence_length) + more + shape.layers * attention
