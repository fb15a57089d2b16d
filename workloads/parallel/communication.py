"""What a step's communication is: how many collectives, and how long a GPU is at them with nothing to compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]


@contextmanager
def counted(device: torch.device, metrics: dict[str, float]) -> Iterator[None]:
    """Of the step within, which this slows, to `figures`: calls_… of each kind of collective of this rank; on a GPU
    also the share of the time in which communication runs (communication_share), in which it runs and nothing is
    computed (exposed_share), and in which nothing is computed (idle_share), which has a pipeline's bubble in it.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        yield
    events = profiler.events() or []
    counts = Counter(
        event.name.removeprefix("c10d::").strip("_") for event in events if event.name.startswith("c10d::")
    )
    metrics |= {f"calls_{name}": float(count) for name, count in counts.items() if name != "barrier"}
    kernels = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    if kernels:
        metrics |= shares(kernels)


def shares(kernels: Iterable[tuple[str, Interval]]) -> dict[str, float]:
    """Of the time from the first to the last of a device's kernels, named and with their intervals in any unit."""
    kernels = list(kernels)
    talking = joined(interval for name, interval in kernels if is_communication(name))
    computing = joined(interval for name, interval in kernels if not is_communication(name))
    both = joined(interval for _, interval in kernels)
    whole = both[-1][1] - both[0][0]
    return {
        "communication_share": length(talking) / whole,
        "exposed_share": (length(both) - length(computing)) / whole,
        "idle_share": 1 - length(computing) / whole,
    }


def is_communication(kernel: str) -> bool:
    return "nccl" in kernel.lower()  # RCCL's have it in their names too


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
