"""Modules whose linear layers compute in a training recipe of torchao's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from workloads.api.contract import Infeasible
from workloads.api.recipes import Support, support

# A training recipe, what its products are as formats, and what its layers' sizes have to be multiples of.
FORMATS = {
    "fp8_tensorwise": ("fp8_tensorwise", 16),
    "fp8_rowwise": ("fp8_rowwise", 16),
    "fp8_rowwise_gw_hp": ("fp8_rowwise", 16),
    "fp8_blockwise": ("fp8_blockwise", 128),
    "mxfp8": ("mxfp8", 32),
}
FLOAT8 = {
    "fp8_tensorwise": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_rowwise_gw_hp": "rowwise_with_gw_hp",  # weight gradients in bf16
}


def with_recipe(module: nn.Module, recipe: str, architecture: str, tokens: int) -> tuple[nn.Module, str]:
    """The module with its linear layers in a recipe, and why they are emulated, empty where they are native.

    The output layer of a model (`head`) stays as it is, as torchao advises. Raises Infeasible where torchao has no
    such layer for this device, or the sizes do not fit its blocks.
    """
    if recipe == "bf16":
        state, why = support("bf16", architecture)
        return module, "" if state is Support.NATIVE else f"emulated: {why}"
    name, multiple = FORMATS[recipe]
    state, why = support(name, architecture)
    emulated = f"emulated: {why}" if state is not Support.NATIVE else ""
    sizes = {size for m in module.modules() if isinstance(m, nn.Linear) for size in m.weight.shape} | {tokens}
    if unfit := sorted(size for size in sizes if size % multiple):
        raise Infeasible(f"{recipe} needs inputs, outputs and tokens in multiples of {multiple}, not {unfit[0]}")
    if recipe == "fp8_blockwise" and emulated:
        raise Infeasible(f"torchao's block-wise fp8 layer has no emulation, and {why}")
    wanted = [n for n, m in module.named_modules() if _wanted(m, n)]
    if recipe in FLOAT8:
        converted = _float8(module, FLOAT8[recipe], bool(emulated))
    else:
        converted = _blockwise(module) if recipe == "fp8_blockwise" else _mxfp8(module, bool(emulated))
    after = dict(converted.named_modules())
    if plain := [name for name in wanted if type(after[name]) is nn.Linear]:
        raise RuntimeError(f"torchao has left {plain[0]} as it was: a figure of it would be one of bf16")
    return converted, emulated


def _wanted(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] != "lm_head"


def _float8(module: nn.Module, recipe: str, emulate: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(module, config=config, module_filter_fn=_wanted)


def float8_recipe(layer: nn.Module) -> str:
    """Which of `FLOAT8` a layer computes in; empty where it is a plain one."""
    if type(layer) is nn.Linear:
        return ""
    from torchao.float8 import Float8LinearConfig

    config: Any = layer.config
    found = dataclasses.replace(config, emulate=False)
    return next(name for name, recipe in FLOAT8.items() if Float8LinearConfig.from_recipe_name(recipe) == found)


def _swapped(module: nn.Module, make: Any) -> nn.Module:
    from torchao.float8.float8_linear_utils import swap_linear_layers

    return swap_linear_layers(module, make, module_filter_fn=_wanted)


def _blockwise(module: nn.Module) -> nn.Module:
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

    return _swapped(module, Float8BlockwiseLinear.from_float)


def _mxfp8(module: nn.Module, emulate: bool) -> nn.Module:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common import KernelPreference

    kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO

    def convert(layer: nn.Linear) -> nn.Module:
        with torch.device("meta"):
            made = MXFP8Linear(
                layer.in_features, layer.out_features, bias=layer.bias is not None, kernel_preference=kernels
            )
        made.weight, made.bias = layer.weight, layer.bias
        return made

    return _swapped(module, convert)
