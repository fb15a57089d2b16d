"""Time one matrix product and check its result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from workloads import device as devices
from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, unsupported_rate_reason
from workloads.matmul import MatmulParameters, unsupported_backend_reason
from workloads.matmul.operands import Operands, make_operands, take_rows
from workloads.telemetry import GpuReadings, monitor_gpu
from workloads.timing import FLUSH_BYTES, sustained_times, time_steps

# Seconds to wait for a GPU that the machine slowed down (heat, power brake) before each further measurement.
PAUSES_S = (5.0, 15.0)

# Largest relative error ‖C - ref‖ / ‖ref‖ of a correct product: the rounding of the result itself (half a unit in the
# last place: 2^-9 for bf16, 2^-12 for fp16), and for fp32 its accumulation over k, each with a margin for a library's
# order of summation. tf32 rounds its operands to 11 bits. The fast accumulators of fp8 keep 14 bits.
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8": 2e-2, "fp4": 1e-2}


def measure(parameters: MatmulParameters, rank: Rank) -> Measurement:
    """Time C = A·B on random operands; the output is rewritten and the time of every repeat is kept.

    A product needs 2·m·n·k floating-point operations.

    Raises:
        Infeasible: the device or the backend does not support the format.
        ArithmeticError: the result is wrong.
    """
    device = devices.device_of(rank)
    architecture = devices.architecture(device)
    if reason := unsupported_rate_reason(parameters.dtype, architecture):
        raise Infeasible(f"dtype={parameters.dtype} is {reason}")
    if reason := unsupported_backend_reason(parameters.backend, architecture):
        raise Infeasible(f"backend={parameters.backend} is {reason}")
    shape = parameters.shape()
    with _arithmetic(parameters):
        run = _run(parameters, device, architecture)
    error = _checked_error(parameters, run)
    rows, columns = run.c.shape
    shape_metrics = {"m": float(rows), "n": float(columns), "k": float(shape.k)} if parameters.model else {}
    return Measurement(
        executed=run.executed,
        step_times_s=run.times_s,
        sustained_step_times_s=run.sustained_times_s,
        independent=True,
        statistic=parameters.statistic.partition("_")[0],
        flops_per_step=2.0 * shape.m * shape.n * shape.k,
        matrix_dtype=RECIPES[parameters.dtype].matrix_dtype,
        metrics={"relative_error": error, **shape_metrics, **run.readings.metrics(), **run.sustained_metrics},
        machine_info=devices.machine_info(device)
        | run.readings.machine_info()
        | {
            "layout": run.operands.layout,
            "output_dtype": str(run.c.dtype).removeprefix("torch."),
            "operands": str(run.operands.a.dtype),
        },
    )


@dataclass(frozen=True)
class _Run:
    """A timed product.

    Attributes:
        c: the result C[m, n].
        executed: the parameters as executed.
        times_s: seconds of each repeat; `readings` are the GPU's meanwhile.
        sustained_times_s: seconds a product in each window of the back-to-back run.
    """

    operands: Operands
    c: torch.Tensor
    executed: dict[str, Any]
    times_s: tuple[float, ...]
    readings: GpuReadings
    sustained_times_s: tuple[float, ...]
    sustained_metrics: dict[str, float]


def _run(parameters: MatmulParameters, device: torch.device, architecture: str) -> _Run:
    """Time the product under the arithmetic settings of the caller, and read back what was executed."""
    _warm_up(device, parameters.warmup_s)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    operands = make_operands(parameters, device, generator, architecture)
    times_s, readings = _time_untainted(operands.multiply, device, parameters)
    step_time_s = statistics.median(times_s)
    sustained_s, sustained_metrics = _sustain(operands, parameters, architecture, generator, step_time_s)
    c = operands.fetch(operands.multiply())
    executed = {name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
    if parameters.model is None:
        executed |= {"m": c.shape[0], "n": c.shape[1], "k": operands.a.shape[1] * _values_per_element(operands.a)}
    executed |= {
        "repeats": len(times_s),
        "seed": generator.initial_seed(),
        "accumulation": _executed_accumulation(parameters),
        "backend": _executed_backend(parameters),
    }
    if parameters.layout != "auto":
        executed["layout"] = operands.layout
    return _Run(operands, c, executed, times_s, readings, sustained_s, sustained_metrics)


def _checked_error(parameters: MatmulParameters, run: _Run) -> float:
    """Return the relative error of the result. Raises ArithmeticError if it exceeds the format's tolerance."""
    error, shape = relative_error(run.operands.a, run.operands.b, run.c), parameters.shape()
    tolerance = TOLERANCE[RECIPES[parameters.dtype].matrix_dtype]
    if not error <= tolerance:
        raise ArithmeticError(
            f"the {parameters.dtype} product {shape.m}x{shape.n}x{shape.k} is wrong: relative error {error:.2e}, "
            f"more than {tolerance:.0e}"
        )
    return error


def _values_per_element(matrix: torch.Tensor) -> int:
    return 2 if matrix.dtype == torch.float4_e2m1fn_x2 else 1


@contextmanager
def _arithmetic(parameters: MatmulParameters) -> Iterator[None]:
    """Set PyTorch's arithmetic switches for one trial and restore them: the next trial may need others."""
    settings = torch.backends.cuda.matmul
    reduced = parameters.accumulation == "reduced"
    before = (
        settings.allow_tf32,
        settings.allow_bf16_reduced_precision_reduction,
        settings.allow_fp16_reduced_precision_reduction,
    )
    library = torch.backends.cuda.preferred_blas_library()
    try:
        # fp32 is never executed as tf32, which is another type with another peak.
        settings.allow_tf32 = parameters.dtype == "tf32"
        settings.allow_bf16_reduced_precision_reduction = reduced
        settings.allow_fp16_reduced_precision_reduction = reduced
        if parameters.backend in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(parameters.backend)
        yield
    finally:
        (
            settings.allow_tf32,
            settings.allow_bf16_reduced_precision_reduction,
            settings.allow_fp16_reduced_precision_reduction,
        ) = before
        torch.backends.cuda.preferred_blas_library(library)


def _executed_accumulation(parameters: MatmulParameters) -> str:
    """Return PyTorch's setting for the 16-bit types; the other types take it as an argument or always sum in fp32."""
    settings = torch.backends.cuda.matmul
    reduced = {
        "bf16": settings.allow_bf16_reduced_precision_reduction,
        "fp16": settings.allow_fp16_reduced_precision_reduction,
    }.get(parameters.dtype)
    return parameters.accumulation if reduced is None else "reduced" if reduced else "fp32"


def _executed_backend(parameters: MatmulParameters) -> str:
    """Return the library that PyTorch has selected, which may refuse one on some GPUs; else the requested backend."""
    if parameters.backend not in ("cublas", "cublaslt"):
        return parameters.backend
    library = torch.backends.cuda.preferred_blas_library()
    return {"Cublas": "cublas", "Cublaslt": "cublaslt"}.get(str(library).rpartition(".")[2], str(library))


def _time_untainted(
    step: Callable[[], object], device: torch.device, parameters: MatmulParameters
) -> tuple[tuple[float, ...], GpuReadings]:
    """Time the step and return its times and the GPU's readings; repeat it after each of PAUSES_S while tainted."""
    for pause_s in (*PAUSES_S, None):
        with monitor_gpu(device) as readings:
            times_s = time_steps(
                step,
                device,
                warmup=parameters.warmup,
                repeats=parameters.repeats,
                cold_cache=parameters.statistic.endswith("_cold"),
            )
        if pause_s is None or not readings.tainted:
            break
        time.sleep(pause_s)
    return times_s, readings


@cache
def _warm_up(device: torch.device, seconds: float) -> None:
    """Load the device for so many seconds, once per process and duration."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    c = torch.empty_like(a)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(10):
            torch.mm(a, a, out=c)
        if device.type != "cpu":
            torch.cuda.synchronize(device)


def _sustain(
    operands: Operands,
    parameters: MatmulParameters,
    architecture: str,
    generator: torch.Generator,
    step_time_s: float,
) -> tuple[tuple[float, ...], dict[str, float]]:
    """Run the product back to back over operands that the cache cannot hold; return its times and the GPU's metrics."""
    if not parameters.sustained_s:
        return (), {}
    device = operands.a.device
    copies = FLUSH_BYTES // operands.bytes
    buffers = [operands, *(make_operands(parameters, device, generator, architecture) for _ in range(copies))]
    with monitor_gpu(device) as readings:
        times_s = sustained_times(
            [buffer.multiply for buffer in buffers], device, step_time_s=step_time_s, seconds=parameters.sustained_s
        )
    return times_s, {f"sustained_{name}": value for name, value in readings.metrics().items()}


def relative_error(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, rows: int = 8, columns: int = 256) -> float:
    """Return ‖C - A·B‖ / ‖A·B‖ over evenly spaced rows and columns of C, with A·B computed in fp64."""
    i = torch.linspace(0, c.shape[0] - 1, min(rows, c.shape[0]), device=c.device).long()
    j = torch.linspace(0, c.shape[1] - 1, min(columns, c.shape[1]), device=c.device).long()
    reference = take_rows(a, i) @ take_rows(b.t(), j).t()
    return float((c[i][:, j].double() - reference).norm() / reference.norm())
