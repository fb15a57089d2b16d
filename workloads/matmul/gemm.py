"""Measuring one matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from workloads import device as devices
from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, unsupported_rate_reason
from workloads.matmul import MatmulParameters, operands, unsupported_backend_reason
from workloads.telemetry import Watch, watching
from workloads.timing import FLUSH_BYTES, sustained_times, time_steps

# Waited for a GPU that the machine slowed down (heat, power brake) before it is measured again.
PAUSES_S = (5.0, 15.0)

# Largest relative error ‖C - ref‖ / ‖ref‖ that a correct product shows: the rounding of the result itself
# (half a unit in the last place: 2^-9 for bf16, 2^-12 for fp16), and for fp32 its accumulation over k, each
# with room for a library's order of summation. tf32 rounds its operands to 11 bits. The fast accumulators of fp8
# keep 14 bits.
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8": 2e-2, "fp4": 1e-2}


def measure(parameters: MatmulParameters, rank: Rank) -> Measurement:
    """Time C = A·B on random operands, output rewritten, every repeat kept.

    A product needs 2·m·n·k floating-point operations. Raises Infeasible where the device or the route has no such
    format, and ArithmeticError where the result is wrong.
    """
    device = devices.of(rank)
    architecture = devices.architecture(device)
    if why := unsupported_rate_reason(parameters.dtype, architecture):
        raise Infeasible(f"dtype={parameters.dtype} is {why}")
    if why := unsupported_backend_reason(parameters.route, architecture):
        raise Infeasible(f"route={parameters.route} is {why}")
    shape = parameters.shape()
    with _arithmetic(parameters):
        _warm_up(device, parameters.warmup_s)
        generator = torch.Generator(device=device).manual_seed(parameters.seed)
        pair = operands.make(parameters, device, generator, architecture)
        times_s, watch = _time_untainted(pair.multiply, device, parameters)
        sustained_s, sustained_figures = _sustain(pair, parameters, architecture, generator, statistics.median(times_s))
        c = pair.fetch(pair.multiply())
        ran = {"accumulation": _accumulation_set(parameters), "route": _route_taken(parameters)}
    error = relative_error(pair.a, pair.b, c)
    matrix_dtype = RECIPES[parameters.dtype].matrix_dtype
    if not error <= TOLERANCE[matrix_dtype]:
        raise ArithmeticError(
            f"the {parameters.dtype} product {shape.m}x{shape.n}x{shape.k} is wrong: relative error {error:.2e}, "
            f"more than {TOLERANCE[matrix_dtype]:.0e}"
        )
    executed = {name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
    if parameters.model is None:
        executed |= {"m": c.shape[0], "n": c.shape[1], "k": pair.a.shape[1] * _numbers_each(pair.a)}
    executed |= {"repeats": len(times_s), "seed": generator.initial_seed(), **ran}
    if parameters.layout != "auto":
        executed["layout"] = pair.layout
    shape_figures = {"m": float(c.shape[0]), "n": float(c.shape[1]), "k": float(shape.k)} if parameters.model else {}
    return Measurement(
        executed=executed,
        step_times_s=times_s,
        sustained_step_times_s=sustained_s,
        independent=True,
        statistic=parameters.statistic.partition("_")[0],
        flops_per_step=2.0 * shape.m * shape.n * shape.k,
        matrix_dtype=matrix_dtype,
        metrics={"relative_error": error, **shape_figures, **watch.metrics(), **sustained_figures},
        machine_info=devices.machine_info(device)
        | watch.machine_info()
        | {"layout": pair.layout, "output_dtype": str(c.dtype).removeprefix("torch."), "operands": str(pair.a.dtype)},
    )


def _numbers_each(matrix: torch.Tensor) -> int:
    return 2 if matrix.dtype == torch.float4_e2m1fn_x2 else 1


@contextmanager
def _arithmetic(parameters: MatmulParameters) -> Iterator[None]:
    """PyTorch's switches for the time of one trial: the next may ask for others in the same process."""
    settings = torch.backends.cuda.matmul
    reduced = parameters.accumulation == "reduced"
    before = (
        settings.allow_tf32,
        settings.allow_bf16_reduced_precision_reduction,
        settings.allow_fp16_reduced_precision_reduction,
    )
    library = torch.backends.cuda.preferred_blas_library()
    try:
        # "fp32" means fp32: tf32 is another type with another peak.
        settings.allow_tf32 = parameters.dtype == "tf32"
        settings.allow_bf16_reduced_precision_reduction = reduced
        settings.allow_fp16_reduced_precision_reduction = reduced
        if parameters.route in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(parameters.route)
        yield
    finally:
        (
            settings.allow_tf32,
            settings.allow_bf16_reduced_precision_reduction,
            settings.allow_fp16_reduced_precision_reduction,
        ) = before
        torch.backends.cuda.preferred_blas_library(library)


def _accumulation_set(parameters: MatmulParameters) -> str:
    """As PyTorch has it set for the 16-bit types; the others take it as an argument, or sum in fp32 anyway."""
    settings = torch.backends.cuda.matmul
    reduced = {
        "bf16": settings.allow_bf16_reduced_precision_reduction,
        "fp16": settings.allow_fp16_reduced_precision_reduction,
    }.get(parameters.dtype)
    return parameters.accumulation if reduced is None else "reduced" if reduced else "fp32"


def _route_taken(parameters: MatmulParameters) -> str:
    """The vendor's library as PyTorch has it set, which may refuse one for a GPU; else the route that was built."""
    if parameters.route not in ("cublas", "cublaslt"):
        return parameters.route
    library = torch.backends.cuda.preferred_blas_library()
    return {"Cublas": "cublas", "Cublaslt": "cublaslt"}.get(str(library).rpartition(".")[2], str(library))


def _time_untainted(
    step: Callable[[], object], device: torch.device, parameters: MatmulParameters
) -> tuple[tuple[float, ...], Watch]:
    """The times, taken again after a pause where the machine slowed the GPU down meanwhile; marked if it still did."""
    for pause_s in (*PAUSES_S, None):
        with watching(device) as watch:
            times_s = time_steps(
                step,
                device,
                warmup=parameters.warmup,
                repeats=parameters.repeats,
                cold_cache=parameters.statistic.endswith("_cold"),
            )
        if pause_s is None or not watch.tainted:
            break
        time.sleep(pause_s)
    return times_s, watch


@cache
def _warm_up(device: torch.device, seconds: float) -> None:
    """Load the device for so long, once in a worker's life."""
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
    pair: operands.Operands,
    parameters: MatmulParameters,
    architecture: str,
    generator: torch.Generator,
    step_time_s: float,
) -> tuple[tuple[float, ...], dict[str, float]]:
    """The times of the product back to back over operands that the cache cannot hold, and the GPU's state meanwhile."""
    if not parameters.sustained_s:
        return (), {}
    device = pair.a.device
    pairs = [pair]
    pairs += [operands.make(parameters, device, generator, architecture) for _ in range(FLUSH_BYTES // pair.bytes)]
    with watching(device) as watch:
        times_s = sustained_times(
            [each.multiply for each in pairs], device, step_time_s=step_time_s, seconds=parameters.sustained_s
        )
    return times_s, {f"sustained_{name}": figure for name, figure in watch.metrics().items()}


def relative_error(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, rows: int = 8, columns: int = 256) -> float:
    """‖C - A·B‖ / ‖A·B‖ over a sample of C, spread over all of it, against the product in fp64."""
    i = torch.linspace(0, c.shape[0] - 1, min(rows, c.shape[0]), device=c.device).long()
    j = torch.linspace(0, c.shape[1] - 1, min(columns, c.shape[1]), device=c.device).long()
    reference = operands.take_rows(a, i) @ operands.take_rows(b.t(), j).t()
    return float((c[i][:, j].double() - reference).norm() / reference.norm())
