"""The rates of a GPU and its attention kernel, kept between trials, processes and sweeps of one machine."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from workloads.instruments import device as devices
from workloads.llama.attention_kernels import KERNELS, Kernel
from workloads.models.model import MODELS
from workloads.offload.cost_model import DeviceRates
from workloads.offload.device_rates import measure_device_rates, select_attention_kernel
from workloads.offload.kernel_cache import cache_folder
from workloads.offload.optimizer import Precision

KEPT_FOR_S = 24 * 3600
PACKAGES = ("triton", "flash-attn-4", "flash-attn", "amd-aiter", "torchao")
# Environment variables whose names begin so can change what a GPU reaches; trials set some (space.env).
ENVIRONMENT = ("AITER_", "CUBLAS", "CUDA_", "GPU_", "HIP", "HSA_", "MIOPEN_", "PYTORCH_", "ROC", "TORCH", "TRITON_")


@dataclass(frozen=True)
class MeasuredDevice:
    """What a plan rests on.

    Attributes:
        attention: the name of the fastest attention kernel.
        measured_at: seconds since 1970.
    """

    rates: DeviceRates
    attention: str
    measured_at: float

    @property
    def kernel(self) -> Kernel:
        return KERNELS[self.attention]


def load_or_measure(model: str, sequence_length: int, device: torch.device, precision: Precision) -> MeasuredDevice:
    """Return what was measured on this GPU within the last day, or measure it; a CPU is measured in each process.

    What was kept holds for the same GPU, model, length, precision, power limit, versions and environment variables.
    """

    def measure() -> MeasuredDevice:
        rates = measure_device_rates(model, sequence_length, device, precision)
        kernel = select_attention_kernel(MODELS[model], sequence_length, device, precision.dtype)
        return MeasuredDevice(rates, kernel.name, time.time())

    folder = cache_folder("rates") if device.type == "cuda" else None
    if folder is None:
        return measure()
    return keep(
        folder, {"model": model, "length": sequence_length, "precision": precision} | _identity(device), measure
    )


def keep(folder: Path, key: Mapping[str, object], measure: Callable[[], MeasuredDevice]) -> MeasuredDevice:
    """Return what the folder keeps for a key, if it is less than a day old, or else measure and keep that."""
    digest = hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:32]
    file = folder / f"{digest}.json"
    if kept := _read(file):
        return kept
    measured = measure()
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(json.dumps(asdict(measured)))
        temporary.replace(file)  # a reader sees all of it or none
    except OSError:  # a full disk, say: the next process measures again
        temporary.unlink(missing_ok=True)
    return measured


def _read(file: Path) -> MeasuredDevice | None:
    try:
        kept = json.loads(file.read_text())
        measured = MeasuredDevice(DeviceRates(**kept["rates"]), kept["attention"], float(kept["measured_at"]))
    except (OSError, ValueError, KeyError, TypeError):  # absent, or not written by this version
        return None
    return measured if 0 <= time.time() - measured.measured_at < KEPT_FOR_S and measured.attention in KERNELS else None


def _identity(device: torch.device) -> dict[str, object]:
    """Return what tells this GPU with its software and settings from others."""
    code = [
        file.read_bytes()
        for name in ("offload", "llama", "models")
        for file in sorted((Path(__file__).parents[1] / name).glob("*.py"))
    ]
    return devices.machine_info(device) | {
        "versions": [_version(package) for package in PACKAGES],
        "environment": sorted(item for item in os.environ.items() if item[0].startswith(ENVIRONMENT)),
        "code": hashlib.sha256(b"".join(code)).hexdigest(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
