"""A call timed reading by reading, and calls run back to back: their sustained rate and the energy that they draw."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from workloads.api.contract import Energy
from workloads.api.gpus.energy import SHORTEST_S
from workloads.instruments.device import MIB, flush_mib
from workloads.instruments.telemetry import GpuReadings, find_gpu, monitor_gpu
from workloads.instruments.timing import calls_in_reading, event_metrics, sustained_times, time_steps

# Seconds to wait for a GPU that the machine slowed down (heat, power brake) before each further measurement.
PAUSES_S = (5.0, 15.0)
MARGIN = 1.2  # how much longer a run is than the shortest one whose energy can be told
NO_RUN = "a single call is too short for the energy counter: set space.sustained_s=3"


@dataclass(frozen=True)
class TimedCalls:
    """The seconds of each reading, a mean of `calls`, and the state of the GPU meanwhile."""

    times_s: tuple[float, ...]
    readings: GpuReadings
    calls: int

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Return the GPU's clock, power and temperature, and on a GPU how it was timed."""
        timer = {} if device.type == "cpu" else event_metrics(device) | {"calls_per_reading": float(self.calls)}
        return self.readings.metrics() | timer


def time_untainted(
    step: Callable[[], object], device: torch.device, *, warmup: int, repeats: int, cold_cache: bool
) -> TimedCalls:
    """Time the step; repeat it after each of PAUSES_S while the machine slows the GPU down."""
    calls = 1 if cold_cache else calls_in_reading(step, device)
    for pause_s in (*PAUSES_S, None):
        with monitor_gpu(device) as readings:
            times_s = time_steps(step, device, warmup=warmup, repeats=repeats, cold_cache=cold_cache, calls=calls)
        if pause_s is None or not readings.tainted:
            break
        time.sleep(pause_s)
    return TimedCalls(times_s, readings, calls)


@dataclass(frozen=True)
class SustainedRun:
    """Calls that ran back to back after the clocks had settled.

    The metrics are the GPU's clock, power and temperature, and the seconds of load until the clocks had settled.
    """

    times_s: tuple[float, ...] = ()  # of a call in each window
    energy: Energy | None = None  # None on a CPU; without a run why there is none
    metrics: Mapping[str, float] = field(default_factory=dict)


def run_sustained(
    steps: Sequence[Callable[[], object]], device: torch.device, *, step_time_s: float, seconds: float
) -> SustainedRun:
    """Run calls of the same work in turns; `step_time_s` is the approximate time of one."""
    with monitor_gpu(device) as readings:
        loaded_s = time.perf_counter()
        times_s = sustained_times(
            steps, device, step_time_s=step_time_s, seconds=seconds, on_settled=readings.begin_steps
        )
    steps_in_window = (readings.ended_s - readings.started_s) / statistics.mean(times_s)  # the device never waits
    metrics = readings.metrics() | {"settling_s": readings.started_s - loaded_s}
    metrics = {f"sustained_{name}": value for name, value in metrics.items()}
    return SustainedRun(times_s, readings.energy(steps_in_window), metrics)


def run_copies(
    step: Callable[[], object],
    copy: Callable[[], Callable[[], object]],
    step_bytes: int,
    device: torch.device,
    *,
    step_time_s: float,
    seconds: float,
) -> SustainedRun:
    """Run a step back to back with `copy()`s of it over other memory, together more than the cache holds.

    Nothing runs where `seconds` is 0.
    """
    if not seconds:
        return SustainedRun(energy=None if device.type == "cpu" else Energy(missing=NO_RUN))
    steps = [step, *(copy() for _ in range(flush_mib(device) * MIB // step_bytes))]
    return run_sustained(steps, device, step_time_s=step_time_s, seconds=seconds)


def measure_energy(step: Callable[[], object], device: torch.device, step_time_s: float) -> Energy | None:
    """Run a call back to back for as long as the device's counter needs, which changes every 20 to 100 ms.

    On a CPU, and where no driver reads the GPU, nothing runs.
    """
    gpu = find_gpu(device)
    if gpu is None:
        return None
    source = "power" if gpu.read().energy_j is None else "counter"
    return run_sustained([step], device, step_time_s=step_time_s, seconds=MARGIN * SHORTEST_S[source]).energy
