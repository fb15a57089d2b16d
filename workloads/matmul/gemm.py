"""Time one matrix product and check its result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, unsupported_rate_reason, unsupported_rocm_reason
from workloads.instruments import device as devices
from workloads.instruments.device import MIB, flush_mib
from workloads.instruments.runs import SustainedRun, run_sustained, time_untainted, without_run
from workloads.instruments.timing import event_metrics
from workloads.matmul import MatmulParameters, rules, tunable
from workloads.matmul.accuracy import relative_error, tolerance
from workloads.matmul.arithmetic import arithmetic, executed_accumulation, executed_backend, library
from workloads.matmul.operands import Operands, make_operands
from workloads.precision.formats import rocm_of_build


def measure(parameters: MatmulParameters, rank: Rank) -> Measurement:
    """Time C = A·B on random operands; the output is rewritten and the time of every repeat is kept.

    A product needs 2·m·n·k floating-point operations.

    Raises:
        Infeasible: the device or this build of PyTorch does not support the combination of parameters.
        ArithmeticError: the result is wrong.
    """
    device = devices.device_of(rank)
    architecture = devices.architecture(device)
    _check_support(parameters, architecture)
    shape = parameters.shape()
    with arithmetic(parameters, architecture):
        run = _run(parameters, device, architecture)
    error = _checked_error(parameters, run, architecture)
    rows, columns = run.c.shape
    shape_metrics = {"m": float(rows), "n": float(columns), "k": float(shape.k)} if parameters.model else {}
    return Measurement(
        executed=run.executed,
        step_times_s=run.times_s,
        sustained_step_times_s=run.sustained.times_s,
        independent=True,
        statistic=parameters.statistic.partition("_")[0],
        flops_per_step=2.0 * shape.m * shape.n * shape.k,
        matrix_dtype=RECIPES[parameters.dtype].matrix_dtype,
        energy=run.sustained.energy,
        metrics={"relative_error": error, **shape_metrics, **run.metrics},
        machine_info=devices.machine_info(device) | run.machine_info,
    )


def _check_support(parameters: MatmulParameters, architecture: str) -> None:
    """Check that the device and this build of PyTorch support the parameters. Raises Infeasible if they do not."""
    if reason := unsupported_rate_reason(parameters.dtype, architecture):
        raise Infeasible(f"dtype={parameters.dtype} is {reason}")
    if reason := unsupported_rocm_reason(parameters.dtype, rocm_of_build()):
        raise Infeasible(reason)
    if reason := rules.unsupported_reason(parameters, architecture):
        raise Infeasible(reason)
    if parameters.backend != "tunable" and tunable.is_forced():
        raise Infeasible(
            f"backend={parameters.backend}: PYTORCH_TUNABLEOP_ENABLED routes every product through TunableOp; "
            "unset it, or set backend=tunable"
        )


@dataclass(frozen=True)
class _Run:
    """A timed product.

    Attributes:
        c: the result C[m, n].
        executed: the parameters as executed.
        times_s: seconds of each repeat.
        sustained: the back-to-back run.
        metrics, machine_info: of the measurement, without what follows from the result.
    """

    operands: Operands
    c: torch.Tensor
    executed: dict[str, Any]
    times_s: tuple[float, ...]
    sustained: SustainedRun
    metrics: dict[str, float]
    machine_info: dict[str, Any]


def _run(parameters: MatmulParameters, device: torch.device, architecture: str) -> _Run:
    """Time the product under the arithmetic settings of the caller, and read back what was executed."""
    _warm_up(device, parameters.warmup_s)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    operands = make_operands(parameters, device, generator, architecture)
    with _tuned(parameters, operands) as tuning:
        timed = time_untainted(
            operands.multiply,
            device,
            warmup=parameters.warmup,
            repeats=parameters.repeats,
            cold_cache=parameters.statistic.endswith("_cold"),
        )
        step_time_s = statistics.median(timed.times_s)
        sustained = _sustain(operands, parameters, architecture, generator, step_time_s)
        c = operands.fetch(operands.multiply())
    machine_info = timed.readings.machine_info() | {
        "layout": operands.layout,
        "output_dtype": str(c.dtype).removeprefix("torch."),
        "operands": str(operands.a.dtype),
        "accumulation": executed_accumulation(parameters, architecture),
        **library(parameters, architecture),
    }
    metrics = timed.readings.metrics() | dict(sustained.metrics)
    if device.type != "cpu":
        metrics |= event_metrics(device) | {"calls_per_reading": float(timed.calls)}
    if tuning is not None:
        machine_info["tuned_kernel"], metrics["tuning_s"] = tuning.kernel, tuning.seconds
    executed = _executed(parameters, operands, c, architecture) | {
        "repeats": len(timed.times_s),
        "seed": generator.initial_seed(),
    }
    return _Run(operands, c, executed, timed.times_s, sustained, metrics, machine_info)


def _executed(parameters: MatmulParameters, operands: Operands, c: torch.Tensor, architecture: str) -> dict[str, Any]:
    """Return the parameters as executed, read back where that is possible."""
    executed = {name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
    if parameters.model is None:
        executed |= {"m": c.shape[0], "n": c.shape[1], "k": operands.a.shape[1] * _values_per_element(operands.a)}
    if parameters.accumulation != "auto":
        executed["accumulation"] = executed_accumulation(parameters, architecture)
    if parameters.layout != "auto":
        executed["layout"] = operands.layout
    return executed | {"backend": executed_backend(parameters)}


@contextmanager
def _tuned(parameters: MatmulParameters, operands: Operands) -> Iterator[tunable.Tuning | None]:
    """Let PyTorch run the kernel that TunableOp finds for the product until the block ends, if that is the backend."""
    if parameters.backend != "tunable":
        yield None
        return
    rotating_mib = flush_mib(operands.a.device) if parameters.statistic.endswith("_cold") else 0
    product = f"{parameters.dtype} {parameters.shape()}"
    with tunable.tuned(operands.multiply, product, rotating_mib) as tuning:
        yield tuning


def _checked_error(parameters: MatmulParameters, run: _Run, architecture: str) -> float:
    """Return the relative error of the result. Raises ArithmeticError if it exceeds the format's tolerance."""
    error, shape = relative_error(run.operands.a, run.operands.b, run.c), parameters.shape()
    limit = tolerance(RECIPES[parameters.dtype].matrix_dtype, architecture)
    if not error <= limit:
        raise ArithmeticError(
            f"the {parameters.dtype} product {shape.m}x{shape.n}x{shape.k} is wrong: relative error {error:.2e}, "
            f"more than {limit:.0e}"
        )
    return error


def _values_per_element(matrix: torch.Tensor) -> int:
    return 2 if matrix.dtype == torch.float4_e2m1fn_x2 else 1


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
) -> SustainedRun:
    """Run the product back to back over operands that the cache cannot hold, if that is requested."""
    device = operands.a.device
    if not parameters.sustained_s:
        return without_run(device)
    copies = flush_mib(device) * MIB // operands.bytes
    buffers = [operands, *(make_operands(parameters, device, generator, architecture) for _ in range(copies))]
    steps = [buffer.multiply for buffer in buffers]
    return run_sustained(steps, device, step_time_s=step_time_s, seconds=parameters.sustained_s)
