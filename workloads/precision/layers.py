"""Linear layers in torchao's training recipes: convert them, and measure their speed and error, forward and backward.

A step includes the casts, which the measurement of a single GEMM leaves out.
"""

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import Support, support
from workloads.hardware.precisions import PRECISIONS
from workloads.instruments import device as devices
from workloads.instruments.timing import time_in_turns
from workloads.llama.model import swiglu
from workloads.models.model import MODELS
from workloads.precision import NOT_EMULATED, LinearParameters, formats, gemm_format, unsupported_layer_reason
from workloads.precision.gemm import time_against_bf16

# torchao.float8's names for recipes.
FLOAT8_RECIPES = {
    "fp8_tensorwise": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_rowwise_gw_hp": "rowwise_with_gw_hp",  # weight gradients in bf16
}


def apply_recipe(
    module: nn.Module, recipe: str, architecture: str, tokens: int, *, gathers_fp8: bool = False
) -> tuple[nn.Module, str]:
    """Convert the module's linear layers to a recipe, in place unless the module is itself a linear layer.

    The output layer of a model (`lm_head`) is not converted, as torchao advises. `tokens` is the number of rows in the
    layers' input. With fp8_tensorwise and `gathers_fp8`, FSDP casts weights before it gathers them.

    Returns the converted module and the reason why its speed is not ranked (emulated layers); "" if it is ranked.
    Raises Infeasible if torchao has no such layer for this device or the recipe does not support the layers' sizes, and
    RuntimeError if torchao left a layer unconverted.
    """
    state, reason = support(gemm_format(recipe), architecture)
    emulate = state is not Support.NATIVE
    unranked = f"emulated: {reason}" if emulate else ""
    if recipe == "bf16":
        return module, unranked
    multiple = PRECISIONS[recipe].multiple
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

        named = Float8LinearConfig.from_recipe_name(FLOAT8_RECIPES[recipe])
        config = replace(named, emulate=emulate, enable_fsdp_float8_all_gather=gathers_fp8)
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
    """Return the recipe in which an fp8, mxfp8 or nvfp4 layer computes; empty for a plain linear layer."""
    if type(layer) is nn.Linear:
        return ""
    if recipe := {"MXFP8Linear": "mxfp8", "NVFP4Linear": "nvfp4"}.get(type(layer).__name__):
        return recipe
    from torchao.float8 import Float8LinearConfig

    layer_config: Any = layer.config
    config = replace(layer_config, emulate=False, enable_fsdp_float8_all_gather=False)
    return next(key for key, name in FLOAT8_RECIPES.items() if Float8LinearConfig.from_recipe_name(name) == config)


def gathers_fp8(layer: nn.Module) -> bool:
    """Return whether FSDP casts the layer's weight to fp8 before gathering."""
    return bool(getattr(getattr(layer, "config", None), "enable_fsdp_float8_all_gather", False))


def fill_buffers(module: nn.Module, seed: int) -> None:
    """Fill the buffers of layers that were converted on the meta device, which are uninitialized after `to_empty`. The
    buffers of nvfp4 are the key of its stochastic rounding and the signs of its Hadamard transform."""
    layers: list[Any] = [layer for layer in module.modules() if type(layer).__name__ == "NVFP4Linear"]
    if not layers:
        return
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_wgrad_sign_vector

    for number, layer in enumerate(layers):
        signs = layer._rht_sign_vector
        signs.copy_(get_wgrad_sign_vector(len(signs), device=signs.device, dtype=signs.dtype))
        layer._sr_seed.fill_(seed + number)
        layer._refresh_rht_sign_vector_tuple()


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(*self.gate_up(x).chunk(2, dim=-1)))


def measure(parameters: LinearParameters, rank: Rank) -> Measurement:
    """Time the layers' forward and backward passes in the recipe and in bf16, interleaved.

    Errors of the output and of both gradients are relative to the same layers in fp32.

    Raises Infeasible if torchao is not installed, or has no such layers for this device or these sizes.
    """
    formats.require_torchao()
    device, recipe, tokens = devices.device_of(rank), parameters.recipe, parameters.tokens
    architecture, shape = devices.architecture(device), MODELS[parameters.model]
    torch.compiler.reset()
    devices.release_memory(device)
    torch.manual_seed(parameters.seed)
    in_features, out_features = shape.linear("qkv") if parameters.part == "qkv" else (shape.hidden_size,) * 2
    with device:
        exact: nn.Module = (
            nn.Sequential(nn.Linear(in_features, out_features, bias=False))
            if parameters.part == "qkv"
            else SwiGLU(shape.hidden_size, shape.intermediate_size)
        )
        x = torch.randn(tokens, shape.hidden_size, dtype=torch.bfloat16)
    baseline = copy.deepcopy(exact).bfloat16()
    converted, unranked = apply_recipe(copy.deepcopy(baseline), recipe, architecture, tokens)
    d_out = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)
    metrics = _errors_db(exact, converted, x, d_out)
    del exact
    measured = Measurement({}, ())
    if not unranked:
        modules = [converted] if recipe == "bf16" else [converted, baseline]
        steps = [_training_step(torch.compile(module, dynamic=False), x, d_out) for module in modules]
        measured = time_against_bf16(steps, device, parameters)
        metrics |= measured.metrics
        if recipe != "bf16":
            metrics["predicted_speedup"] = predict_speedup(parameters, baseline, architecture, device)
    return replace(
        measured,
        executed=dict(vars(parameters)),
        unranked=unranked,
        flops_per_step=6.0 * tokens * sum(layer.weight.numel() for layer in _linear_layers(baseline)),
        matrix_dtype="bf16" if recipe == "bf16" else "fp8",
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | {"layers": ", ".join(sorted({type(module).__name__ for module in converted.modules()}))},
    )


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def _training_step(module: Callable[..., torch.Tensor], x: torch.Tensor, d_out: torch.Tensor) -> Callable[[], None]:
    x = x.detach().requires_grad_()

    def step() -> None:
        x.grad = None
        for parameter in module.parameters():  # type: ignore[attr-defined]
            parameter.grad = None
        module(x).backward(d_out)

    return step


def _errors_db(exact: nn.Module, converted: nn.Module, x: torch.Tensor, d_out: torch.Tensor) -> dict[str, float]:
    results = []
    for module, dtype in ((exact, torch.float32), (converted, torch.bfloat16)):
        leaf = x.detach().to(dtype).requires_grad_()
        out = module(leaf)
        out.backward(d_out.to(dtype))
        weight = next(iter(module.parameters()))
        assert leaf.grad is not None and weight.grad is not None
        results.append((out.detach(), leaf.grad, weight.grad))
        module.zero_grad(set_to_none=True)
    names = ("sqnr_db", "sqnr_input_gradient_db", "sqnr_weight_gradient_db")
    return {name: formats.sqnr_db(expected, actual) for name, expected, actual in zip(names, *results, strict=True)}


def predict_speedup(parameters: LinearParameters, module: nn.Module, architecture: str, device: torch.device) -> float:
    """Return the speed-up over bf16 that a roofline of this device's rates predicts (Williams et al. 2009).

    This call measures the rates. A step takes the time of its GEMMs on the matrix units plus the time of its casts at
    the memory bandwidth, without overlap. The forward pass casts each layer's input and weight. The backward pass casts
    the output's gradient, and then the input, the weight and that gradient along the other dimension. Each cast reads
    two bytes per number and writes one.

    Each gradient GEMM is assumed to take as long as the forward GEMM. The prediction leaves out the extra read that
    determines a scale before its cast.
    """
    low_format = gemm_format(parameters.recipe)
    # With weight gradients in bf16, one of the three GEMMs stays in bf16, and neither of its operands is cast.
    bf16_gemms, casts = (1, (1, 2, 1)) if parameters.recipe == "fp8_rowwise_gw_hp" else (0, (2, 2, 2))
    bf16_s = gemms_s = moved_bytes = 0.0

    def medians_s(*steps: Callable[[], object]) -> list[float]:
        return [statistics.median(times_s) for times_s in time_in_turns(steps, device, warmup=2, repeats=10)]

    for layer in _linear_layers(module):
        out_features, in_features = layer.weight.shape
        x = torch.randn(parameters.tokens, in_features, device=device, dtype=torch.bfloat16)
        weight = layer.weight.detach()
        out = torch.empty(parameters.tokens, out_features, device=device, dtype=torch.bfloat16)
        low_x = formats.convert(low_format, x, "activation", architecture)
        low_weight = formats.convert(low_format, weight, "weight", architecture)
        gemm_s, bf16_gemm_s = medians_s(
            formats.native_gemm(low_format, low_x, low_weight),
            lambda x=x, weight=weight, out=out: torch.mm(x, weight.t(), out=out),  # type: ignore[misc]
        )
        gemms_s += (3 - bf16_gemms) * gemm_s + bf16_gemms * bf16_gemm_s
        bf16_s += 3 * bf16_gemm_s
        moved_bytes += sum(3.0 * count * matrix.numel() for count, matrix in zip(casts, (x, weight, out), strict=True))
    # The memory bandwidth of a copy; both reads and writes count.
    source = torch.empty(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (copy_s,) = medians_s(lambda: target.copy_(source))
    return bf16_s / (gemms_s + moved_bytes / (2 * source.numel() / copy_s))
