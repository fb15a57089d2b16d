"""Read the state of a node for its diagnosis, without torch."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workloads.api import host, kernel
from workloads.api.gpus import open_gpus
from workloads.api.gpus.interface import Gpu

PACKAGES = (
    *("torch", "ray", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton"),
    *("flash-attn-4", "flash-attn", "amd-aiter"),  # attention kernels
)


def read_node_state(folder: str) -> dict[str, Any]:
    """Return this node's versions, kernel settings, memory, disk space, and each GPU's clocks, power limit and errors.

    All values are plain. `folder` is the results directory, whose disk's free space is reported.
    """
    results, shared = Path(folder), Path("/dev/shm")
    with open_gpus() as opened:
        gpus = [describe_gpu(gpu) for gpu in opened]
    return {
        "node": socket.gethostname(),
        "versions": {"python": platform.python_version()} | {name: host.version_of(name) for name in PACKAGES},
        "kernel": kernel.read_kernel(),
        "cpus": len(os.sched_getaffinity(0)),
        "shared_gib": shutil.disk_usage(shared).total / 2**30 if shared.is_dir() else 0.0,
        "free_gib": host.available_memory_bytes() / 2**30,
        "disk_gib": shutil.disk_usage(results if results.is_dir() else "/").free / 2**30,
        "gpus": gpus,
    }


def describe_gpu(gpu: Gpu) -> dict[str, Any]:
    """Return what the driver reports of one GPU, as plain values; a value that it does not report is missing.

    The keys are those of `GpuIdentity`, `GpuLimits` and `GpuErrors`, with `responds` and `used_gib`.
    """
    identity = gpu.identity
    values = asdict(identity)
    if identity.responds:
        values |= {"used_gib": gpu.used_gib(), **asdict(gpu.limits()), **asdict(gpu.errors())}
    return {"responds": identity.responds} | {name: value for name, value in values.items() if value is not None}
