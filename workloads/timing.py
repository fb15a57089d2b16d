"""Timing work on a device: device events on a GPU, a monotonic clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Written between repeats so that the last-level cache holds nothing of the step's data. Larger than any such cache:
# 60 MB on an H200, 126 MB on a B200, 256 MB on an MI300X; server processors have up to about 400 MB for all cores.
FLUSH_BYTES = 512 * 2**20


def time_steps(
    step: Callable[[], object], device: torch.device, *, warmup: int, repeats: int, cold_cache: bool
) -> tuple[float, ...]:
    """Seconds of each of `repeats` calls of `step`, after `warmup` calls that do not count.

    `cold_cache`: the last-level cache is flushed before each of them, outside the timed region.

    On a GPU every call stands between two device events and the queue is drained once, at the end, so the
    host's launch time is hidden wherever the device is the slower one.
    """
    scratch = torch.empty(FLUSH_BYTES if cold_cache else 0, dtype=torch.uint8, device=device)
    for _ in range(warmup):
        step()
    if device.type == "cpu":
        return tuple(_wall_time_s(step, scratch) for _ in range(repeats))
    torch.cuda.synchronize(device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        scratch.zero_()
        start.record()
        step()
        end.record()
    torch.cuda.synchronize(device)
    return tuple(start.elapsed_time(end) / 1e3 for start, end in events)


def _wall_time_s(step: Callable[[], object], scratch: torch.Tensor) -> float:
    scratch.zero_()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
