"""Read this machine's GPU state from the driver: NVIDIA's through NVML, AMD's through AMD SMI.

Values have the same meaning for every vendor, and are None if the driver does not report them. A vendor's module is
imported only if its driver is present.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

Vendor = Literal["nvidia", "amd"]


@dataclass(frozen=True)
class GpuIdentity:
    """The identity of a GPU, which does not change while the machine is up."""

    number: int  # the index in CUDA or HIP if all GPUs are visible
    vendor: Vendor
    name: str = ""  # the driver's name; empty if the GPU does not respond
    device_id: str | None = None  # PCI device id, such as 0x74a1
    architecture: str | None = None  # in the format that `workloads.api.recipes` reads, such as sm90 or gfx942
    uuid: str | None = None  # the serial number for AMD GPUs
    # domain:bus:device.function. A GPU's partitions differ only in the function, or not at all.
    pci_address: str | None = None
    memory_gib: float | None = None  # total memory of the GPU or partition
    compute_units: int | None = None  # streaming multiprocessors or compute units
    compute_partition: str | None = None  # how an Instinct GPU is divided, such as SPX (undivided) or CPX
    memory_partition: str | None = None  # memory partition mode, such as NPS1 or NPS4
    numa_node: int | None = None  # the host's NUMA node
    driver: str | None = None  # the driver version
    firmware: str | None = None  # the GPU's BIOS version

    @property
    def responds(self) -> bool:
        """Return whether the driver can read the GPU. Only the number of a GPU that fell off the bus is known."""
        return bool(self.name)


@dataclass(frozen=True)
class GpuLimits:
    """The limits set on a GPU, and the default limits. Clocks are those of the streaming multiprocessors."""

    power_limit_w: float | None = None
    power_default_w: float | None = None
    clock_limit_mhz: float | None = None
    clock_default_mhz: float | None = None
    clock_max_mhz: float | None = None


@dataclass(frozen=True)
class GpuErrors:
    """A GPU's error counts, over its lifetime (NVIDIA) or since the driver was loaded (AMD)."""

    ecc: bool | None = None  # whether error correction is on
    uncorrected_errors: int | None = None
    corrected_errors: int | None = None
    retired_pages: int | None = None  # memory pages or rows out of use because of errors
    pcie_replays: int | None = None  # packets that were resent


@dataclass(frozen=True)
class GpuLinks:
    """Links to the host and to other GPUs. The current PCIe generation drops while the GPU is idle."""

    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None  # the highest generation for the GPU in this machine
    pcie_generation_max: int | None = None  # the highest generation that the GPU supports
    links: int | None = None  # the number of NVLinks
    links_down: int | None = None  # the number of inactive NVLinks


@dataclass(frozen=True)
class GpuReading:
    clock_mhz: float | None = None  # streaming multiprocessor clock; the mean of the dies on an AMD GPU
    power_w: float | None = None
    # The counter of energy that only this device has drawn. The counter has an arbitrary start and never decreases.
    # None if there is no counter, or if the counter covers several devices.
    energy_j: float | None = None
    temperature_c: float | None = None  # hot-spot temperature if the GPU reports it, else die temperature
    memory_clock_mhz: float | None = None
    # A counter for each reason for a lower clock. Counters never decrease. A reason applied between two readings if its
    # counter rose. None if the GPU does not report reasons.
    slowdowns: Mapping[str, int] | None = None


# Slowdowns caused by faults of the machine (cooling, power supply). A measurement during a fault does not describe the
# GPU. The power cap is not a fault: every GPU runs at its power cap under full load.
TAINTING_SLOWDOWNS = {
    *("software_thermal", "hardware_slowdown", "hardware_thermal", "power_brake"),  # NVIDIA
    *("processor_hot", "socket_thermal", "regulator_thermal", "memory_thermal"),  # AMD
}


class Gpu(Protocol):
    interval_s: float  # the wait between readings, to keep their cost low

    @property
    def identity(self) -> GpuIdentity: ...

    def used_gib(self) -> float | None:
        """Return the memory used by all processes together."""

    def process_ids(self) -> set[int] | None:
        """Return the ids of the processes that compute on the GPU."""

    def limits(self) -> GpuLimits: ...

    def errors(self) -> GpuErrors: ...

    def links(self) -> GpuLinks: ...

    def read(self) -> GpuReading: ...


@contextmanager
def open_gpus() -> Iterator[list[Gpu]]:
    """Yield the GPUs in CUDA or HIP order, if there is a driver. Their methods work only within the `with` block."""
    from workloads.api.gpus import amd, nvidia

    with nvidia.open_gpus() as nvidia_gpus:
        yield [*nvidia_gpus, *amd.open_gpus()]
