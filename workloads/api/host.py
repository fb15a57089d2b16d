"""What can be said of this machine without torch: its packages, its processor, its memory and its GPUs' names."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from workloads.api.contract import Scalar

# The kernel's word for instructions of matrix or vector units, x86 and ARM, by the number format they multiply.
CPU_FORMATS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}


def version_of(package: str) -> str:
    """Of an installed package; empty where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """The processor's name as the kernel gives it, else its architecture."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_architecture() -> str:
    """`cpu` and the number formats below fp32 that it has instructions for, as `workloads/recipes.py` reads it."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return " ".join(["cpu", *(name for name, words in CPU_FORMATS.items() if flags & words)])


def _cpuinfo(key: str) -> str:
    """The first processor's entry in the kernel's list; empty where there is none."""
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
    """What this machine, or the container that this process is in, has in all."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)


def available_memory_bytes() -> int:
    """What this machine, or the container that this process is in, can still give; the largest number where it is not
    known."""
    found = [2**63 - 1]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = Path("/sys/fs/cgroup/memory.stat").read_text().split()
        found.append(limit - used + int(statistics[statistics.index("inactive_file") + 1]))  # a cache that gives way
    return min(found)


@contextlib.contextmanager
def nvidia_gpus() -> Iterator[list[Any]]:
    """NVML's handle of each NVIDIA GPU in the driver's order, None for one that does not answer any more (it has fallen
    off the bus); empty where there is no such driver."""
    import pynvml

    def handle(number: int) -> Any:
        with contextlib.suppress(pynvml.NVMLError):
            found = pynvml.nvmlDeviceGetHandleByIndex(number)
            pynvml.nvmlDeviceGetName(found)
            return found

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield [handle(number) for number in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def busyness() -> dict[str, Scalar]:
    """What else this machine was at: runnable processes over the last minute, and other processes on its GPUs."""
    found: dict[str, Scalar] = {"node_load": round(os.getloadavg()[0], 1)}
    import pynvml

    with nvidia_gpus() as gpus, contextlib.suppress(pynvml.NVMLError):
        there = [gpu for gpu in gpus if gpu]
        processes = {p.pid for gpu in there for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
        if there:
            found["other_gpu_processes"] = len(processes - {os.getpid()})
    return found


def used_gib(gpu: Any) -> float:
    """What programs have of an NVIDIA GPU's memory, by NVML's handle; 0 where it does not say."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        used: int = pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).used  # without the driver's own
        return used / 2**30
    return 0.0


def gpus_used_gib() -> tuple[float, ...]:
    """Of each NVIDIA GPU, in the driver's order."""
    with nvidia_gpus() as gpus:
        return tuple(used_gib(gpu) if gpu else 0.0 for gpu in gpus)


def gpu_names() -> tuple[str, ...]:
    """The NVIDIA driver's name of each GPU, in its order, empty for one that does not answer."""
    import pynvml

    with nvidia_gpus() as gpus:
        return tuple(pynvml.nvmlDeviceGetName(gpu) if gpu else "" for gpu in gpus)
