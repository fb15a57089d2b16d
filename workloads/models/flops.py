"""The FLOPs per token of training a decoder, and the lengths of the documents in its sequences."""

import math
from collections.abc import Mapping
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal

from workloads.models.model import Model

RecomputedLayer = Literal["qkv", "attention", "output", "gate", "up"]


def document_lengths(sequence_length: int, document_tokens: int) -> tuple[int, ...]:
    """Return the lengths of the documents in a sequence, in ascending order; 0 `document_tokens` means one document.

    Documents are packed into sequences, and tokens attend only to earlier tokens of their own document. Lengths are
    quantiles of the exponential distribution with mean `document_tokens`: most documents are short, but most tokens are
    in long ones. Every sequence has the same lengths in a different order, so all ranks and steps do the same work.
    """
    count = max(1, round(sequence_length / document_tokens)) if document_tokens else 1
    quantiles = [-math.log(1 - (number + 0.5) / count) for number in range(count)]
    shared_tokens = sequence_length - count  # each document has at least one token
    ends = [0, *(round(shared_tokens * total / sum(quantiles)) for total in accumulate(quantiles))]
    return tuple(sorted(1 + stop - start for start, stop in pairwise(ends)))


def attended_length(sequence_length: int, document_tokens: int) -> float:
    """Return the length of a single-document sequence with the same attention cost per token."""
    return sum(length**2 for length in document_lengths(sequence_length, document_tokens)) / sequence_length


@cache
def model_flops_per_token(model: Model, sequence_length: float) -> float:
    """Return the FLOPs per token that the model needs, forward and backward, without recomputation.

    For a dense model, this is L(6D(2D + 2K + 3F) + 6SD) + 6DV with L layers, hidden size D, K = kv heads x head size,
    intermediate size F, sequence length S and vocabulary V. A linear layer costs six FLOPs per weight (Kaplan et al.
    2020, table 1). Attention costs twelve FLOPs per pair of tokens and unit of the hidden size. Attention is causal, so
    half of the pairs are never computed and do not count. Routers are counted, and so are indexers, which have their
    own loss, and the mixing of streams; multi-token prediction is not. For sequences packed with documents, pass the
    `attended_length`.
    """
    total = 6.0 * (model.active_parameters + 2 * model.layers * model.streams * model.residual_features)
    for layer in range(model.layers):
        match model.mixer(layer):
            case "attention":
                attended = model.attended_tokens(layer, sequence_length)
                total += 6 * attended * model.heads * (model.head_size + model.value_features)
                total += 3 * sequence_length * model.index_features(layer)
            case "linear":  # updating and reading an element of the state takes two FLOPs each
                total += 12 * model.linear_state
    return total


def hardware_flops_per_token(model: Model, sequence_length: float, recompute: Mapping[RecomputedLayer, float]) -> float:
    """Return the FLOPs per token that the device executes, including recomputation.

    The total adds the recomputation of layers and attention scores in the backward pass to the model's FLOPs. A fused
    attention kernel always recomputes the scores, one of the two causal GEMMs, in its backward pass (Dao 2023).
    `recompute` gives, for each kind of layer, the number of blocks in which it is recomputed.
    """
    attended = sum(model.attended_tokens(layer, sequence_length) for layer in range(model.layers)) / model.layers
    attention = 2 * attended * model.heads * model.head_size  # of one of the two GEMMs, mean over blocks
    # The mean over blocks, for the experts that a token goes through, without the router.
    router = model.hidden_size * model.router_outputs
    mlps = sum(model.active_mlp_weights(n) - model.has_experts(n) * router for n in range(model.layers))
    gate_or_up = mlps / model.mlp_matrices / model.layers
    weights: dict[RecomputedLayer, float] = {
        "qkv": math.prod(model.linear("qkv")),
        "output": math.prod(model.linear("output")),
        "gate": gate_or_up,
        "up": gate_or_up,
    }
    recomputed = recompute.get("attention", 0) * 2 * attention
    recomputed += sum(2 * recompute.get(layer, 0) * count for layer, count in weights.items())
    return model_flops_per_token(model, sequence_length) + recomputed + model.layers * attention
