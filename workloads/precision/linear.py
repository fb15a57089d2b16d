"""Linear layers in training recipes, forward and backward: GEMMs with the casts that a GEMM alone does not show."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
from torch import nn

from workloads.api.contract import Energy, Measurement, Rank
from workloads.instruments import device as devices
from workloads.instruments.timing import time_in_turns
from workloads.llama.model import swiglu
from workloads.models.model import MODELS
from workloads.precision import LinearParameters, formats, gemm_format, layers
from workloads.precision.gemm import time_against_bf16


class SwiGLU(nn.Module):
    """The MLP of a Llama block."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(*self.gate_up(x).chunk(2, dim=-1)))


def measure(parameters: LinearParameters, rank: Rank) -> Measurement:
    """Time forward and backward of the layers in the recipe and in bf16 in turns.

    The errors of the output and of both gradients are against the same layers in fp32. `predicted_speedup` is the
    prediction of `predict_speedup`.

    Raises:
        Infeasible: torchao is not installed, or has no such layers for this device or these sizes.
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
    converted, unranked = layers.apply_recipe(copy.deepcopy(baseline), recipe, architecture, tokens)
    d_out = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)
    metrics = _errors_db(exact, converted, x, d_out)
    del exact
    energy: Energy | None = None
    times_s: tuple[tuple[float, ...], ...] = ((),)  # of the recipe, and of bf16 unless it is the recipe
    if not unranked:
        modules = [converted] if recipe == "bf16" else [converted, baseline]
        steps = [_training_step(torch.compile(module, dynamic=False), x, d_out) for module in modules]
        times_s, energy, gpu_metrics = time_against_bf16(steps, device, parameters)
        metrics |= gpu_metrics
        if recipe != "bf16":
            metrics["predicted_speedup"] = predict_speedup(parameters, baseline, architecture, device)
    return Measurement(
        executed={name: getattr(parameters, name) for name in parameters.__dataclass_fields__},
        step_times_s=times_s[0],
        baseline_step_times_s=times_s[1] if len(times_s) > 1 else (),
        unranked=unranked,
        flops_per_step=6.0 * tokens * sum(layer.weight.numel() for layer in _linear_layers(baseline)),
        matrix_dtype="bf16" if recipe == "bf16" else "fp8",
        energy=energy,
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | {"layers": ", ".join(sorted({type(module).__name__ for module in converted.modules()}))},
    )


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def _training_step(module: Callable[..., torch.Tensor], x: torch.Tensor, d_out: torch.Tensor) -> Callable[[], None]:
    """Return a step that computes the gradients of the weights and of x."""
    x = x.detach().requires_grad_()

    def step() -> None:
        x.grad = None
        for parameter in module.parameters():  # type: ignore[attr-defined]
            parameter.grad = None
        module(x).backward(d_out)

    return step


def _errors_db(exact: nn.Module, converted: nn.Module, x: torch.Tensor, d_out: torch.Tensor) -> dict[str, float]:
    """Return the SQNR in dB of the output, the input's gradient and the first layer's weight gradient."""
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


def predict_speedup(
    parameters: LinearParameters, baseline: nn.Module, architecture: str, device: torch.device
) -> float:
    """Return the speed-up over bf16 that a roofline of this device's own rates predicts (Williams et al. 2009).

    The rates are measured by this call. A step takes the time of its GEMMs on the matrix units plus that of its casts
    at the memory's bandwidth; the two do not overlap. The forward pass casts each layer's input and weight. The
    backward pass casts the output's gradient, and all three along the other dimension. Each cast reads two bytes and
    writes one for every number.

    The gradients' GEMMs are taken to last as long as the forward one. The reads that find a scale before its cast are
    not counted.
    """
    low_format = gemm_format(parameters.recipe)
    # With weight gradients in bf16, one GEMM of three stays in bf16 and neither of its operands is cast.
    bf16_gemms, casts = (1, (1, 2, 1)) if parameters.recipe == "fp8_rowwise_gw_hp" else (0, (2, 2, 2))
    bf16_s = gemms_s = moved_bytes = 0.0

    def medians_s(*steps: Callable[[], object]) -> list[float]:
        return [statistics.median(times_s) for times_s in time_in_turns(steps, device, warmup=2, repeats=10)]

    for layer in _linear_layers(baseline):
        out_features, in_features = layer.weight.shape
        x = torch.randn(parameters.tokens, in_features, device=device, dtype=torch.bfloat16)
        weight = layer.weight.detach()
        out = torch.empty(parameters.tokens, out_features, device=device, dtype=torch.bfloat16)
        operands = [
            formats.convert(low_format, matrix, role, architecture)
            for matrix, role in ((x, "activation"), (weight, "weight"))
        ]
        gemm_s, bf16_gemm_s = medians_s(
            formats.native_gemm(low_format, *operands),
            lambda x=x, weight=weight, out=out: torch.mm(x, weight.t(), out=out),  # type: ignore[misc]
        )
        gemms_s += (3 - bf16_gemms) * gemm_s + bf16_gemms * bf16_gemm_s
        bf16_s += 3 * bf16_gemm_s
        moved_bytes += sum(3.0 * count * matrix.numel() for count, matrix in zip(casts, (x, weight, out), strict=True))
    # The memory's bandwidth in a copy; reads and writes both count.
    source = torch.empty(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (copy_s,) = medians_s(lambda: target.copy_(source))
    return bf16_s / (gemms_s + moved_bytes / (2 * source.numel() / copy_s))
