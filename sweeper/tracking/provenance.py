"""What a stranger needs to believe a figure: versions, machine, GPU state, git state and the words that were said."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeper.common.secrets import masked_arguments
from sweeper.config.hardware import Target
from workloads.api import host

PACKAGES = ("gpu-sweeper", "torch", "ray", "optuna", "mlflow", "hydra-core", "numpy", "triton", "flash-attn-4")


def gather(target: Target, arguments: Sequence[str]) -> dict[str, Any]:
    """Everything, as plain values. Nothing of the environment is taken, and URLs lose their passwords."""
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
    """Commit and whether anything is changed, of the checkout the code runs from; empty where it is none."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        if not git("ls-files", Path(__file__).name):  # installed into an environment inside another project's checkout
            return {}
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(git("status", "--porcelain"))} if commit else {}
    except (OSError, subprocess.SubprocessError):
        return {}


def gpu_states() -> list[dict[str, Any]]:
    """Of each NVIDIA GPU of this machine: name, driver, power limit, clocks, temperature. Unknown ones are left out."""
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
            continue  # a virtual or a consumer GPU does not tell everything
    return state
