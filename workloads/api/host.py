"""Read this machine's package versions, processor, memory and GPUs without torch."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from workloads.api.contract import Scalar
from workloads.api.gpus import open_gpus
from workloads.api.gpus.interface import GpuIdentity

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


def node_activity() -> dict[str, Scalar]:
    """Return this machine's load average over the last minute, and the number of other processes on its GPUs."""
    activity: dict[str, Scalar] = {"node_load": round(os.getloadavg()[0], 1)}
    with open_gpus() as gpus:
        processes = [ids for gpu in gpus if (ids := gpu.process_ids()) is not None]
    if processes:
        activity["other_gpu_processes"] = len(set[int]().union(*processes) - {os.getpid()})
    return activity


def gpu_identities() -> tuple[GpuIdentity, ...]:
    """Return what each GPU of this machine is, in the order of CUDA's or HIP's numbers."""
    with open_gpus() as gpus:
        return tuple(gpu.identity for gpu in gpus)


def gpus_used_gib() -> tuple[float, ...]:
    """Return the GiB in use of each GPU, in the order of CUDA's or HIP's numbers; 0 where it is not reported."""
    with open_gpus() as gpus:
        return tuple(gpu.used_gib() or 0.0 for gpu in gpus)
