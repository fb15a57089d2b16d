"""The GPUs of this machine as their driver reports them: NVIDIA's through NVML, AMD's through AMD SMI.

Needs the standard library only; the drivers' modules are imported where there is a driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workloads.api.gpus import amd, nvidia
from workloads.api.gpus.interface import Gpu


@contextmanager
def open_gpus() -> Iterator[list[Gpu]]:
    """Yield the GPUs of this machine in the order of the numbers that CUDA or HIP gives them; none without a driver.

    A GPU's methods work only within the block.
    """
    with nvidia.open_gpus() as nvidia_gpus:
        yield [*nvidia_gpus, *amd.open_gpus()]
