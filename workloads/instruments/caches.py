"""Flush a device's caches, the largest of which may belong to its memory."""

from __future__ import annotations

from functools import partial

import torch

from workloads.instruments import device as devices

MIB = 2**20

# Caches of AMD's data center GPUs in MiB: all L2 of a device and the cache of its memory (Infinity Cache), which HIP
# does not report (https://rocm.docs.amd.com, "AMD GPU specifications"). hipDeviceProp's l2CacheSize is of one die.
AMD_CACHES_MIB = {"gfx908": 8, "gfx90a": 8, "gfx942": 32 + 256, "gfx950": 32 + 256}

# The flush is so many times the largest cache: where lines are replaced at random, exp(-4) = 2% of a step's lines stay.
# It is at least LEAST_FLUSH_MIB: server processors have up to about 400 MB for all cores.
FLUSH_FACTOR = 4
LEAST_FLUSH_MIB = 512


def flush_mib(device: torch.device) -> int:
    """Return the MiB that a flush of the device's caches reads and writes."""
    return max(LEAST_FLUSH_MIB, FLUSH_FACTOR * largest_cache_mib(device))


def largest_cache_mib(device: torch.device) -> int:
    """Return the MiB of a GPU's last-level cache, or of its L2 for a GPU that is not in the table; 0 for a CPU."""
    if device.type == "cpu":
        return 0
    architecture = devices.architecture(device).partition(":")[0]
    properties = torch.cuda.get_device_properties(device)
    return AMD_CACHES_MIB.get(architecture, properties.L2_cache_size // MIB)


class Flush:
    """Evicts a step's data from a device's caches when it is called.

    On a GPU it reads and writes every byte of a buffer: whether writes alone displace lines of a cache that belongs to
    the memory is not documented. A processor's caches allocate a line for a write, so that it only writes, twice as
    fast.
    """

    def __init__(self, device: torch.device) -> None:
        buffer = torch.zeros(flush_mib(device) * MIB // 4, dtype=torch.int32, device=device)
        self._touch = partial(write, buffer) if device.type == "cpu" else partial(read_and_write, buffer)

    def __call__(self) -> None:
        self._touch()


def write(buffer: torch.Tensor) -> None:
    """Write every element of a buffer."""
    buffer.zero_()


def read_and_write(buffer: torch.Tensor) -> None:
    """Read and write every element of a buffer."""
    buffer.add_(1)
