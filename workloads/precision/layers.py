"""Modules whose linear layers compute in one of torchao's training recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workloads.api.contract import Infeasible
from workloads.api.recipes import Support, support
from workloads.estimator.precisions import find_precision
from workloads.precision import NOT_EMULATED, gemm_format, unsupported_layer_reason

# The names in torchao.float8 of the recipes that it converts.
FLOAT8_RECIPES = {
    "fp8_tensorwise": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_rowwise_gw_hp": "rowwise_with_gw_hp",  # weight gradients in bf16
}


def apply_recipe(
    module: nn.Module, recipe: str, architecture: str, tokens: int, *, gathers_fp8: bool = False
) -> tuple[nn.Module, str]:
    """Convert the module's linear layers to a recipe: in place where it is not a linear layer itself.

    The output layer of a model (`lm_head`) is not converted, as torchao advises. `tokens` are the rows of the layers'
    input. With fp8_tensorwise and `gathers_fp8`, FSDP casts weights before it gathers them.

    Returns:
        The converted module, and why its speed is not ranked: the layers are emulated. Empty where they are native.

    Raises:
        Infeasible: torchao has no such layer for this device, or the recipe does not support the layers' sizes.
        RuntimeError: torchao left a layer unconverted.
    """
    state, reason = support(gemm_format(recipe), architecture)
    emulate = state is not Support.NATIVE
    unranked = f"emulated: {reason}" if emulate else ""
    if recipe == "bf16":
        return module, unranked
    multiple = find_precision(recipe).multiple
    sizes = {size for layer in module.modules() if isinstance(layer, nn.Linear) for size in layer.weight.shape}
    if unfit_sizes := sorted(size for size in sizes | {tokens} if size % multiple):
        raise Infeasible(f"{recipe} needs inputs, outputs and tokens in multiples of {multiple}, not {unfit_sizes[0]}")
    if unsupported := unsupported_layer_reason(recipe, architecture):
        raise Infeasible(unsupported)
    if recipe in NOT_EMULATED and emulate:
        raise Infeasible(f"torchao has no emulation of its {recipe} layer, and {reason}")
    names = [name for name, layer in module.named_modules() if _is_converted(layer, name)]
    if recipe in FLOAT8_RECIPES:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(FLOAT8_RECIPES[recipe]),
            emulate=emulate,
            enable_fsdp_float8_all_gather=gathers_fp8,
        )
        converted = convert_to_float8_training(module, config=config, module_filter_fn=_is_converted)
    else:
        from torchao.float8.float8_linear_utils import swap_linear_layers

        converted = swap_linear_layers(module, _layer_converter(recipe, emulate), module_filter_fn=_is_converted)
    layers = dict(converted.named_modules())
    if unconverted := [name for name in names if type(layers[name]) is nn.Linear]:
        raise RuntimeError(f"torchao did not convert the layer {unconverted[0]} to {recipe}: it would compute in bf16")
    return converted, unranked


def _is_converted(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] != "lm_head"


def _layer_converter(recipe: str, emulate: bool) -> Callable[[nn.Linear], nn.Module]:
    """Return the function that makes a layer of fp8_blockwise, nvfp4 or mxfp8 of a linear one."""
    if recipe == "fp8_blockwise":
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

        return Float8BlockwiseLinear.from_float
    if recipe == "nvfp4":
        from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear

        return NVFP4Linear.from_linear
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common import KernelPreference

    preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO

    def convert(layer: nn.Linear) -> nn.Module:
        with torch.device("meta"):
            converted = MXFP8Linear(
                layer.in_features, layer.out_features, bias=layer.bias is not None, kernel_preference=preference
            )
        converted.weight, converted.bias = layer.weight, layer.bias
        return converted

    return convert


def read_recipe(layer: nn.Module) -> str:
    """Return the recipe that a layer of fp8, mxfp8 or nvfp4 computes in; empty for a plain linear layer."""
    if type(layer) is nn.Linear:
        return ""
    if recipe := {"MXFP8Linear": "mxfp8", "NVFP4Linear": "nvfp4"}.get(type(layer).__name__):
        return recipe
    from torchao.float8 import Float8LinearConfig

    layer_config: Any = layer.config
    config = dataclasses.replace(layer_config, emulate=False, enable_fsdp_float8_all_gather=False)
    return next(key for key, name in FLOAT8_RECIPES.items() if Float8LinearConfig.from_recipe_name(name) == config)


def gathers_fp8(layer: nn.Module) -> bool:
    """Return whether FSDP casts the layer's weight to fp8 before it gathers it."""
    config = getattr(layer, "config", None)
    return bool(getattr(config, "enable_fsdp_float8_all_gather", False))


def fill_buffers(module: nn.Module, seed: int) -> None:
    """Fill the buffers of layers that were converted on the meta device, which hold nothing after `to_empty`.

    Those of nvfp4 are the key of its stochastic rounding and the signs of its Hadamard transform.
    """
    layers: list[Any] = [layer for layer in module.modules() if type(layer).__name__ == "NVFP4Linear"]
    if not layers:
        return
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_wgrad_sign_vector

    for number, layer in enumerate(layers):
        signs = layer._rht_sign_vector
        signs.copy_(get_wgrad_sign_vector(len(signs), device=signs.device, dtype=signs.dtype))
        layer._sr_seed.fill_(seed + number)
        layer._refresh_rht_sign_vector_tuple()
