"""GEMMs in low-precision recipes: their rate against bf16, and their error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch

from workloads.api.contract import Energy, Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, Support, support, unsupported_rocm_reason, unsupported_shape_reason
from workloads.instruments import device as devices
from workloads.instruments.runs import measure_energy
from workloads.instruments.telemetry import monitor_gpu
from workloads.instruments.timing import event_metrics, time_in_turns
from workloads.models.model import GemmShape, gemm_shape
from workloads.precision import GemmParameters, formats
from workloads.precision.formats import rocm_of_build

SAMPLE_SIZE = 256  # rows and columns of the result that the error is computed from


def measure(parameters: GemmParameters, rank: Rank) -> Measurement:
    """Time A·Bᵀ in the recipe and in bf16 in turns, and compare a sample of the result with fp64.

    The operands are converted beforehand; `precision_casts` and `precision_linear` measure that cost. If the device
    does not support the recipe natively, only the error is measured: the converted operands are multiplied in fp32.

    Raises:
        Infeasible: torchao is not installed, or the recipe does not support the GEMM's shape.
        ArithmeticError: the result is wrong beyond the rounding errors of any format.
    """
    formats.require_torchao()
    device = devices.device_of(rank)
    architecture = devices.architecture(device)
    state, reason = support(parameters.recipe, architecture)
    if state is Support.NATIVE and (unsupported := unsupported_rocm_reason(parameters.recipe, rocm_of_build())):
        raise Infeasible(unsupported)
    shape = gemm_shape(parameters.model, parameters.layer, parameters.product, parameters.tokens)
    _check_shape(parameters, shape, architecture)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    a, b = (
        torch.randn(rows, shape.k, device=device, dtype=torch.bfloat16, generator=generator)
        for rows in (shape.m, shape.n)
    )
    sample = _Sample(_sample_indices(shape.m, device), _sample_indices(shape.n, device))
    exact = a[sample.rows].double() @ b[sample.columns].double().t()
    run = (_run_native if state is Support.NATIVE else _run_emulated)(parameters, a, b, sample, architecture)
    error_db = formats.sqnr_db(exact, run.sampled_result)
    if not error_db > 5:
        raise ArithmeticError(f"the {parameters.recipe} GEMM gives wrong results: its SQNR is {error_db:.1f} dB")
    return Measurement(
        executed={name: getattr(parameters, name) for name in parameters.__dataclass_fields__},
        step_times_s=run.times_s[0],
        baseline_step_times_s=run.times_s[1] if len(run.times_s) > 1 else (),
        unranked="" if state is Support.NATIVE else f"emulated: {reason}",
        flops_per_step=2.0 * shape.m * shape.n * shape.k,
        matrix_dtype=RECIPES[parameters.recipe].matrix_dtype,
        energy=run.energy,
        metrics={"m": float(shape.m), "n": float(shape.n), "k": float(shape.k), **run.metrics, "sqnr_db": error_db},
        machine_info=devices.machine_info(device) | {"support": state.value},
    )


def _check_shape(parameters: GemmParameters, shape: GemmShape, architecture: str) -> None:
    """Check that the recipe supports the shape. Raises Infeasible if it does not."""
    if parameters.recipe == "bf16":
        return
    if unsupported := unsupported_shape_reason(parameters.recipe, shape.m, shape.n, shape.k, architecture):
        raise Infeasible(unsupported)


class _Sample(NamedTuple):
    """Indices of the rows and columns of the result that the error is computed from."""

    rows: torch.Tensor
    columns: torch.Tensor


@dataclass(frozen=True)
class _Run:
    """A product in the recipe.

    Attributes:
        sampled_result: the sample's rows and columns of the result.
        times_s: seconds of each repeat in the recipe, and in bf16 unless that is the recipe; empty if not timed.
        energy: of the product in the recipe.
        metrics: of the GPU.
    """

    sampled_result: torch.Tensor
    times_s: tuple[tuple[float, ...], ...] = ((),)
    energy: Energy | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def _run_native(
    parameters: GemmParameters, a: torch.Tensor, b: torch.Tensor, sample: _Sample, architecture: str
) -> _Run:
    """Time the recipe and bf16 in turns."""
    bf16_out = torch.empty(len(a), len(b), device=a.device, dtype=torch.bfloat16)
    steps: list[Callable[[], torch.Tensor]] = [lambda: torch.mm(a, b.t(), out=bf16_out)]
    if parameters.recipe != "bf16":
        converted = _convert_operands(parameters, a, b, architecture)
        steps.insert(0, formats.native_gemm(parameters.recipe, *converted))
    with monitor_gpu(a.device) as watch:
        times_s = time_in_turns(steps, a.device, warmup=parameters.warmup, repeats=parameters.repeats)
    energy = measure_energy(steps[0], a.device, median(times_s[0]))
    sampled_result = steps[0]()[sample.rows][:, sample.columns]
    return _Run(sampled_result, times_s, energy, watch.metrics() | event_metrics(a.device))


def _run_emulated(
    parameters: GemmParameters, a: torch.Tensor, b: torch.Tensor, sample: _Sample, architecture: str
) -> _Run:
    """Multiply the sample's rows of the converted operands in fp32."""
    if parameters.recipe == "bf16":
        sampled = [a[sample.rows].float(), b[sample.columns].float()]
    else:
        converted = _convert_operands(parameters, a, b, architecture)
        sampled = [x.dequantize(torch.float32)[i] for x, i in zip(converted, sample, strict=True)]
    return _Run((sampled[0] @ sampled[1].t()).bfloat16())


def _convert_operands(parameters: GemmParameters, a: torch.Tensor, b: torch.Tensor, architecture: str) -> list[Any]:
    """Return A[m, k] and B[n, k] in the recipe."""
    # A weight gradient sums over tokens, so neither of its operands is a weight.
    b_role = "activation" if parameters.product == "weight_gradient" else "weight"
    operands = ((a, "activation"), (b, b_role))
    return [formats.convert(parameters.recipe, matrix, role, architecture) for matrix, role in operands]


def _sample_indices(size: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, size - 1, min(size, SAMPLE_SIZE), device=device).long()
