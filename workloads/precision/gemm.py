"""Measure GEMMs in low-precision recipes: their rate compared with bf16, and their error."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, Support, support, unsupported_rocm_reason, unsupported_shape_reason
from workloads.instruments import device as devices
from workloads.instruments.runs import measure_energy
from workloads.instruments.telemetry import monitor_gpu
from workloads.instruments.timing import event_metrics, time_in_turns
from workloads.models.model import gemm_shape
from workloads.precision import GemmParameters, LinearParameters, formats

SAMPLE_SIZE = 256  # rows and columns of the result that the error is computed from


def measure(parameters: GemmParameters, rank: Rank) -> Measurement:
    """Time A·Bᵀ in the recipe and in bf16, interleaved, and compare a sample of the result with fp64.

    The operands are converted beforehand; `precision_casts` and `precision_linear` time conversions. If the device does
    not support the recipe natively, only the error is measured: the converted operands are multiplied in fp32.

    Raises Infeasible if torchao is not installed or the recipe does not support the GEMM's shape, and ArithmeticError
    if the result is wrong beyond the rounding errors of any format.
    """
    formats.require_torchao()
    device, recipe = devices.device_of(rank), parameters.recipe
    architecture = devices.architecture(device)
    state, reason = support(recipe, architecture)
    is_native, is_bf16 = state is Support.NATIVE, recipe == "bf16"
    if is_native and (unsupported := unsupported_rocm_reason(recipe, formats.rocm_of_build())):
        raise Infeasible(unsupported)
    shape = gemm_shape(parameters.model, parameters.layer, parameters.product, parameters.tokens)
    if not is_bf16 and (unsupported := unsupported_shape_reason(recipe, shape.m, shape.n, shape.k, architecture)):
        raise Infeasible(unsupported)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    sizes, bf16 = (shape.m, shape.n), torch.bfloat16
    a, b = (torch.randn(size, shape.k, device=device, dtype=bf16, generator=generator) for size in sizes)
    rows, columns = (torch.linspace(0, size - 1, min(size, SAMPLE_SIZE), device=device).long() for size in sizes)
    exact = a[rows].double() @ b[columns].double().t()
    # A weight gradient sums over tokens, so neither of its operands is a weight.
    b_role = "activation" if parameters.product == "weight_gradient" else "weight"
    operands = ((a, "activation"), (b, b_role))
    converted = [] if is_bf16 else [formats.convert(recipe, x, role, architecture) for x, role in operands]
    measured = Measurement({}, ())
    if is_native:
        bf16_out = torch.empty(len(a), len(b), device=device, dtype=bf16)
        steps: list[Callable[[], Any]] = [lambda: torch.mm(a, b.t(), out=bf16_out)]
        if not is_bf16:
            steps.insert(0, formats.native_gemm(recipe, *converted))
        measured = time_against_bf16(steps, device, parameters)
        sampled = steps[0]()[rows][:, columns]
    elif is_bf16:
        sampled = (a[rows].float() @ b[columns].float().t()).bfloat16()
    else:
        low_a, low_b = (x.dequantize(torch.float32) for x in converted)
        sampled = (low_a[rows] @ low_b[columns].t()).bfloat16()
    error_db = formats.sqnr_db(exact, sampled)
    if not error_db > 5:
        raise ArithmeticError(f"the {recipe} GEMM gives wrong results: its SQNR is {error_db:.1f} dB")
    return replace(
        measured,
        executed=dict(vars(parameters)),
        unranked="" if is_native else f"emulated: {reason}",
        flops_per_step=2.0 * shape.m * shape.n * shape.k,
        matrix_dtype=RECIPES[recipe].matrix_dtype,
        metrics={
            "m": float(shape.m),
            "n": float(shape.n),
            "k": float(shape.k),
            **measured.metrics,
            "sqnr_db": error_db,
        },
        machine_info=devices.machine_info(device) | {"support": state.value},
    )


def time_against_bf16(
    steps: Sequence[Callable[[], object]], device: torch.device, parameters: GemmParameters | LinearParameters
) -> Measurement:
    """Measure a recipe's step, interleaved with the bf16 step, and the energy of the recipe's step."""
    with monitor_gpu(device) as watch:
        times_s, *baseline = time_in_turns(steps, device, warmup=parameters.warmup, repeats=parameters.repeats)
    energy = measure_energy(steps[0], device, median(times_s))
    metrics = watch.metrics() | event_metrics(device)
    return Measurement({}, times_s, baseline_step_times_s=sum(baseline, ()), energy=energy, metrics=metrics)
