"""Read the state of a node for its diagnosis, without torch."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from workloads.api import host

PACKAGES = ("torch", "ray", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton", "flash-attn-4")


def read_node_state(folder: str) -> dict[str, Any]:
    """Return this node's versions, memory and disk space, and the clocks, power limit and errors of each GPU.

    All values are plain. `folder` is the results directory, whose disk's free space is reported.
    """
    results, shared = Path(folder), Path("/dev/shm")
    return {
        "node": socket.gethostname(),
        "versions": {"python": platform.python_version()} | {name: host.version_of(name) for name in PACKAGES},
        "cpus": len(os.sched_getaffinity(0)),
        "shared_gib": shutil.disk_usage(shared).total / 2**30 if shared.is_dir() else 0.0,
        "free_gib": host.available_memory_bytes() / 2**30,
        "disk_gib": shutil.disk_usage(results if results.is_dir() else "/").free / 2**30,
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, Any]]:
    """Return the state of each NVIDIA GPU, read through NVML; GPUs of other vendors are not listed."""
    with host.nvidia_gpus() as gpus:
        return [_gpu(number, gpu) for number, gpu in enumerate(gpus)]


def _gpu(number: int, gpu: Any) -> dict[str, Any]:
    """Return the values that NVML reports of one GPU; a value that it does not report is missing."""
    import pynvml as nvml

    entry: dict[str, Any] = {"number": number, "answers": bool(gpu), "name": "", "driver": ""}
    if gpu:
        entry["name"] = nvml.nvmlDeviceGetName(gpu)
        entry["used_gib"] = host.used_gib(gpu)
        with suppress(nvml.NVMLError):
            entry["driver"] = nvml.nvmlSystemGetDriverVersion()
        with suppress(nvml.NVMLError):
            entry["power_limit_w"] = nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3
            entry["power_default_w"] = nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3
        with suppress(nvml.NVMLError):
            entry["clock_limit_mhz"] = nvml.nvmlDeviceGetApplicationsClock(gpu, nvml.NVML_CLOCK_SM)
            entry["clock_default_mhz"] = nvml.nvmlDeviceGetDefaultApplicationsClock(gpu, nvml.NVML_CLOCK_SM)
        with suppress(nvml.NVMLError):
            entry["uncorrected_errors"] = nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
            )
    return entry
