"""Linear layers in fewer bits, forward and backward, with the casts that the products alone do not show."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
from torch import nn

from workloads import device as devices
from workloads.api.contract import Measurement, Rank
from workloads.llama.model import swiglu
from workloads.llama.shapes import MODELS
from workloads.precision import LinearParameters, formats, layers
from workloads.telemetry import watching
from workloads.timing import time_in_turns


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

    The errors are of the output and of both gradients against the same layers in fp32. `predicted_speedup` is what a
    roofline of this device's own rates says: see `predict`.
    """
    formats.require_torchao()
    device = devices.of(rank)
    architecture = devices.architecture(device)
    torch.compiler.reset()
    devices.fresh(device)
    torch.manual_seed(parameters.seed)
    shape = MODELS[parameters.model]
    with device:
        exact = (
            SwiGLU(shape.hidden_size, shape.intermediate_size)
            if parameters.part == "mlp"
            else nn.Sequential(nn.Linear(*shape.linear("qkv"), bias=False))
        )
        x = torch.randn(parameters.tokens, shape.hidden_size, dtype=torch.bfloat16)
    plain = copy.deepcopy(exact).bfloat16()
    low, emulated = layers.with_recipe(copy.deepcopy(plain), parameters.recipe, architecture, parameters.tokens)
    out_width = shape.hidden_size if parameters.part == "mlp" else shape.linear("qkv")[1]
    d_out = torch.randn(parameters.tokens, out_width, device=device, dtype=torch.bfloat16)
    errors = _errors(exact, low, x, d_out)
    flops = 6.0 * parameters.tokens * sum(m.weight.numel() for m in plain.modules() if isinstance(m, nn.Linear))
    del exact
    times_s: tuple[float, ...] = ()
    baseline_s: tuple[float, ...] = ()
    metrics = errors
    if not emulated:
        # The weights of the layers are trained, so their gradients are taken, and the input's.
        steps = [_step(torch.compile(module, dynamic=False), x, d_out) for module in (low, plain)]
        with watching(device) as watch:
            turns = time_in_turns(
                steps if parameters.recipe != "bf16" else steps[:1],
                device,
                warmup=parameters.warmup,
                repeats=parameters.repeats,
            )
        times_s, baseline_s = turns[0], turns[1] if len(turns) > 1 else ()
        metrics = metrics | watch.metrics()
        if parameters.recipe != "bf16":
            metrics["predicted_speedup"] = predict(parameters, plain, architecture, device)
    return Measurement(
        executed={name: getattr(parameters, name) for name in parameters.__dataclass_fields__},
        step_times_s=times_s,
        baseline_step_times_s=baseline_s,
        unranked=emulated,
        flops_per_step=flops,
        matrix_dtype="bf16" if parameters.recipe == "bf16" else "fp8",
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | {"layers": ", ".join(sorted({type(m).__name__ for m in low.modules()}))},
    )


def _step(module: Callable[..., torch.Tensor], x: torch.Tensor, d_out: torch.Tensor) -> Callable[[], None]:
    x = x.detach().requires_grad_()

    def step() -> None:
        x.grad = None
        for parameter in module.parameters():  # type: ignore[attr-defined]
            parameter.grad = None
        module(x).backward(d_out)

    return step


def _errors(exact: nn.Module, low: nn.Module, x: torch.Tensor, d_out: torch.Tensor) -> dict[str, float]:
    """SQNR in dB of the output, the input's gradient and the first layer's weight gradient."""
    found = []
    for module, dtype in ((exact, torch.float32), (low, torch.bfloat16)):
        leaf = x.detach().to(dtype).requires_grad_()
        out = module(leaf)
        out.backward(d_out.to(dtype))
        weight = next(iter(module.parameters()))
        assert leaf.grad is not None and weight.grad is not None
        found.append((out.detach(), leaf.grad, weight.grad))
        module.zero_grad(set_to_none=True)
    names = ("sqnr_db", "sqnr_input_gradient_db", "sqnr_weight_gradient_db")
    return {name: formats.sqnr_db(e, f) for name, e, f in zip(names, *found, strict=True)}


def predict(parameters: LinearParameters, plain: nn.Module, architecture: str, device: torch.device) -> float:
    """The speed-up over bf16 by a roofline of rates measured here and now: products by the matrix units, and beside
    them, not under them, the casts by the memory.

    Forward each layer casts its input and its weight, backward the output's gradient and, along the other dimension,
    all three: each reads two bytes and writes one for every number (Williams et al. 2009 for the model). The gradients'
    products are taken to last as long as the forward one; what finding a scale reads beforehand is not counted.
    """
    name, _ = layers.FORMATS[parameters.recipe]
    bf16_s = low_s = moved = 0.0
    for layer in [m for m in plain.modules() if isinstance(m, nn.Linear)]:
        n, k = layer.weight.shape
        a = torch.randn(parameters.tokens, k, device=device, dtype=torch.bfloat16)
        b, c = layer.weight.detach(), torch.empty(parameters.tokens, n, device=device, dtype=torch.bfloat16)
        pair = [formats.convert(name, m, role, architecture) for m, role in ((a, "activation"), (b, "weight"))]
        multiply = formats.native_product(name, *pair)
        times = time_in_turns(
            [multiply, lambda a=a, b=b, c=c: torch.mm(a, b.t(), out=c)],  # type: ignore[misc]
            device,
            warmup=2,
            repeats=10,
        )
        one_low_s, one_bf16_s = (statistics.median(each) for each in times)
        in_bf16 = 1 if parameters.recipe == "fp8_rowwise_gw_hp" else 0
        low_s += (3 - in_bf16) * one_low_s + in_bf16 * one_bf16_s
        bf16_s += 3 * one_bf16_s
        # With weight gradients in bf16 neither input nor output gradient is cast for them.
        casts = (1, 2, 1) if in_bf16 else (2, 2, 2)
        moved += sum(3.0 * count * t.numel() for count, t in zip(casts, (a, b, c), strict=True))
    return bf16_s / (low_s + moved / _copy_bytes_per_s(device))


def _copy_bytes_per_s(device: torch.device) -> float:
    """What the memory moves in a copy, reading and writing."""
    source = torch.empty(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (times_s,) = time_in_turns([lambda: target.copy_(source)], device, warmup=2, repeats=10)
    return 2 * source.numel() / statistics.median(times_s)
