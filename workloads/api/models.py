"""The FLOPs of the catalogue's models, for the driver, which imports nothing else of them."""

from __future__ import annotations


def flops_per_token(model: str, sequence_length: int) -> float:
    """Return the FLOPs per token of training a model, forward and backward; 0 for a model that is not known."""
    from workloads.llama.flops import model_flops_per_token  # on use, as the registry imports workloads
    from workloads.llama.shapes import MODELS

    return model_flops_per_token(MODELS[model], sequence_length) if model in MODELS else 0.0
