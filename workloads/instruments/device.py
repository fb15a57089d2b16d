"""The device that a rank runs on: selection, memory and description."""

from __future__ import annotations

import gc
import socket

import torch

from workloads.api.contract import Rank, Scalar
from workloads.api.host import cpu_architecture, cpu_name
from workloads.instruments.telemetry import power_limit_w


def device_of(rank: Rank) -> torch.device:
    """Return the torch device of this rank. A worker sees its own GPU only, whose index is therefore 0."""
    return torch.device("cpu") if rank.device == "cpu" else torch.device(rank.device, 0)


def architecture(device: torch.device) -> str:
    """Return the architecture as `workloads.api.recipes` reads it: `sm90`, `gfx942:…` or `cpu …`."""
    if device.type == "cpu":
        return cpu_architecture()
    properties = torch.cuda.get_device_properties(device)
    # A CUDA build has gcnArchName too, with the GPU's name in it.
    return str(properties.gcnArchName) if torch.version.hip else f"sm{properties.major}{properties.minor}"


def release_memory(device: torch.device) -> None:
    """Free the memory of the previous trial and reset the peak of allocated memory."""
    gc.collect()  # a compiled module is a reference cycle, which keeps its weights until it is collected
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def machine_info(device: torch.device) -> dict[str, Scalar]:
    """Return the device's name and properties, the host, and the versions of torch, CUDA and HIP."""
    info: dict[str, Scalar] = {"torch": str(torch.__version__), "host": socket.gethostname()}
    if device.type == "cpu":
        return info | {"device": cpu_name(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return info | {
        "device": properties.name,
        "device_memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_units": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "architecture": architecture(device),
        "gpu_uuid": str(properties.uuid),
        "power_limit_w": power_limit_w(device),
    }
