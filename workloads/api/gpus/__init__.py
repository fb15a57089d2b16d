"""The GPUs of this machine as their driver reports them: NVIDIA's through NVML, AMD's through AMD SMI.

What they report is in the same terms for every vendor, and None where a driver does not report it. The drivers' modules
are imported where there is a driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

Vendor = Literal["nvidia", "amd"]


@dataclass(frozen=True)
class GpuIdentity:
    """What a GPU is. It does not change while the machine is up.

    Attributes:
        number: its number for CUDA or HIP where all GPUs are visible.
        name: the driver's name; empty if the GPU does not respond.
        device_id: PCI device id, such as 0x74a1.
        architecture: as `workloads.api.recipes` reads it, such as sm90 or gfx942.
        uuid: of an AMD GPU its serial number.
        pci_address: domain:bus:device.function. The partitions of a GPU differ in the function only, or not at all.
        memory_gib: all memory of the GPU, or of its partition, in GiB.
        compute_units: streaming multiprocessors or compute units.
        compute_partition: how an Instinct is divided, such as SPX (undivided) or CPX.
        memory_partition: such as NPS1 or NPS4.
        numa_node: of the host.
        driver: version.
    """

    number: int
    vendor: Vendor
    name: str = ""
    device_id: str | None = None
    architecture: str | None = None
    uuid: str | None = None
    pci_address: str | None = None
    memory_gib: float | None = None
    compute_units: int | None = None
    compute_partition: str | None = None
    memory_partition: str | None = None
    numa_node: int | None = None
    driver: str | None = None

    @property
    def responds(self) -> bool:
        """Return whether the driver can read the GPU: one that fell off the bus has a number only."""
        return bool(self.name)


@dataclass(frozen=True)
class GpuLimits:
    """The limits that are set on a GPU, and their defaults. The clock is that of the streaming multiprocessors."""

    power_limit_w: float | None = None
    power_default_w: float | None = None
    clock_limit_mhz: float | None = None
    clock_default_mhz: float | None = None
    clock_max_mhz: float | None = None


@dataclass(frozen=True)
class GpuErrors:
    """Errors of a GPU's memory.

    Attributes:
        ecc: error correction is on.
        uncorrected_errors: since the GPU was made (NVIDIA) or since the driver was loaded (AMD).
        retired_pages: pages that are no longer used because of errors.
    """

    ecc: bool | None = None
    uncorrected_errors: int | None = None
    retired_pages: int | None = None


@dataclass(frozen=True)
class GpuReading:
    """One reading of a GPU's sensors.

    Attributes:
        clock_mhz: of the streaming multiprocessors; of an AMD GPU the mean of its dies.
        temperature_c: of the hottest spot where the GPU reports it, else of the die.
        energy_j: a counter of the energy that this device alone has drawn, from any start; it never decreases. None if
            there is none, or if it is of several devices together.
        slowdowns: by reason for a lower clock a counter that never decreases. The reason was in force between two
            readings if its counter rose. None if the GPU does not report reasons.
    """

    clock_mhz: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    memory_clock_mhz: float | None = None
    slowdowns: Mapping[str, int] | None = None


# Slowdowns that are faults of the machine (cooling, power supply): a measurement under them does not describe the GPU.
# Every GPU runs at its power cap under full load.
TAINTING_SLOWDOWNS = {
    *("software_thermal", "hardware_slowdown", "hardware_thermal", "power_brake"),  # NVIDIA
    *("processor_hot", "socket_thermal", "regulator_thermal", "memory_thermal"),  # AMD
}


class Gpu(Protocol):
    """One GPU of this machine.

    Attributes:
        interval_s: how long to wait between two readings, so that reading costs little.
    """

    interval_s: float

    @property
    def identity(self) -> GpuIdentity: ...

    def used_gib(self) -> float | None:
        """Return the memory in use by all processes."""

    def process_ids(self) -> set[int] | None:
        """Return the processes that compute on the GPU."""

    def limits(self) -> GpuLimits: ...

    def errors(self) -> GpuErrors: ...

    def read(self) -> GpuReading: ...


@contextmanager
def open_gpus() -> Iterator[list[Gpu]]:
    """Yield the GPUs of this machine in the order of the numbers that CUDA or HIP gives them; none without a driver.

    A GPU's methods work only within the block.
    """
    from workloads.api.gpus import amd, nvidia

    with nvidia.open_gpus() as nvidia_gpus:
        yield [*nvidia_gpus, *amd.open_gpus()]
