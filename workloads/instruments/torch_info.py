"""Print what torch says of its build and devices, as a line of JSON: python -m workloads.instruments.torch_info."""

from __future__ import annotations

import json
from typing import Any

import torch

PROPERTIES = (
    *("name", "major", "minor", "gcnArchName", "total_memory", "multi_processor_count", "L2_cache_size", "warp_size"),
    *("max_threads_per_multi_processor", "shared_memory_per_block", "pci_bus_id", "is_integrated"),
)


def describe_torch() -> dict[str, Any]:
    """Return torch's version, what it was built for, and the properties of each visible device."""
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "available": torch.cuda.is_available(),
        "architectures": torch.cuda.get_arch_list(),
        "blas_library": str(torch.backends.cuda.preferred_blas_library()),
        "devices": [_describe_device(number) for number in range(torch.cuda.device_count())],
    }


def _describe_device(number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    return {name: getattr(properties, name) for name in PROPERTIES if hasattr(properties, name)}


if __name__ == "__main__":
    print(json.dumps(describe_torch()))
