"""How many weights a model has, and where."""

from __future__ import annotations

from functools import cache

from workloads.layouts.job import Model


def has_experts(model: Model, layer: int) -> bool:
    return model.experts > 0 and layer >= model.dense_layers


def attention_weights(model: Model) -> int:
    """Return the weights of the projections to queries, keys and values, and of the output."""
    return model.hidden_size * model.head_size * 2 * (model.heads + model.kv_heads)


def mlp_weights(model: Model, intermediate_size: int) -> int:
    return model.mlp_matrices * model.hidden_size * intermediate_size


def expert_weights(model: Model) -> int:
    """Return the weights of all routed experts of a block."""
    return model.experts * mlp_weights(model, model.expert_intermediate_size)


def shared_weights(model: Model, layer: int) -> int:
    """Return the weights of a block that are not those of routed experts."""
    norms = 2 * model.hidden_size
    if not has_experts(model, layer):
        return attention_weights(model) + mlp_weights(model, model.intermediate_size) + norms
    router = model.hidden_size * model.experts
    shared = mlp_weights(model, model.shared_expert_intermediate_size)
    return attention_weights(model) + shared + router + norms


def block_weights(model: Model, layer: int) -> int:
    return shared_weights(model, layer) + (expert_weights(model) if has_experts(model, layer) else 0)


def embedding_weights(model: Model) -> int:
    return (model.vocabulary + model.max_positions) * model.hidden_size


def head_weights(model: Model) -> int:
    """Return the weights of the output layer, also where it shares the embedding's."""
    return model.vocabulary * model.hidden_size


@cache
def parameters(model: Model) -> int:
    """Return the number of weights, without biases."""
    blocks = sum(block_weights(model, layer) for layer in range(model.layers))
    head = 0 if model.tied else head_weights(model)
    return blocks + embedding_weights(model) + head + model.hidden_size


def layer_kind(model: Model, layer: int) -> tuple[bool, bool]:
    """Return what distinguishes layers: experts, and attention to the whole sequence."""
    return has_experts(model, layer), attends_to_all(model, layer)


@cache
def layer_kinds(model: Model) -> dict[tuple[bool, bool], int]:
    """Return one layer of each kind."""
    return {layer_kind(model, layer): layer for layer in range(model.layers)}


def attends_to_all(model: Model, layer: int) -> bool:
    every = model.window_every
    return not model.window or bool(every and layer % every == every - 1)


def attended_tokens(model: Model, layer: int, sequence_length: float) -> float:
    """Return how many earlier tokens a token attends to, at the mean over a sequence."""
    full = sequence_length / 2
    if attends_to_all(model, layer):
        return full
    window = min(model.window, sequence_length)
    return window - window * window / (2 * sequence_length)


@cache
def model_flops_per_token(model: Model, sequence_length: float) -> float:
    """Return the FLOPs per token, forward and backward, by the causal convention (`workloads.models.flops`)."""
    total = 6.0 * head_weights(model)
    for layer in range(model.layers):
        total += 6 * (attention_weights(model) + active_mlp_weights(model, layer))
        total += 12 * attended_tokens(model, layer, sequence_length) * model.heads * model.head_size
    return total


def active_mlp_weights(model: Model, layer: int) -> int:
    """Return the weights of a block's MLP, or of the experts that a token goes through."""
    if not has_experts(model, layer):
        return mlp_weights(model, model.intermediate_size)
    routed = model.experts_per_token * mlp_weights(model, model.expert_intermediate_size)
    return routed + mlp_weights(model, model.shared_expert_intermediate_size)
