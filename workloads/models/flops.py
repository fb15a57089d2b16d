"""The floating-point operations of training a decoder, forward and backward, per token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from workloads.models import sizes
from workloads.models.shapes import LlamaShape

RecomputedLayer = Literal["qkv", "attention", "output", "gate", "up"]


def model_flops_per_token(shape: LlamaShape, sequence_length: float) -> float:
    """Return the FLOPs per token that the model needs, forward and backward, without recomputation.

    L(6D(2D + 2K + 3F) + 6SD) + 6DV with L the layers, D the hidden size, K kv heads x head size, F the intermediate
    size, S the sequence length and V the vocabulary. A linear layer costs six FLOPs per weight (Kaplan et al. 2020,
    table 1). Attention costs twelve per pair of token and earlier token and unit of the hidden size; it is causal, so
    half of the pairs are never computed and do not count.

    Args:
        sequence_length: of sequences that are packed with documents, `documents.attended_length`.
    """
    return sizes.model_flops_per_token(shape.planner_model, sequence_length)


def hardware_flops_per_token(
    shape: LlamaShape, sequence_length: float, recompute: Mapping[RecomputedLayer, float]
) -> float:
    """Return the FLOPs per token that the device executes, recomputation included.

    They are the model's FLOPs, those of the layers computed again in the backward pass, and those of the attention
    scores. A fused attention kernel always computes the scores again in its backward pass: one of the two causal matrix
    products (Dao 2023).

    Args:
        recompute: for each kind of layer, in how many blocks the backward pass computes it again.
    """
    attention = sequence_length * shape.heads * shape.head_size  # of one of the two matrix products, causal
    gate_or_up = shape.hidden_size * shape.intermediate_size
    weights: dict[RecomputedLayer, int] = {
        "qkv": math.prod(shape.linear("qkv")),
        "output": math.prod(shape.linear("output")),
        "gate": gate_or_up,
        "up": gate_or_up,
    }
    recomputed = recompute.get("attention", 0) * 2 * attention
    recomputed += sum(2 * recompute.get(layer, 0) * count for layer, count in weights.items())
    return model_flops_per_token(shape, sequence_length) + recomputed + shape.layers * attention
