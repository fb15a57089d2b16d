"""A rank's device: its memory, its caches, and its properties as torch reports them.

`python -m workloads.instruments.device` prints torch's build and devices as a line of JSON.
"""

import gc
import json
import socket
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

from workloads.api.contract import Rank, Scalar
from workloads.api.host import cpu_architecture, cpu_name
from workloads.instruments.telemetry import power_limit_w

MIB = 2**20
Function = TypeVar("Function", bound=Callable[..., Any])
# Cache sizes of AMD's data center GPUs in MiB: a device's whole L2 plus its Infinity Cache, which HIP does not report
# (https://rocm.docs.amd.com, "AMD GPU specifications"). hipDeviceProp's l2CacheSize is per die.
AMD_CACHES_MIB = {"gfx908": 8, "gfx90a": 8, "gfx942": 32 + 256, "gfx950": 32 + 256}
# A flush covers FLUSH_FACTOR times the largest cache: with random replacement, exp(-4) = 2% of a step's lines remain. A
# flush covers at least LEAST_FLUSH_MIB, because server processors have up to about 400 MB for all cores.
FLUSH_FACTOR = 4
LEAST_FLUSH_MIB = CPU_FLUSH_MIB = 512
PROPERTIES = (
    *("name", "major", "minor", "gcnArchName", "total_memory", "multi_processor_count", "L2_cache_size", "warp_size"),
    *("max_threads_per_multi_processor", "shared_memory_per_block", "pci_bus_id", "is_integrated"),
)


def device_of(rank: Rank) -> torch.device:
    """Return this rank's torch device. A worker sees only its own GPU, so the index is always 0."""
    return torch.device("cpu") if rank.device == "cpu" else torch.device(rank.device, 0)


def architecture(device: torch.device) -> str:
    """Return the architecture in the format of `workloads.api.recipes`: `sm90`, `gfx942:…` or `cpu …`."""
    if device.type == "cpu":
        return cpu_architecture()
    properties = torch.cuda.get_device_properties(device)
    # A CUDA build also has gcnArchName, which contains the GPU's name.
    return str(properties.gcnArchName) if torch.version.hip else f"sm{properties.major}{properties.minor}"


def compiled_on_gpu(function: Function) -> Function:
    """Compile a function only when it is first used on a GPU, because `torch.compile` imports 2,000 modules in 2 s.

    The device is that of the first argument, a tensor.
    """
    compiled = cache(lambda: torch.compile(function, dynamic=False))

    @wraps(function)
    def call(first: torch.Tensor, *others: Any) -> Any:
        return (function if first.device.type == "cpu" else compiled())(first, *others)

    return cast("Function", call)


def release_memory(device: torch.device) -> None:
    """Free the previous trial's memory and reset the peak of allocated memory."""
    gc.collect()  # a compiled module is a reference cycle that keeps its weights until collected
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


def flush_mib(device: torch.device) -> int:
    """Return the MiB that a flush of a device's caches reads and writes. For a GPU outside the table, the size is based
    on the L2 cache."""
    if device.type == "cpu":
        return CPU_FLUSH_MIB
    l2_mib = torch.cuda.get_device_properties(device).L2_cache_size // MIB
    return max(LEAST_FLUSH_MIB, FLUSH_FACTOR * AMD_CACHES_MIB.get(architecture(device).partition(":")[0], l2_mib))


def build_flush(device: torch.device) -> Callable[[], object]:
    """Return a function that evicts a step's data from a device's caches.

    On a GPU, a flush reads and writes every byte of a buffer, because writes alone are not documented to evict lines
    from a memory-side cache. A CPU's caches allocate lines on writes, so a flush only writes, twice as fast.
    """
    buffer = torch.zeros(flush_mib(device) * MIB // 4, dtype=torch.int32, device=device)
    return buffer.zero_ if device.type == "cpu" else lambda: buffer.add_(1)


def describe_torch() -> dict[str, Any]:
    """Return torch's version, the platform that it was built for, and the properties of each visible device."""
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "available": torch.cuda.is_available(),
        "architectures": torch.cuda.get_arch_list(),
        "blas_library": str(torch.backends.cuda.preferred_blas_library()),
        "devices": [{name: getattr(gpu, name) for name in PROPERTIES if hasattr(gpu, name)} for gpu in devices],
    }


if __name__ == "__main__":
    print(json.dumps(describe_torch()))
