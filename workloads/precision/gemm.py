"""Products in fewer bits: their rate against bf16, and their error."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workloads import device as devices
from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, Support, support, unfit
from workloads.llama.shapes import gemm_shape
from workloads.precision import GemmParameters, formats
from workloads.telemetry import watching
from workloads.timing import time_in_turns

SAMPLE = 256  # rows and columns of the result that its error is taken from


def measure(parameters: GemmParameters, rank: Rank) -> Measurement:
    """Time A·Bᵀ in the recipe and in bf16 in turns, and compare a sample of the result with the product in fp64.

    The operands are converted beforehand; what that costs is the other tables' subject. Where the device has no units
    for the recipe only the error is taken, of the operands as they are after rounding, multiplied in fp32.
    """
    formats.require_torchao()
    device = devices.of(rank)
    architecture = devices.architecture(device)
    state, why = support(parameters.recipe, architecture)
    shape = gemm_shape(parameters.model, parameters.layer, parameters.product, parameters.tokens)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    a, b = (
        torch.randn(rows, shape.k, device=device, dtype=torch.bfloat16, generator=generator)
        for rows in (shape.m, shape.n)
    )
    rows, columns = _spread(shape.m, device), _spread(shape.n, device)
    exact = a[rows].double() @ b[columns].double().t()
    plain = torch.empty(shape.m if state is Support.NATIVE else 0, shape.n, device=device, dtype=torch.bfloat16)
    steps: list[Callable[[], torch.Tensor]] = [lambda: torch.mm(a, b.t(), out=plain)]
    decoded = a[rows].float(), b[columns].float()
    if parameters.recipe != "bf16":
        if unfitting := unfit(parameters.recipe, shape.m, shape.n, shape.k):
            raise Infeasible(unfitting)
        # A weight gradient sums over tokens: neither of its operands is a weight.
        role = "activation" if parameters.product == "weight_gradient" else "weight"
        low = [formats.convert(parameters.recipe, x, r, architecture) for x, r in ((a, "activation"), (b, role))]
        if state is Support.NATIVE:
            steps.insert(0, formats.native_product(parameters.recipe, *low))
        else:
            decoded = tuple(x.dequantize(torch.float32)[i] for x, i in zip(low, (rows, columns), strict=True))
    metrics: dict[str, float] = {"m": float(shape.m), "n": float(shape.n), "k": float(shape.k)}
    turns: tuple[tuple[float, ...], ...] = ((),)
    if state is Support.NATIVE:
        with watching(device) as watch:
            turns = time_in_turns(steps, device, warmup=parameters.warmup, repeats=parameters.repeats)
        found, metrics = steps[0]()[rows][:, columns], metrics | watch.metrics()
    else:
        found = (decoded[0] @ decoded[1].t()).bfloat16()
    error_db = formats.sqnr_db(exact, found)
    if not error_db > 5:
        raise ArithmeticError(f"the {parameters.recipe} product is wrong: {error_db:.1f} dB over its noise")
    return Measurement(
        executed={name: getattr(parameters, name) for name in parameters.__dataclass_fields__},
        step_times_s=turns[0],
        baseline_step_times_s=turns[1] if len(turns) > 1 else (),
        unranked="" if state is Support.NATIVE else f"emulated: {why}",
        flops_per_step=2.0 * shape.m * shape.n * shape.k,
        matrix_dtype=RECIPES[parameters.recipe].matrix_dtype,
        metrics=metrics | {"sqnr_db": error_db},
        machine_info=devices.machine_info(device) | {"support": state.value},
    )


def _spread(size: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, size - 1, min(size, SAMPLE), device=device).long()
