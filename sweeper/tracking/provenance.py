"""Gather a sweep's provenance: versions, machine, GPU state, git state and the command line."""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sweeper.config.hardware import Target
from sweeper.config.resolution import ResolvedConfig, list_program_files
from sweeper.execution import code_probe
from workloads.api import host
from workloads.api.gpus import open_gpus
from workloads.api.host import describe_gpu
from workloads.api.secrets import masked_arguments

PACKAGES = (
    *("gpu-sweeper", "torch", "ray", "optuna", "mlflow", "hydra-core", "numpy", "triton"),
    *("flash-attn-4", "flash-attn", "amd-aiter"),  # attention kernels
    *("torchtitan", "megatron-core", "nemo-toolkit", "transformer-engine"),  # frameworks that a command may run
)

MAX_PROGRAM_BYTES = 16 * 2**20
PACKAGE = Path(__file__).resolve().parent.parent


def gather(target: Target, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the provenance as plain values, with secrets masked and nodes' environment variables left out."""
    return {
        "command": masked_arguments(arguments),
        "versions": {"python": platform.python_version(), **{name: host.version_of(name) for name in PACKAGES}},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu_cores": os.cpu_count(),
            "model": target.model,
            "nodes": [asdict(replace(node, environment=())) for node in target.nodes],
        },
        "gpus": gpu_states(),
        "hardware": vars(target.hardware),
        "git": git_state(Path(__file__).parent),
    }


def comparable_state(provenance: Mapping[str, Any], resolved: ResolvedConfig) -> dict[str, Any]:
    """Return, as a flat dict, everything that may differ between runs of a sweep and change the trials' outcomes."""
    config, git = resolved.config, provenance["git"]
    return {
        **{f"version of {name}": version for name, version in provenance["versions"].items() if version},
        "git commit": git.get("commit", "")[:12],
        "uncommitted changes": git.get("changed", False),
        "host": provenance["machine"]["host"],
        "driver": driver_versions(provenance),
        **{f"trial.{name}": value for name, value in asdict(config.trial).items()},
        **{f"file {name}": digest for name, digest in _program_digests(resolved).items()},
    }


def driver_versions(provenance: Mapping[str, Any]) -> str:
    """Return the versions of the GPU driver on this machine, separated by commas, or "" without a GPU."""
    return ", ".join(sorted({str(gpu.get("driver", "")) for gpu in provenance["gpus"]}))


def compute_digest(results: Mapping[str, Any]) -> str:
    """Return a digest of all results of a sweep (as plain values) and of the code that presents them. A finished
    sweep's results are rewritten only if the results or the code (tables, plots, report) have changed."""
    text = json.dumps(results, sort_keys=True, default=str)
    return hashlib.sha256(f"{code_probe.digest([PACKAGE])} {text}".encode()).hexdigest()[:32]


def _program_digests(resolved: ResolvedConfig) -> dict[str, str]:
    settings, digests = resolved.settings, {}
    if settings is None or not resolved.is_local:
        return {}
    for word in list_program_files(settings):
        path = Path(settings["directory"], word)
        with contextlib.suppress(OSError):
            if path.stat().st_size <= MAX_PROGRAM_BYTES:
                digests[word] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return digests


def git_state(folder: Path) -> dict[str, Any]:
    """Return the commit of the checkout with this code, if any, and whether the checkout has uncommitted changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return completed.stdout.strip() if completed.returncode == 0 else ""

    try:
        if not git("ls-files", Path(__file__).name):  # this code is installed in an environment inside another checkout
            return {}
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(git("status", "--porcelain"))} if commit else {}
    except (OSError, subprocess.SubprocessError):
        return {}


def gpu_states() -> list[dict[str, Any]]:
    """Return the driver's report on each GPU, including current clocks and temperature if available."""
    states = []
    with open_gpus() as gpus:
        for gpu in gpus:
            state = describe_gpu(gpu)
            if gpu.identity.responds:
                reading = gpu.read()
                sensors = {
                    "sm_clock_mhz": reading.clock_mhz,
                    "memory_clock_mhz": reading.memory_clock_mhz,
                    "temperature_c": reading.temperature_c,
                }
                state |= {name: value for name, value in sensors.items() if value is not None}
            states.append(state)
    return states
