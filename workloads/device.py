"""The device a rank runs on: choosing it, and what can be said of it."""

from __future__ import annotations

import gc
import socket

import torch

from workloads.api.contract import Rank, Scalar
from workloads.api.host import cpu_architecture, cpu_name
from workloads.telemetry import power_limit_w


def of(rank: Rank) -> torch.device:
    """The torch device of this rank: a worker sees no GPU but its own."""
    return torch.device("cpu") if rank.device == "cpu" else torch.device(rank.device, 0)


def architecture(device: torch.device) -> str:
    """As `workloads/recipes.py` knows it: `sm90`, `gfx942:…` or `cpu …`."""
    if device.type == "cpu":
        return cpu_architecture()
    properties = torch.cuda.get_device_properties(device)
    # A CUDA build has the field of AMD's name too, with the GPU's name in it.
    return str(properties.gcnArchName) if torch.version.hip else f"sm{properties.major}{properties.minor}"


def fresh(device: torch.device) -> None:
    """Let go of what the trial before has left: a compiled module is a cycle, and keeps its weights until collected."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def machine_info(device: torch.device) -> dict[str, Scalar]:
    """What a stranger needs to believe a figure: the device's own name, and the versions under it."""
    found: dict[str, Scalar] = {"torch": str(torch.__version__), "host": socket.gethostname()}
    if device.type == "cpu":
        return found | {"device": cpu_name(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "device": properties.name,
        "device_memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_units": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "architecture": architecture(device),
        "gpu_uuid": str(properties.uuid),
        "power_limit_w": power_limit_w(device),
    }
