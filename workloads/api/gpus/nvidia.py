"""Read NVIDIA GPUs through NVML."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from workloads.api.gpus import GpuErrors, GpuIdentity, GpuLimits, GpuLinks, GpuReading
from workloads.tables import read_toml

SLOWDOWNS: dict[str, str] = read_toml(__file__, "slowdowns.toml")["nvidia"]
# Errors that programs cause, not the GPU (NVIDIA's XID catalog). A killed program causes some of these errors.
PROGRAM_XIDS = {13, 31, 43, 45, 68, 109}


@contextlib.contextmanager
def open_gpus() -> Iterator[list[NvidiaGpu]]:
    """Open NVML and yield the list of GPUs, which is empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield [NvidiaGpu(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


class NvidiaGpu:
    """A GPU read through NVML (`workloads.api.gpus.Gpu`). Power is a mean over about a second; clocks are instantaneous
    values.

    If a GPU no longer responds, for example because it fell off the bus, only its number is known.
    """

    interval_s = 0.02

    def __init__(self, nvml: ModuleType, number: int) -> None:
        self._nvml, self._number, self._handle = nvml, number, None
        self._slowdowns = Counter[str](dict.fromkeys(SLOWDOWNS, 0))
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            nvml.nvmlDeviceGetName(handle)
            self._handle = handle

    def _get(self, function: str, *arguments: Any) -> Any:
        """Call NVML. Return None if the value is not reported, as on some virtual and consumer GPUs."""
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{function}")(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    @cached_property
    def identity(self) -> GpuIdentity:
        nvml = self._nvml
        if self._handle is None:
            return GpuIdentity(self._number, "nvidia")
        pci, capability, memory = self._get("PciInfo"), self._get("CudaComputeCapability"), self._get("MemoryInfo")
        address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if pci else None
        numa_node, driver = -1, None  # the kernel reports -1 on a machine with one node
        with contextlib.suppress(OSError, ValueError):
            numa_node = int(Path("/sys/bus/pci/devices", address or "", "numa_node").read_text())
        with contextlib.suppress(nvml.NVMLError):
            driver = nvml.nvmlSystemGetDriverVersion()
        return GpuIdentity(
            number=self._number,
            vendor="nvidia",
            name=nvml.nvmlDeviceGetName(self._handle),
            device_id=f"0x{pci.pciDeviceId >> 16:04x}" if pci else None,
            architecture="sm{}{}".format(*capability) if capability else None,
            uuid=self._get("UUID"),
            pci_address=address,
            memory_gib=memory.total / 2**30 if memory and memory.total else None,
            numa_node=numa_node if numa_node >= 0 else None,
            driver=driver,
            firmware=self._get("VbiosVersion"),
        )

    def used_gib(self) -> float | None:
        # Version 2 of the structure does not count the driver's own memory as used.
        memory = self._get("MemoryInfo", self._nvml.nvmlMemory_v2)
        return None if memory is None else memory.used / 2**30

    def process_ids(self) -> set[int] | None:
        processes = self._get("ComputeRunningProcesses")
        return None if processes is None else {process.pid for process in processes}

    def limits(self) -> GpuLimits:
        limit_mw, default_mw = self._get("EnforcedPowerLimit"), self._get("PowerManagementDefaultLimit")
        clock = self._nvml.NVML_CLOCK_SM
        return GpuLimits(
            power_limit_w=limit_mw / 1e3 if limit_mw else None,
            power_default_w=default_mw / 1e3 if default_mw else None,
            clock_limit_mhz=self._get("ApplicationsClock", clock),
            clock_default_mhz=self._get("DefaultApplicationsClock", clock),
            clock_max_mhz=self._get("MaxClockInfo", clock),
        )

    def errors(self) -> GpuErrors:
        ecc, nvml = self._get("EccMode"), self._nvml
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        uncorrected, corrected = (self._get("TotalEccErrors", kind, nvml.NVML_AGGREGATE_ECC) for kind in kinds)
        rows = self._get("RemappedRows")  # correctable, uncorrectable and pending errors, and a failure
        return GpuErrors(
            ecc=bool(ecc[0]) if ecc else None,
            uncorrected_errors=uncorrected,
            corrected_errors=corrected,
            retired_pages=rows[0] + rows[1] if rows else None,
            pcie_replays=self._get("PcieReplayCounter"),
        )

    def links(self) -> GpuLinks:
        states = [self._get("NvLinkState", link) for link in range(self._nvml.NVML_NVLINK_MAX_LINKS)]
        known = [state for state in states if state is not None]
        return GpuLinks(
            pcie_width=self._get("CurrPcieLinkWidth"),
            pcie_width_max=self._get("MaxPcieLinkWidth"),
            pcie_generation=self._get("MaxPcieLinkGeneration"),
            pcie_generation_max=self._get("GpuMaxPcieLinkGeneration"),
            # All links are inactive on a machine without an NVLink bridge or switch.
            links=len(known) if any(known) else None,
            links_down=known.count(0) if any(known) else None,
        )

    def read(self) -> GpuReading:
        nvml = self._nvml
        power_mw, energy_mj = self._get("PowerUsage"), self._get("TotalEnergyConsumption")  # energy: since Volta
        bits = self._get("CurrentClocksEventReasons")
        if bits is not None:  # reasons are momentary, so each counter counts the readings with its reason
            self._slowdowns.update(name for name, constant in SLOWDOWNS.items() if bits & getattr(nvml, constant))
        return GpuReading(
            clock_mhz=self._get("ClockInfo", nvml.NVML_CLOCK_SM),
            power_w=power_mw / 1e3 if power_mw is not None else None,
            energy_j=energy_mj / 1e3 if energy_mj else None,
            temperature_c=self._get("Temperature", nvml.NVML_TEMPERATURE_GPU),
            memory_clock_mhz=self._get("ClockInfo", nvml.NVML_CLOCK_MEM),
            slowdowns=dict(self._slowdowns) if bits is not None else None,
        )


class XidWatch:
    """Collects this machine's XID errors since this object was created, if a driver reports them."""

    def __init__(self) -> None:
        import pynvml

        self._nvml, self._events, self._xids = pynvml, None, defaultdict[int, list[int]](list)
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._events = pynvml.nvmlEventSetCreate()
            for number in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def read(self) -> dict[int, list[int]]:
        """Return the errors since creation, keyed by GPU number, except errors that programs cause."""
        with contextlib.suppress(self._nvml.NVMLError):  # a timeout if there are no more events
            while self._events is not None:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventData not in PROGRAM_XIDS:
                    self._xids[self._nvml.nvmlDeviceGetIndex(event.device)].append(int(event.eventData))
        return dict(self._xids)
