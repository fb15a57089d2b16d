"""Profile a step: device utilization, collectives, and the parts of a mixture of experts."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from workloads.instruments.torch_internals import gather_numbers, recorded_events
from workloads.tables import read_toml

Interval = tuple[float, float]

# Parts of the names of communication kernels, in lower case: ncclDevKernel_… in NCCL and RCCL, another prefix in some
# RCCL builds, and mscclKernel_… of the MSCCL inside RCCL up to ROCm 7.2 (src/include/msccl/msccl_kernel.h). The shader
# that copies memory, __amd_rocclr_copyBuffer, does not match.
COMMUNICATION_KERNELS = ("nccl", "rccl", "msccl")
EXPERT_KERNELS: dict[str, list[str]] = read_toml(__file__, "expert_kernels.toml")


@contextmanager
def profile_step(
    device: torch.device, metrics: dict[str, float], *, fused: bool = False, exchange: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Profile the step in the `with` block, and add device utilization and communication to `metrics`.

    calls_… counts each kind of collective on this rank. On a GPU, kernels are counted, since recording host events as
    well slows down a step that waits for the host. With `fused`, host events are recorded anyway, since only they show
    collectives fused with GEMMs (`workloads.parallel.apply`), whose copies are not communication kernels.

    On a GPU, the shares are those of `compute_shares`. A mixture of experts adds the shares of EXPERT_KERNELS, and the
    share of collectives in the group of GPUs that `exchange` tokens. NCCL runs these collectives on one stream,
    identified by a small collective at the start.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else []
    if fused or not on_gpu:
        activities.append(ProfilerActivity.CPU)
    with profile(activities=activities) as profiler:
        if on_gpu and exchange is not None:
            gather_numbers(torch.zeros(1, device=device), 0, exchange.group_name).sum()
        yield
    kernels, counts = [], Counter[str]()
    events = sorted(recorded_events(profiler), key=lambda event: event.start_ns())
    exchanged = list[Interval]()
    if on_gpu and exchange is not None:
        shown = next(event for event in events if is_communication(event.name()))
        events = events[events.index(shown) + 1 :]
        of_stream = [event for event in events if event.device_resource_id() == shown.device_resource_id()]
        exchanged = [(event.start_ns(), event.end_ns()) for event in of_stream if is_communication(event.name())]
    for event in events:
        name = event.name()
        if name.startswith(("c10d::", "symm_mem::fused_")):
            counts[name.partition("::")[2].strip("_")] += 1
        elif event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            kernels.append((name, (event.start_ns(), event.end_ns())))
            if not fused and is_communication(name):
                counts[name_collective(name)] += 1
    metrics |= {f"calls_{name}": float(count) for name, count in counts.items() if name != "barrier"}
    if kernels:
        metrics |= compute_shares(kernels)
    recorded = kernels or [(event.name(), (event.start_ns(), event.end_ns())) for event in events]
    metrics |= compute_part_shares(recorded, exchanged)


def compute_part_shares(recorded: list[tuple[str, Interval]], exchanged: list[Interval]) -> dict[str, float]:
    """Return the time shares of the EXPERT_KERNELS parts in a device's recording, and the share of token exchanges. The
    result is empty if no experts run, since attention and losses of other models use kernels with the same names."""
    intervals = {
        part: [interval for name, interval in recorded if any(word in name.lower() for word in words)]
        for part, words in EXPERT_KERNELS.items()
    }
    if not intervals["experts"]:
        return {}
    total = max(end for _, (_, end) in recorded) - min(start for _, (start, _) in recorded)
    intervals |= {"exchange": exchanged} if exchanged else {}
    return {f"{part}_share": total_length(merge_intervals(of_part)) / total for part, of_part in intervals.items()}


def compute_shares(kernels: Iterable[tuple[str, Interval]]) -> dict[str, float]:
    """Return shares of the time from a device's first kernel to its last kernel.

    computation_share, exposed_share (only communication) and idle_share (neither, including a pipeline's bubble) add up
    to 1. communication_share also includes communication that overlaps with computation.

    kernels: names and intervals, in any unit of time
    """
    kernels = list(kernels)
    communication = merge_intervals(interval for name, interval in kernels if is_communication(name))
    computation = merge_intervals(interval for name, interval in kernels if not is_communication(name))
    busy = merge_intervals(interval for _, interval in kernels)
    total = busy[-1][1] - busy[0][0]
    return {
        "communication_share": total_length(communication) / total,
        "computation_share": total_length(computation) / total,
        "exposed_share": (total_length(busy) - total_length(computation)) / total,
        "idle_share": 1 - total_length(busy) / total,
    }


def name_collective(kernel: str) -> str:
    """Return a communication kernel's kind of collective, such as allgather for ncclDevKernel_AllGather_RING_LL(…)."""
    return kernel.partition("(")[0].split("_")[1].lower() if "_" in kernel else kernel.lower()


def is_communication(kernel: str) -> bool:
    return any(part in kernel.lower() for part in COMMUNICATION_KERNELS)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as non-overlapping intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total_length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
