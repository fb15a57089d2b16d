"""Time one pass of attention and check its result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import unsupported_rate_reason
from workloads.attention import AttentionParameters, rules
from workloads.attention.accuracy import TOLERANCE, exact_results, largest_error
from workloads.attention.kernels import DTYPES, AttentionCalls, build_calls, draw_inputs, selected
from workloads.instruments import device as devices
from workloads.instruments.device import MIB, flush_mib
from workloads.instruments.runs import SustainedRun, run_sustained, time_untainted, without_run
from workloads.instruments.timing import event_metrics


def measure(parameters: AttentionParameters, rank: Rank) -> Measurement:
    """Time one pass over random inputs; the time of every repeat is kept.

    Raises:
        Infeasible: the device, or this build of PyTorch, does not support the combination of parameters.
        ArithmeticError: the result is wrong.
    """
    device = devices.device_of(rank)
    architecture = devices.architecture(device)
    if reason := unsupported_rate_reason(parameters.dtype, architecture):
        raise Infeasible(f"dtype={parameters.dtype} is {reason}")
    if reason := rules.unsupported_reason(parameters, architecture):
        raise Infeasible(reason)
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    with selected(parameters.kernel):
        calls = build_calls(parameters, draw_inputs(parameters, device, generator))
        error = _checked_error(parameters, calls)
        step = _pass_of(calls, parameters)
        timed = time_untainted(
            step,
            device,
            warmup=parameters.warmup,
            repeats=parameters.repeats,
            cold_cache=parameters.statistic.endswith("_cold"),
        )
        sustained = _sustain(parameters, calls, generator, statistics.median(timed.times_s))
    timer = {} if device.type == "cpu" else event_metrics(device) | {"calls_per_reading": float(timed.calls)}
    return Measurement(
        executed=_executed(parameters, calls, len(timed.times_s), generator),
        step_times_s=timed.times_s,
        sustained_step_times_s=sustained.times_s,
        independent=True,
        flops_per_step=parameters.flops,
        matrix_dtype=rules.matrix_dtype(parameters, architecture),
        energy=sustained.energy,
        metrics={"relative_error": error, **timed.readings.metrics(), **sustained.metrics, **timer},
        machine_info=devices.machine_info(device) | timed.readings.machine_info(),
    )


def _pass_of(calls: AttentionCalls, parameters: AttentionParameters) -> Callable[[], object]:
    return calls.forward if parameters.mode == "forward" else calls.backward


def _checked_error(parameters: AttentionParameters, calls: AttentionCalls) -> float:
    """Return the relative error of the pass that is timed. Raises ArithmeticError if it exceeds the tolerance."""
    inputs = calls.inputs
    out, *gradients = exact_results(inputs.q, inputs.k, inputs.v, inputs.d_out, causal=parameters.causal)
    results: tuple[Tensor, ...] = (calls.forward(),) if parameters.mode == "forward" else calls.backward()
    error = largest_error(results, (out,) if parameters.mode == "forward" else gradients)
    limit = TOLERANCE[parameters.dtype]
    if not error <= limit:
        raise ArithmeticError(
            f"{parameters.mode} attention by {calls.kernel} in {parameters.dtype} is wrong: relative error "
            f"{error:.2e}, more than {limit:.0e}"
        )
    return error


def _executed(
    parameters: AttentionParameters, calls: AttentionCalls, repeats: int, generator: torch.Generator
) -> dict[str, Any]:
    """Return the parameters as executed, read back where that is possible."""
    q, k = calls.inputs.q, calls.inputs.k
    return {name: getattr(parameters, name) for name in parameters.__dataclass_fields__} | {
        "sequence_length": q.shape[2],
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_size": q.shape[3],
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == q.dtype),
        "kernel": calls.kernel,
        "repeats": repeats,
        "seed": generator.initial_seed(),
    }


def _sustain(
    parameters: AttentionParameters, calls: AttentionCalls, generator: torch.Generator, step_time_s: float
) -> SustainedRun:
    """Run the pass back to back over inputs that the cache cannot hold, if that is requested."""
    device = calls.inputs.q.device
    if not parameters.sustained_s:
        return without_run(device)
    copies = flush_mib(device) * MIB // calls.inputs.bytes
    buffers = [calls, *(build_calls(parameters, draw_inputs(parameters, device, generator)) for _ in range(copies))]
    steps = [_pass_of(buffer, parameters) for buffer in buffers]
    return run_sustained(steps, device, step_time_s=step_time_s, seconds=parameters.sustained_s)
