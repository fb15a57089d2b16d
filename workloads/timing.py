"""Time work on a device: with device events on a GPU, with a monotonic clock on a CPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from math import ceil

import torch

from workloads.host_waits import time_undisturbed

# Written between repeats so that the last-level cache holds nothing of the step's data. Larger than any such cache:
# 60 MB on an H200, 126 MB on a B200, 256 MB on an MI300X; server processors have up to about 400 MB for all cores.
FLUSH_BYTES = 512 * 2**20

# A sustained run is timed in windows of WINDOW_S. Its clocks have settled when two readings in a row, each the mean of
# SETTLING_WINDOWS windows, differ by less than SETTLED_WITHIN; LONGEST_SETTLING_S limits the wait for that.
WINDOW_S = 0.05
SETTLING_WINDOWS = 4
SETTLED_WITHIN = 0.01
LONGEST_SETTLING_S = 20.0

# The device waits before the first of a series of short calls; otherwise the host's launches would be timed. Cycles for
# each call: 50 µs at a clock of 2 GHz.
LEAD_CYCLES = 100_000


def time_steps(
    step: Callable[[], object], device: torch.device, *, warmup: int, repeats: int, cold_cache: bool
) -> tuple[float, ...]:
    """Return the seconds of each of `repeats` calls of `step`, after `warmup` calls that are not timed."""
    return time_in_turns([step], device, warmup=warmup, repeats=repeats, cold_cache=cold_cache)[0]


def time_in_turns(
    steps: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    cold_cache: bool = True,
) -> tuple[tuple[float, ...], ...]:
    """Return the seconds of each call of each of `steps`, which take turns, so that a change of clocks affects all.

    With `cold_cache` the last-level cache is flushed before each call, outside the timed region.

    On a GPU every call is enclosed in two device events, and the host runs ahead of the device, so that its launch
    time is hidden: by the flush before each call, or by a wait before the first one. On a CPU, calls during which
    other processes held a core are measured again.

    Raises:
        HostBusy: on a CPU, other processes held the cores nearly all the time.
    """
    scratch = torch.empty(FLUSH_BYTES if cold_cache else 0, dtype=torch.uint8, device=device)
    for _ in range(warmup):
        for step in steps:
            step()
    if device.type == "cpu":
        timed = [partial(_wall_time_s, step, scratch) for step in steps]
        return tuple(zip(*time_undisturbed(timed, repeats, torch.get_num_threads()), strict=True))
    torch.cuda.synchronize(device)
    if not cold_cache:
        torch.cuda._sleep(LEAD_CYCLES * repeats * len(steps))
    turns = []
    for _ in range(repeats):
        turn = []
        for step in steps:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            scratch.zero_()
            start.record()
            step()
            end.record()
            turn.append((start, end))
        turns.append(turn)
    torch.cuda.synchronize(device)
    return tuple(tuple(start.elapsed_time(end) / 1e3 for start, end in events) for events in zip(*turns, strict=True))


def _wall_time_s(step: Callable[[], object], scratch: torch.Tensor) -> float:
    scratch.zero_()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def sustained_times(
    steps: Sequence[Callable[[], object]], device: torch.device, *, step_time_s: float, seconds: float
) -> tuple[float, ...]:
    """Return the mean seconds a step in each window of a back-to-back run of `seconds` after the clocks have settled.

    `steps` do the same work on different buffers, together larger than the last-level cache, and take turns;
    `step_time_s` is the approximate time of one. The device never waits: the next window is queued before one ends.
    """
    windows = _windows(steps, device, max(1, ceil(WINDOW_S / step_time_s)))
    _settle(windows)
    started = time.perf_counter()
    times_s = [next(windows)]
    while time.perf_counter() - started < seconds:
        times_s.append(next(windows))
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return tuple(times_s)


def _settle(windows: Iterator[float]) -> None:
    """Run until the clocks have settled, at most LONGEST_SETTLING_S."""
    started = time.perf_counter()
    previous = float("inf")
    while time.perf_counter() - started < LONGEST_SETTLING_S:
        reading = sum(islice(windows, SETTLING_WINDOWS)) / SETTLING_WINDOWS
        # At least a second: the power that is capped is an average over about as long.
        if abs(reading - previous) < SETTLED_WITHIN * reading and time.perf_counter() - started > 1.0:
            return
        previous = reading


def _windows(steps: Sequence[Callable[[], object]], device: torch.device, count: int) -> Iterator[float]:
    """Yield the mean seconds a step of consecutive windows of `count` steps, without end."""
    turns = cycle(steps)
    if device.type == "cpu":
        while True:
            start = time.perf_counter()
            for step in islice(turns, count):
                step()
            yield (time.perf_counter() - start) / count
    queued: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
    last = torch.cuda.Event(enable_timing=True)
    last.record()
    while True:
        for step in islice(turns, count):
            step()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        queued.append((last, end))
        last = end
        if len(queued) > 1:
            start_event, end_event = queued.popleft()
            end_event.synchronize()
            yield start_event.elapsed_time(end_event) / 1e3 / count
