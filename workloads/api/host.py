"""Read this machine's package versions, processor, memory and NVIDIA GPUs without torch."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from workloads.api.contract import Scalar

# The kernel's names (x86 and ARM) of the matrix and vector instructions that multiply each number format.
CPU_FORMATS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}


def version_of(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """Return the processor's name as the kernel reports it, else its architecture."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_architecture() -> str:
    """Return `cpu` and the 16-bit formats that it has instructions for, as `workloads.api.recipes` reads them."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return " ".join(["cpu", *(name for name, instructions in CPU_FORMATS.items() if flags & instructions)])


def _cpuinfo(key: str) -> str:
    """Return the first processor's entry in /proc/cpuinfo; empty if there is none."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return ""


def memory_bytes() -> int:
    """Return the total memory in bytes of this machine or of the container that limits this process."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # "max" means that there is no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def available_memory_bytes() -> int:
    """Return the available memory in bytes of this machine or of this process's container; 2**63 - 1 if unknown."""
    available = [2**63 - 1]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        available.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" means that there is no limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = Path("/sys/fs/cgroup/memory.stat").read_text().split()
        reclaimable = int(statistics[statistics.index("inactive_file") + 1])  # file cache, which the kernel evicts
        available.append(limit - used + reclaimable)
    return min(available)


@contextlib.contextmanager
def nvidia_gpus() -> Iterator[list[Any]]:
    """Open NVML and yield the handle of each NVIDIA GPU in the driver's order; an empty list without a driver.

    The handle is None for a GPU that no longer responds, such as one that has fallen off the bus.
    """
    import pynvml

    def responding_handle(index: int) -> Any:
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceGetName(handle)
            return handle

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield [responding_handle(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def node_activity() -> dict[str, Scalar]:
    """Return this machine's load average over the last minute, and the number of other processes on its GPUs."""
    activity: dict[str, Scalar] = {"node_load": round(os.getloadavg()[0], 1)}
    import pynvml

    with nvidia_gpus() as gpus, contextlib.suppress(pynvml.NVMLError):
        responding = [gpu for gpu in gpus if gpu]
        pids = {process.pid for gpu in responding for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
        if responding:
            activity["other_gpu_processes"] = len(pids - {os.getpid()})
    return activity


def used_gib(gpu: Any) -> float:
    """Return the GiB that processes use of an NVIDIA GPU, given by its NVML handle; 0 if NVML does not report it."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        # Version 2 of the structure does not count the driver's own memory as used.
        used_bytes: int = pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).used
        return used_bytes / 2**30
    return 0.0


def gpus_used_gib() -> tuple[float, ...]:
    """Return the GiB in use of each NVIDIA GPU in the driver's order; 0 for one that does not respond."""
    with nvidia_gpus() as gpus:
        return tuple(used_gib(gpu) if gpu else 0.0 for gpu in gpus)


def gpu_names() -> tuple[str, ...]:
    """Return the NVIDIA driver's name of each GPU in its order; empty for one that does not respond."""
    import pynvml

    with nvidia_gpus() as gpus:
        return tuple(pynvml.nvmlDeviceGetName(gpu) if gpu else "" for gpu in gpus)
