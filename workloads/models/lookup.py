"""The FLOPs of the catalogue's models, for the driver, which imports nothing else of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

# The sizes of a model that products depend on.
SIZES = (
    "layers",
    "hidden_size",
    "heads",
    "kv_heads",
    "head_size",
    "intermediate_size",
    "vocabulary",
    "tied",
    "qkv_bias",
)


def flops_per_token(model: str, sequence_length: int) -> float:
    """Return the FLOPs per token of training a model, forward and backward; 0 for a model that is not known."""
    from workloads.models.flops import model_flops_per_token  # on use, as the registry imports workloads
    from workloads.models.shapes import MODELS

    return model_flops_per_token(MODELS[model], sequence_length) if model in MODELS else 0.0


def find_shape_name(sizes: Mapping[str, object]) -> str | None:
    """Return the name of the catalogue's model with these sizes, by the names of `LlamaShape`; None for no model.

    Names that `LlamaShape` lacks have to be at what every model of the catalogue has: no experts, rotary positions.
    """
    from workloads.models.shapes import MODELS

    return next((name for name in MODELS if read_shape(name) == _without_defaults(sizes)), None)


def read_shape(name: str) -> dict[str, Any]:
    """Return the sizes of a model of the catalogue that products depend on; empty for a model that is not known."""
    from workloads.models.shapes import MODELS

    shape = MODELS.get(name)
    return {size: getattr(shape, size) for size in SIZES} if shape else {}


def _without_defaults(sizes: Mapping[str, object]) -> dict[str, object]:
    """Return the sizes without those on which no product depends, where they are as in every model of the catalogue."""
    from workloads.layouts.job import Model

    fixed = {field.name: field.default for field in fields(Model) if field.name not in SIZES}
    return {name: value for name, value in sizes.items() if name not in fixed or value != fixed[name]}
