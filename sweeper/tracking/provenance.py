"""The provenance of a sweep: versions, machine, GPU state, git state and the command line."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeper.config.hardware import Target
from workloads.api import host
from workloads.api.secrets import masked_arguments

PACKAGES = ("gpu-sweeper", "torch", "ray", "optuna", "mlflow", "hydra-core", "numpy", "triton", "flash-attn-4")


def gather(target: Target, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the provenance as plain values.

    Environment variables are not recorded, and secrets on the command line and in URLs are masked.
    """
    return {
        "command": masked_arguments(arguments),
        "versions": {"python": platform.python_version(), **{name: host.version_of(name) for name in PACKAGES}},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu_cores": os.cpu_count(),
            "model": target.model,
            "nodes": [vars(node) for node in target.nodes],
        },
        "gpus": gpu_states(),
        "hardware": vars(target.hardware),
        "git": git_state(Path(__file__).parent),
    }


def git_state(folder: Path) -> dict[str, Any]:
    """Return the commit of the checkout that the code runs from, and whether it has changes. Empty without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return completed.stdout.strip() if completed.returncode == 0 else ""

    try:
        if not git("ls-files", Path(__file__).name):  # installed into an environment inside another project's checkout
            return {}
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(git("status", "--porcelain"))} if commit else {}
    except (OSError, subprocess.SubprocessError):
        return {}


def gpu_states() -> list[dict[str, Any]]:
    """Return the name, driver, power limit, clocks and temperature of each NVIDIA GPU of this machine.

    A reading that the driver does not provide is omitted.
    """
    with host.nvidia_gpus() as gpus:
        return [_gpu_state(gpu) for gpu in gpus]


def _gpu_state(gpu: Any) -> dict[str, Any]:
    import pynvml as nvml

    readings = {
        "name": lambda: nvml.nvmlDeviceGetName(gpu),
        "uuid": lambda: nvml.nvmlDeviceGetUUID(gpu),
        "driver": lambda: nvml.nvmlSystemGetDriverVersion(),
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]),
    }
    state = {}
    for name, read in readings.items():
        try:
            state[name] = read()
        except nvml.NVMLError:
            continue  # a virtual or a consumer GPU does not provide all of them
    return state
