"""Time work on a device, with device events on a GPU and a monotonic clock on a CPU.

Recording a pair of events itself takes time, which is part of every GPU reading. On an H200, this cost is 1.3 µs for an
empty pair and about 2 µs for a pair around a kernel. The cost is higher on AMD GPUs, where it makes kernels under about
50 µs look slow (pytorch/pytorch#175097). The cost of an empty pair on the same GPU is therefore subtracted from every
reading. With a warm cache, a reading of short calls spans many calls. Evidence: benchmarks/results/timing_h200.md.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import cycle, islice
from math import ceil

import torch

from workloads.instruments.device import build_flush
from workloads.instruments.host_waits import time_undisturbed
from workloads.instruments.torch_internals import delay_gpu

Step = Callable[[], object]
Pair = tuple[torch.cuda.Event, torch.cuda.Event]

# A sustained run is timed in windows of WINDOW_S. The clocks have settled when two consecutive readings, each the mean
# of SETTLING_WINDOWS windows, differ by less than SETTLED_WITHIN. LONGEST_SETTLING_S limits the wait. On a CPU, other
# processes may prevent settling altogether.
WINDOW_S = 0.05
SETTLING_WINDOWS = 4
SETTLED_WITHIN = 0.01
LONGEST_SETTLING_S = {"cuda": 20.0, "cpu": 2.0}

# The device waits before the first call of a series of short calls, because otherwise host launches would be timed.
# This is the wait in cycles per call: 50 µs at a clock of 2 GHz.
LEAD_CYCLES = 100_000

# With a warm cache, many calls shorter than SHORT_S are timed together, for at least READING_S. The event cost that
# remains after the subtraction, up to 0.7 µs on an H200, is then less than 0.4% of a reading, and at most 1.4% of a
# longer call. A reading has at most MAX_CALLS calls, because a GPU's queue holds about a thousand.
SHORT_S = 50e-6
READING_S = 200e-6
MAX_CALLS = 200
EMPTY_PAIRS = 50  # number of event pairs for the median cost to subtract
RESOLUTION_S = 0.5e-6  # an event's resolution (CUDA's cudaEventElapsedTime); no reading is shorter


def time_steps(
    step: Step, device: torch.device, *, warmup: int, repeats: int, cold_cache: bool, calls: int = 1
) -> tuple[float, ...]:
    """Return the seconds per call of `step` in each of `repeats` readings, after `warmup` untimed calls."""
    return time_in_turns([step], device, warmup=warmup, repeats=repeats, cold_cache=cold_cache, calls=calls)[0]


def time_in_turns(
    steps: Sequence[Step], device: torch.device, *, warmup: int, repeats: int, cold_cache: bool = True, calls: int = 1
) -> tuple[tuple[float, ...], ...]:
    """Time each call of each step in seconds, interleaving the steps so that a change in clocks affects all of them.

    With `cold_cache`, the last-level cache is flushed before each call, outside the timed region. Without `cold_cache`,
    a GPU reading may be the mean of several `calls` of a step (see `calls_in_reading`).

    On a GPU, two device events enclose every reading, and their own cost is subtracted. The host runs ahead of the
    device: the flush before each call, or a wait before the first call, hides the launch time. On a CPU, calls during
    which other processes held a core are repeated; HostBusy is raised if nearly all calls were disturbed.
    """
    assert calls == 1 or not cold_cache
    flush = build_flush(device) if cold_cache else None

    def wall_time_s(step: Step) -> float:
        if flush is not None:
            flush()
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    for _ in range(warmup):
        for step in steps:
            step()
    if device.type == "cpu":
        timed = [partial(wall_time_s, step) for step in steps]
        return tuple(zip(*time_undisturbed(timed, repeats, torch.get_num_threads()), strict=True))
    cost_s = event_cost_s(device)
    if flush is None and calls == 1:
        delay_gpu(LEAD_CYCLES * repeats * len(steps))
    turns = [[_queue_reading(step, flush, calls) for step in steps] for _ in range(repeats)]
    torch.cuda.synchronize(device)
    return tuple(
        tuple(_net_time_s(start, end, cost_s) / calls for start, end in events) for events in zip(*turns, strict=True)
    )


def _queue_reading(step: Step, flush: Step | None, calls: int = 1) -> Pair:
    if flush is not None:
        flush()
    elif calls > 1:  # once per reading, because all calls of a series would not fit into the GPU's queue
        delay_gpu(LEAD_CYCLES * calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        step()
    end.record()
    return start, end


def _net_time_s(start: torch.cuda.Event, end: torch.cuda.Event, cost_s: float) -> float:
    return max(start.elapsed_time(end) / 1e3 - cost_s, RESOLUTION_S)


@cache
def event_cost_s(device: torch.device) -> float:
    """Return the time in seconds between two events with no work in between, measured once per device; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize(device)
    delay_gpu(LEAD_CYCLES * EMPTY_PAIRS)
    pairs = [_queue_reading(lambda: None, None) for _ in range(EMPTY_PAIRS)]
    torch.cuda.synchronize(device)
    return statistics.median(_net_time_s(start, end, 0.0) for start, end in pairs)


def run_for(seconds: float, steps: Sequence[Step], device: torch.device) -> None:
    """Run the steps repeatedly for at least `seconds`, or not at all if `seconds` is 0."""
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for step in steps:
            step()
        if device.type != "cpu":
            torch.cuda.synchronize(device)


def calls_in_reading(step: Step, device: torch.device) -> int:
    """Return the number of calls in one reading of a step with a warm cache: 1 for long calls, and on a CPU."""
    if device.type == "cpu":
        return 1
    step_time_s = min(time_steps(step, device, warmup=1, repeats=3, cold_cache=False))
    return 1 if step_time_s >= SHORT_S else min(MAX_CALLS, ceil(READING_S / step_time_s))


def event_metrics(device: torch.device) -> dict[str, float]:
    """Return the cost subtracted from every reading; empty for a CPU, because reading its clock costs nothing."""
    return {} if device.type == "cpu" else {"event_cost_us": 1e6 * event_cost_s(device)}


def sustained_times(
    steps: Sequence[Step], device: torch.device, *, step_time_s: float, seconds: float, on_settled: Step = lambda: None
) -> tuple[float, ...]:
    """Return the mean seconds per step in each window of a back-to-back run of `seconds`, once the clocks have settled.

    The interleaved `steps` do the same work on different buffers, which together exceed the last-level cache. A step
    takes about `step_time_s`. The device never waits: each window is queued before the previous window ends.
    """
    windows = _windows(steps, device, max(1, ceil(WINDOW_S / step_time_s)))
    started, previous = time.perf_counter(), float("inf")
    while time.perf_counter() - started < LONGEST_SETTLING_S[device.type]:
        reading = sum(islice(windows, SETTLING_WINDOWS)) / SETTLING_WINDOWS
        # Wait at least a second, because the power cap applies to an average over about a second.
        if abs(reading - previous) < SETTLED_WITHIN * reading and time.perf_counter() - started > 1.0:
            break
        previous = reading
    on_settled()
    started = time.perf_counter()
    times_s = [next(windows)]
    while time.perf_counter() - started < seconds:
        times_s.append(next(windows))
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return tuple(times_s)


def _windows(steps: Sequence[Step], device: torch.device, count: int) -> Iterator[float]:
    turns = cycle(steps)
    if device.type == "cpu":
        while True:
            start = time.perf_counter()
            for step in islice(turns, count):
                step()
            yield (time.perf_counter() - start) / count
    queued: deque[Pair] = deque()
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
