"""A stand-in for what torch reports of an AMD GPU: its build for ROCm and the properties of the device.

It replaces values only: nothing runs on a GPU. Tests use it for the branches that torch.version.hip or the properties
of a device select. The properties are those that the hardware reports: rocminfo of an MI300X (304 compute units, 4 MiB
of L2 for each of eight dies) and of an MI355X, as quoted in ROCm/legacy-rocm-build#4414 and ROCm/rocm-libraries#9055.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch


@dataclass(frozen=True)
class StandInProperties:
    """The attributes of `torch.cuda.get_device_properties` that this project reads, and their neighbors."""

    name: str
    gcnArchName: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int = 4 * 2**20
    warp_size: int = 64
    uuid: str = "64633935-3432-6363-3532-343265653736"


MI300X = StandInProperties("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 9, 4, 304, 196_592 * 2**20)
MI355X = StandInProperties("AMD Instinct MI355X", "gfx950:sramecc+:xnack-", 9, 5, 256, 301_662_208 * 2**10)
MI250X = StandInProperties(
    "AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", 9, 0, 110, 65_520 * 2**20, L2_cache_size=8 * 2**20
)


@contextmanager
def amd_device(
    properties: StandInProperties = MI300X, *, hip: str = "7.2.26015", rocm: str = "7.2.1"
) -> Iterator[None]:
    """Let torch report a build for these versions of HIP and ROCm, and this device, until the block ends."""
    with (
        patch.object(torch.version, "hip", hip),
        patch.object(torch.version, "rocm", rocm, create=True),
        patch.object(torch.version, "cuda", None),
        patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
    ):
        yield
