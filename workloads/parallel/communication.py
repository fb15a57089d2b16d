"""The communication of a training step: counts of collectives, and the time in which nothing is computed beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]

# Parts of the names of communication kernels, in lower case: ncclDevKernel_… of NCCL and of RCCL, which has its own
# prefix in some builds, and mscclKernel_… of the MSCCL inside RCCL up to ROCm 7.2 (src/include/msccl/msccl_kernel.h).
# The shader that copies memory, __amd_rocclr_copyBuffer, is none of them.
COMMUNICATION_KERNELS = ("nccl", "rccl", "msccl")


@contextmanager
def profile_communication(device: torch.device, metrics: dict[str, float]) -> Iterator[None]:
    """Profile the step in the `with` block, which slows it, and add its communication to `metrics`.

    calls_… counts each kind of collective of this rank. Those that are fused with matrix products count too
    (`workloads.parallel.async_tp`); their copies are no kernels of communication. On a GPU communication_share is the
    share of the time in which communication runs, exposed_share the share in which it runs and nothing is computed, and
    idle_share the share in which nothing is computed, a pipeline's bubble included.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        yield
    events = profiler.events() or []
    counts = Counter(
        event.name.partition("::")[2].strip("_")
        for event in events
        if event.name.startswith(("c10d::", "symm_mem::fused_"))
    )
    metrics |= {f"calls_{name}": float(count) for name, count in counts.items() if name != "barrier"}
    kernels = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    if kernels:
        metrics |= compute_shares(kernels)


def compute_shares(kernels: Iterable[tuple[str, Interval]]) -> dict[str, float]:
    """Return shares of the time from a device's first kernel to its last.

    kernels: names and intervals, in any unit of time
    """
    kernels = list(kernels)
    communication = merge_intervals(interval for name, interval in kernels if is_communication(name))
    computation = merge_intervals(interval for name, interval in kernels if not is_communication(name))
    busy = merge_intervals(interval for _, interval in kernels)
    total = busy[-1][1] - busy[0][0]
    return {
        "communication_share": total_length(communication) / total,
        "exposed_share": (total_length(busy) - total_length(computation)) / total,
        "idle_share": 1 - total_length(computation) / total,
    }


def is_communication(kernel: str) -> bool:
    return any(part in kernel.lower() for part in COMMUNICATION_KERNELS)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total_length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
