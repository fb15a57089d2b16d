"""Readings of a GPU that the machine did not slow down: measured again after a pause where it did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workloads.instruments.telemetry import GpuReadings, monitor_gpu
from workloads.instruments.timing import calls_in_reading, time_steps

# Seconds to wait for a GPU that the machine slowed down (heat, power brake) before each further measurement.
PAUSES_S = (5.0, 15.0)


@dataclass(frozen=True)
class TimedCalls:
    """The times of a call.

    Attributes:
        times_s: seconds of each reading, a mean of `calls`.
        readings: the GPU's clock, power and temperature meanwhile.
        calls: that one reading spans.
    """

    times_s: tuple[float, ...]
    readings: GpuReadings
    calls: int


def time_untainted(
    step: Callable[[], object], device: torch.device, *, warmup: int, repeats: int, cold_cache: bool
) -> TimedCalls:
    """Time the step; repeat it after each of PAUSES_S while tainted."""
    calls = 1 if cold_cache else calls_in_reading(step, device)
    for pause_s in (*PAUSES_S, None):
        with monitor_gpu(device) as readings:
            times_s = time_steps(step, device, warmup=warmup, repeats=repeats, cold_cache=cold_cache, calls=calls)
        if pause_s is None or not readings.tainted:
            break
        time.sleep(pause_s)
    return TimedCalls(times_s, readings, calls)
