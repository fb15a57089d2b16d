"""Time single readings of a call, and run calls back to back to measure their sustained rate and energy."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from workloads.api.contract import Energy, Infeasible, Measurement, Rank
from workloads.api.gpus.energy import SHORTEST_S
from workloads.api.recipes import unsupported_rate_reason
from workloads.instruments.device import MIB, architecture, device_of, flush_mib, machine_info
from workloads.instruments.telemetry import GpuReadings, find_gpu, monitor_gpu
from workloads.instruments.timing import Step, calls_in_reading, event_metrics, sustained_times, time_steps

# Seconds to wait before each repeated measurement if the machine slowed the GPU down (heat, power brake).
PAUSES_S = (5.0, 15.0)
# Seconds to wait for a clock that an earlier load lowered: the power cap applies to a mean over about a second.
CLOCK_PAUSES_S = (0.5, 1.0, 2.0)
CLOCK_SHARE = 0.98  # a clock of at least this share of `clock_mhz` is sufficient
MARGIN = 1.2  # length of a run relative to the shortest run with a measurable energy
NO_RUN = "a single call is too short for the energy counter: set space.sustained_s=3"


def prepare(
    parameters: Any, rank: Rank, unsupported_reason: Callable[[Any, str], str]
) -> tuple[torch.device, str, torch.Generator]:
    """Return the rank's device, its architecture, and a generator with the trial's seed.

    Raises Infeasible if the device does not support `parameters.dtype`, or if a rule forbids the combination."""
    device = device_of(rank)
    name = architecture(device)
    if reason := unsupported_rate_reason(parameters.dtype, name):
        raise Infeasible(f"dtype={parameters.dtype} is {reason}")
    if reason := unsupported_reason(parameters, name):
        raise Infeasible(reason)
    return device, name, torch.Generator(device=device).manual_seed(parameters.seed)


def check_error(name: str, error: float, limit: float) -> float:
    """Return a result's relative error. Raises ArithmeticError if the error is above the limit or not a number."""
    if not error <= limit:
        raise ArithmeticError(f"{name} is wrong: relative error {error:.2e}, more than {limit:.0e}")
    return error


def measure_calls(
    step: Step, copy: Callable[[], Step], step_bytes: int, device: torch.device, parameters: Any, clock_mhz: float
) -> Measurement:
    """Time a step, and run it back to back with copies in other memory, which together exceed the cache.

    `parameters` has the fields `warmup`, `repeats`, `statistic` and `sustained_s`; if `sustained_s` is 0, nothing runs
    back to back. With a cold cache, readings are repeated if the clock was below `clock_mhz`. The measurement contains
    only data from these calls; the caller adds the rest.
    """
    cold = parameters.statistic.endswith("_cold")
    calls = 1 if cold else calls_in_reading(step, device)
    counts = {"warmup": parameters.warmup, "repeats": parameters.repeats, "calls": calls}
    read = partial(time_steps, step, device, **counts, cold_cache=cold)
    times_s, readings = time_untainted(read, device, clock_mhz if cold else 0.0)
    metrics = readings.metrics()
    if device.type != "cpu":
        metrics |= event_metrics(device) | {"calls_per_reading": float(calls)}
    sustained_times_s: tuple[float, ...] = ()
    energy = None if device.type == "cpu" else Energy(missing=NO_RUN)
    if parameters.sustained_s:
        steps = [step, *(copy() for _ in range(flush_mib(device) * MIB // step_bytes))]
        step_time_s = statistics.median(times_s)
        sustained_times_s, energy, sustained = run_sustained(steps, device, step_time_s, parameters.sustained_s)
        metrics |= {f"sustained_{name}": value for name, value in sustained.items()}
    return Measurement(
        executed={},
        step_times_s=times_s,
        sustained_step_times_s=sustained_times_s,
        independent=True,
        energy=energy,
        metrics=metrics,
        machine_info=machine_info(device) | readings.machine_info(),
    )


def time_untainted(
    read: Callable[[], tuple[float, ...]], device: torch.device, clock_mhz: float = 0.0
) -> tuple[tuple[float, ...], GpuReadings]:
    """Time a step, and again after a pause if the machine slowed the GPU down or the clock was below `clock_mhz`."""
    pauses_s, clock_pauses_s = iter(PAUSES_S), iter(CLOCK_PAUSES_S)
    while True:
        with monitor_gpu(device) as readings:
            times_s = read()
        is_below = readings.metrics().get("sm_clock_mhz", math.inf) < CLOCK_SHARE * clock_mhz
        pause_s = next(pauses_s, None) if readings.tainted else next(clock_pauses_s, None) if is_below else None
        if pause_s is None:
            return times_s, readings
        time.sleep(pause_s)


def run_sustained(
    steps: Sequence[Step], device: torch.device, step_time_s: float, seconds: float
) -> tuple[tuple[float, ...], Energy | None, dict[str, float]]:
    """Run interleaved calls that do the same work. `step_time_s` is the approximate time of one call.

    Returns:
        The seconds per call in each window after the clocks settled; the energy of the calls; and metrics: the GPU's
        clock, power and temperature with their drifts, and the seconds of load until the clocks settled.
    """
    with monitor_gpu(device) as readings:
        loaded_s = time.perf_counter()
        begin = readings.begin_steps
        times_s = sustained_times(steps, device, step_time_s=step_time_s, seconds=seconds, on_settled=begin)
    steps_in_window = (readings.ended_s - readings.started_s) / statistics.mean(times_s)  # the device never waits
    metrics = readings.metrics() | readings.drifts() | {"settling_s": readings.started_s - loaded_s}
    return times_s, readings.energy(steps_in_window), metrics


def measure_energy(step: Step, device: torch.device, step_time_s: float) -> Energy | None:
    """Repeat a call long enough to read the energy counter, which changes every 20 to 100 ms; None without a driver."""
    gpu = find_gpu(device)
    if gpu is None:
        return None
    source = "power" if gpu.read().energy_j is None else "counter"
    return run_sustained([step], device, step_time_s, MARGIN * SHORTEST_S[source])[1]
