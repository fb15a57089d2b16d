"""NVIDIA GPUs through NVML."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from workloads.api.gpus import GpuErrors, GpuIdentity, GpuLimits, GpuReading

# NVML's reasons for a lower clock, by their names here.
SLOWDOWNS = {
    "software_power_cap": "nvmlClocksEventReasonSwPowerCap",
    "software_thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hardware_slowdown": "nvmlClocksEventReasonHwSlowdown",
    "hardware_thermal": "nvmlClocksEventReasonHwThermalSlowdown",
    "power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
}


@contextlib.contextmanager
def open_gpus() -> Iterator[list[NvidiaGpu]]:
    """Open NVML and yield each GPU; an empty list without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield [NvidiaGpu(number, _handle(number)) for number in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _handle(number: int) -> Any:
    """Return NVML's handle; None for a GPU that no longer responds, such as one that has fallen off the bus."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        pynvml.nvmlDeviceGetName(handle)
        return handle


def _try(read: Callable[[], Any]) -> Any:
    """Return what `read` returns; None if NVML does not report it, as for some values of virtual or consumer GPUs."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


class NvidiaGpu:
    """A GPU that NVML reads (`workloads.api.gpus.Gpu`).

    NVML's power is an average over about the last second, its clock momentary.
    """

    interval_s = 0.02

    def __init__(self, number: int, handle: Any) -> None:
        """Wrap NVML's handle of the GPU; None for one that does not respond."""
        self._number, self._handle = number, handle
        self._slowdowns = Counter[str](dict.fromkeys(SLOWDOWNS, 0))

    @cached_property
    def identity(self) -> GpuIdentity:
        import pynvml as nvml

        gpu = self._handle
        if gpu is None:
            return GpuIdentity(self._number, "nvidia")
        pci = _try(lambda: nvml.nvmlDeviceGetPciInfo(gpu))
        capability = _try(lambda: nvml.nvmlDeviceGetCudaComputeCapability(gpu))
        memory_bytes = _try(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).total)
        address = _pci_address(pci) if pci else None
        return GpuIdentity(
            number=self._number,
            vendor="nvidia",
            name=nvml.nvmlDeviceGetName(gpu),
            device_id=f"0x{pci.pciDeviceId >> 16:04x}" if pci else None,
            architecture="sm{}{}".format(*capability) if capability else None,
            uuid=_try(lambda: nvml.nvmlDeviceGetUUID(gpu)),
            pci_address=address,
            memory_gib=memory_bytes / 2**30 if memory_bytes else None,
            numa_node=_numa_node(address) if address else None,
            driver=_try(nvml.nvmlSystemGetDriverVersion),
        )

    def used_gib(self) -> float | None:
        import pynvml as nvml

        # Version 2 of the structure does not count the driver's own memory as used.
        used_bytes = _try(lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle, nvml.nvmlMemory_v2).used)
        return None if used_bytes is None else used_bytes / 2**30

    def process_ids(self) -> set[int] | None:
        import pynvml as nvml

        processes = _try(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        return None if processes is None else {process.pid for process in processes}

    def limits(self) -> GpuLimits:
        import pynvml as nvml

        gpu, clock = self._handle, nvml.NVML_CLOCK_SM
        limit_mw = _try(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
        default_mw = _try(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu))
        return GpuLimits(
            power_limit_w=limit_mw / 1e3 if limit_mw else None,
            power_default_w=default_mw / 1e3 if default_mw else None,
            clock_limit_mhz=_try(lambda: nvml.nvmlDeviceGetApplicationsClock(gpu, clock)),
            clock_default_mhz=_try(lambda: nvml.nvmlDeviceGetDefaultApplicationsClock(gpu, clock)),
            clock_max_mhz=_try(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, clock)),
        )

    def errors(self) -> GpuErrors:
        import pynvml as nvml

        gpu = self._handle
        ecc = _try(lambda: nvml.nvmlDeviceGetEccMode(gpu))
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
        uncorrected = _try(lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, since))
        return GpuErrors(ecc=bool(ecc[0]) if ecc else None, uncorrected_errors=uncorrected)

    def read(self) -> GpuReading:
        import pynvml as nvml

        gpu = self._handle
        power_mw = _try(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
        energy_mj = _try(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))  # from Volta on
        bits = _try(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
        if bits is not None:  # momentary, so the counter counts the readings that had the reason
            self._slowdowns.update(name for name, constant in SLOWDOWNS.items() if bits & getattr(nvml, constant))
        return GpuReading(
            clock_mhz=_try(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            power_w=power_mw / 1e3 if power_mw is not None else None,
            energy_j=energy_mj / 1e3 if energy_mj else None,
            temperature_c=_try(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            memory_clock_mhz=_try(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            slowdowns=dict(self._slowdowns) if bits is not None else None,
        )


def _pci_address(pci: Any) -> str:
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _numa_node(address: str) -> int | None:
    """Return the NUMA node of a PCI device; None on a machine that has one node, where the kernel says -1."""
    try:
        node = int(Path("/sys/bus/pci/devices", address, "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
