"""Measuring one `torch.mm`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from workloads import device as devices
from workloads.contract import Infeasible, Measurement, Rank
from workloads.matmul import MatmulParameters
from workloads.telemetry import Watch, watching
from workloads.timing import FLUSH_BYTES, sustained_times, time_steps

# Waited for a GPU that the machine slowed down (heat, power brake) before it is measured again.
PAUSES_S = (5.0, 15.0)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Largest relative error ‖C - ref‖ / ‖ref‖ that a correct product shows: the rounding of the result itself
# (half a unit in the last place: 2^-9 for bf16, 2^-12 for fp16), and for fp32 its accumulation over k, each
# with room for a library's order of summation.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1e-2}


def measure(parameters: MatmulParameters, rank: Rank) -> Measurement:
    """Time C = A·B on random A[m, k], B[k, n], output rewritten, every repeat kept.

    A product needs 2·m·n·k floating-point operations. Raises Infeasible where the device has no such type,
    and ArithmeticError where the result is wrong.
    """
    device = devices.of(rank)
    _require_dtype(parameters.dtype, device)
    dtype = DTYPES[parameters.dtype]
    m, n, k = parameters.m, parameters.n, parameters.k
    # "fp32" means fp32: tf32 is another type with another peak.
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    a = torch.randn(m, k, device=device, dtype=dtype, generator=generator)
    b = torch.randn(k, n, device=device, dtype=dtype, generator=generator)
    c = torch.empty(m, n, device=device, dtype=dtype)
    times_s, watch = _time_untainted(lambda: torch.mm(a, b, out=c), device, parameters)
    sustained_s, sustained_figures = _sustain(a, b, c, parameters, statistics.median(times_s))
    error = relative_error(a, b, c)
    if not error <= TOLERANCE[parameters.dtype]:
        raise ArithmeticError(
            f"the {parameters.dtype} product {m}x{n}x{k} is wrong: relative error {error:.2e}, "
            f"more than {TOLERANCE[parameters.dtype]:.0e}"
        )
    return Measurement(
        executed={
            "m": c.shape[0],
            "n": c.shape[1],
            "k": a.shape[1],
            "dtype": {name: d for d, name in DTYPES.items()}[c.dtype],
            "warmup": parameters.warmup,
            "repeats": len(times_s),
            "cache": parameters.cache,
            "sustained_s": parameters.sustained_s,
            "seed": generator.initial_seed(),
        },
        step_times_s=times_s,
        sustained_step_times_s=sustained_s,
        flops_per_step=2.0 * m * n * k,
        matrix_dtype=parameters.dtype,
        figures={"relative_error": error, **watch.figures(), **sustained_figures},
        facts=devices.facts(device) | watch.facts(),
    )


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
                cold_cache=parameters.cache == "cold",
            )
        if pause_s is None or not watch.tainted:
            break
        time.sleep(pause_s)
    return times_s, watch


def _sustain(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, parameters: MatmulParameters, step_time_s: float
) -> tuple[tuple[float, ...], dict[str, float]]:
    """The times of the product back to back over copies that the cache cannot hold, and the GPU's state meanwhile."""
    if not parameters.sustained_s:
        return (), {}
    one_set_bytes = sum(t.numel() * t.element_size() for t in (a, b, c))
    sets = [(a, b, c)] + [(a.clone(), b.clone(), c.clone()) for _ in range(FLUSH_BYTES // one_set_bytes)]
    steps = [partial(torch.mm, x, y, out=z) for x, y, z in sets]
    with watching(a.device) as watch:
        times_s = sustained_times(steps, a.device, step_time_s=step_time_s, seconds=parameters.sustained_s)
    return times_s, {f"sustained_{name}": figure for name, figure in watch.figures().items()}


def relative_error(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, rows: int = 8, columns: int = 256) -> float:
    """‖C - A·B‖ / ‖A·B‖ over a sample of C, spread over all of it, against the product in fp64."""
    i = torch.linspace(0, c.shape[0] - 1, min(rows, c.shape[0]), device=c.device).long()
    j = torch.linspace(0, c.shape[1] - 1, min(columns, c.shape[1]), device=c.device).long()
    reference = a[i].double() @ b[:, j].double()
    return float((c[i][:, j].double() - reference).norm() / reference.norm())


def _require_dtype(dtype: str, device: torch.device) -> None:
    """A CPU computes types that it has no units for, at a hundredth of the speed: not a figure to search for."""
    if device.type != "cpu" or dtype == "fp32":
        return
    has = {
        "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }[dtype]
    if not has():
        raise Infeasible(f"this CPU has no {dtype} arithmetic")
