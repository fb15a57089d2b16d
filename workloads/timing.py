"""Timing work on a device: device events on a GPU, a monotonic clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def time_steps(step: Callable[[], object], device: torch.device, *, warmup: int, repeats: int) -> tuple[float, ...]:
    """Seconds of each of `repeats` calls of `step`, after `warmup` calls that do not count.

    On a GPU every call stands between two device events and the queue is drained once, at the end, so the
    host's launch time is hidden wherever the device is the slower one.
    """
    for _ in range(warmup):
        step()
    if device.type == "cpu":
        return tuple(_wall_time_s(step) for _ in range(repeats))
    torch.cuda.synchronize(device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize(device)
    return tuple(start.elapsed_time(end) / 1e3 for start, end in events)


def _wall_time_s(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
