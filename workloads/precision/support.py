"""Which formats a device multiplies natively, as text for a plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from workloads.api.recipes import Support, support, unsupported_rate_reason

NO_EMULATION = "fp8_blockwise"  # torchao emulates the products of its layer in no other format
# torchao 0.18's layer casts along columns with a CUDA kernel, and orders scales for NVIDIA's units.
NVIDIA_LAYER = "mxfp8"


OF_PRODUCTS = "the error of an emulated one is measured, its speed is not"
OF_LAYERS = f"{OF_PRODUCTS}; an unsupported one is refused"
OF_CASTS = "a cast is timed on any device: this is about the products that take its result"


def gemm_format(recipe: str) -> str:
    """Return the number format of a training recipe's products in low precision."""
    return recipe.removesuffix("_gw_hp")  # weight gradients in bf16


def unsupported_layer_reason(recipe: str, architecture: str) -> str:
    """Return why torchao has no layer for a recipe that the device's units take; empty if it has."""
    if recipe == NVIDIA_LAYER and architecture.startswith("gfx") and support(recipe, architecture)[0] is Support.NATIVE:
        return f"torchao's {recipe} layer is for NVIDIA GPUs: its casts are CUDA kernels"
    return ""


def unsupported_layer_rate_reason(recipe: str, architecture: str) -> str:
    """Return why a layer's rate is not measured on this device; empty if units and torchao's layer are there for it."""
    if reason := unsupported_rate_reason(recipe, architecture):
        return reason
    reason = unsupported_layer_reason(recipe, architecture)
    return f"unsupported on this device: {reason}" if reason else ""


def describe_support(recipes: Sequence[str], architecture: str, note: str) -> str:
    """Return a line for each recipe: native, emulated or unsupported on this device, and why.

    Args:
        architecture: as in `workloads.api.recipes`.
        note: the last line: `OF_PRODUCTS`, `OF_LAYERS` or `OF_CASTS`.
    """
    if not architecture:
        return "the architecture of the device is unknown, and so is what it multiplies natively"
    width = max(map(len, recipes))
    lines = [f"on {architecture.split()[0]}, the matrix units take:"]
    for recipe in recipes:
        level, reason = support(gemm_format(recipe), architecture)
        if note == OF_LAYERS and recipe == NO_EMULATION and level is Support.EMULATED:
            level, reason = Support.UNSUPPORTED, f"{reason}, and torchao has no emulation of its layer"
        if note == OF_LAYERS and (unsupported := unsupported_layer_reason(recipe, architecture)):
            level, reason = Support.UNSUPPORTED, unsupported
        lines.append(f"  {recipe:{width}}  {level.value}{': ' if reason else ''}{reason}")
    return "\n".join([*lines, note])
