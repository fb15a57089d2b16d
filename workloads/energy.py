"""The energy of a product, which is too short for a GPU's energy counter: measured while it runs back to back."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from workloads.api.contract import Energy
from workloads.api.gpus.energy import SHORTEST_S
from workloads.telemetry import GpuReadings, find_gpu, monitor_gpu
from workloads.timing import sustained_times

MARGIN = 1.2  # how much longer a run is than the shortest one whose energy can be told


def measure_energy(step: Callable[[], object], device: torch.device, step_time_s: float) -> Energy | None:
    """Run a step back to back until the clocks have settled, then for as long as the device's counter needs.

    `step_time_s` is the approximate time of one. On a CPU, and where no driver reads the GPU, nothing runs.
    """
    gpu = find_gpu(device)
    if gpu is None:
        return None
    source = "power" if gpu.read().energy_j is None else "counter"
    with monitor_gpu(device) as readings:
        times_s = sustained_times(
            [step],
            device,
            step_time_s=step_time_s,
            seconds=MARGIN * SHORTEST_S[source],
            on_settled=readings.begin_steps,
        )
    return energy_of_windows(readings, times_s)


def energy_of_windows(readings: GpuReadings, times_s: tuple[float, ...]) -> Energy | None:
    """Return the energy of a run that never waits, from the mean seconds of a step in its windows."""
    return readings.energy((readings.ended_s - readings.started_s) / statistics.mean(times_s))
