"""Read AMD GPUs through AMD SMI, the Python package `amdsmi` that comes with ROCm.

Sources of fields and units: ROCm/amdsmi, py-interface/README.md and amdsmi_interface.py. Any call may raise, and any
value may be "N/A", especially on SR-IOV virtual functions.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

from workloads.api import visible_devices
from workloads.api.gpus import GpuErrors, GpuIdentity, GpuLimits, GpuLinks, GpuReading
from workloads.tables import read_toml

SLOWDOWNS: dict[str, str] = read_toml(__file__, "slowdowns.toml")["amd"]
MIB_PER_GIB = 1024
# Several devices may share a package, and only the package has an energy counter: for example, the dies of an MI250X
# and the partitions of a divided Instinct GPU.
DIVIDED_PACKAGE = re.compile("MI250")
WHOLE = ("SPX", None)
MIN_MICROWATTS = 1e5  # power caps are in microwatts, or in watts in some releases; no GPU draws 100 kW


def open_gpus() -> list[AmdGpu]:
    """Return the GPUs in HIP order, or an empty list if AMD SMI or a driver is missing."""
    module = load_amdsmi()
    if module is None:
        return []
    try:  # never closes AMD SMI, which does not count openings: torch and Ray use it in this process
        module.amdsmi_init()
        handles = module.amdsmi_get_processor_handles()
    except module.AmdSmiException:
        return []
    gpus = [AmdGpu(module, index, handle) for index, handle in enumerate(handles)]
    return sorted(gpus, key=lambda gpu: gpu.identity.number)


def load_amdsmi() -> ModuleType | None:
    try:
        import amdsmi
    except Exception:  # not only ImportError: without ROCm's library, the package from PyPI raises KeyError
        return None
    return amdsmi


class AmdGpu:
    """A GPU read through AMD SMI (`workloads.api.gpus.Gpu`)."""

    interval_s = 0.1  # one call reads a table of several hundred values through the kernel

    def __init__(self, module: ModuleType, index: int, handle: Any) -> None:
        self._module, self._index, self._handle = module, index, handle

    @cached_property
    def identity(self) -> GpuIdentity:
        asic = self._fields("amdsmi_get_gpu_asic_info")
        number = _number(self._fields("amdsmi_get_gpu_enumeration_info").get("hip_id"))
        memory_mib = _number(self._fields("amdsmi_get_gpu_vram_usage").get("vram_total"))
        units = _number(asic.get("num_compute_units"))
        numa_node = _number(self._call("amdsmi_topo_get_numa_node_number"))
        return GpuIdentity(
            # AMD SMI orders GPUs by PCI address, HIP by its own numbers, which AMD SMI reports since ROCm 6.4.
            number=self._index if number is None else int(number),
            vendor="amd",
            name=(_text(asic.get("market_name")) or "AMD GPU") if asic else "",
            device_id=_text(asic.get("device_id")),
            architecture=_text(asic.get("target_graphics_version")),
            uuid=_text(asic.get("asic_serial")),
            pci_address=_text(self._call("amdsmi_get_gpu_device_bdf")),
            memory_gib=memory_mib / MIB_PER_GIB if memory_mib else None,
            compute_units=int(units) if units else None,
            compute_partition=_text(self._call("amdsmi_get_gpu_compute_partition")),
            memory_partition=_text(self._call("amdsmi_get_gpu_memory_partition")),
            numa_node=int(numa_node) if numa_node is not None and numa_node < 2**16 else None,  # -1 is unsigned here
            driver=_text(self._fields("amdsmi_get_gpu_driver_info").get("driver_version")),
            firmware=_text(self._fields("amdsmi_get_gpu_vbios_info").get("version")),
        )

    def used_gib(self) -> float | None:
        used_mib = _number(self._fields("amdsmi_get_gpu_vram_usage").get("vram_used"))
        return None if used_mib is None else used_mib / MIB_PER_GIB

    def process_ids(self) -> set[int] | None:
        processes = self._call("amdsmi_get_gpu_process_list")
        if not isinstance(processes, list):
            return None
        return {int(pid) for process in processes if (pid := _number(process.get("pid"))) is not None}

    def limits(self) -> GpuLimits:
        power = self._fields("amdsmi_get_power_cap_info")
        clock_type = getattr(self._module, "AmdSmiClkType", None)
        clock = self._fields("amdsmi_get_clock_info", clock_type.GFX) if clock_type else {}
        return GpuLimits(
            power_limit_w=_watts(power.get("power_cap")),
            power_default_w=_watts(power.get("default_power_cap")),
            clock_max_mhz=_number(clock.get("max_clk")),
        )

    def errors(self) -> GpuErrors:
        counts = self._fields("amdsmi_get_gpu_total_ecc_count")
        uncorrected = _number(counts.get("uncorrectable_count"))
        corrected = _number(counts.get("correctable_count"))
        pages = self._call("amdsmi_get_gpu_bad_page_info")
        replays = _number((self._fields("amdsmi_get_pcie_info").get("pcie_metric") or {}).get("pcie_replay_count"))
        return GpuErrors(
            ecc=True if counts else None,  # GPUs without error correction do not support the call
            uncorrected_errors=None if uncorrected is None else int(uncorrected),
            corrected_errors=None if corrected is None else int(corrected),
            retired_pages=len(pages) if isinstance(pages, list) else None,
            pcie_replays=None if replays is None else int(replays),
        )

    def links(self) -> GpuLinks:
        pcie = self._fields("amdsmi_get_pcie_info")
        static, metric = (pcie.get(name) or {} for name in ("pcie_static", "pcie_metric"))
        widths = [_number(static.get("max_pcie_width")), _number(metric.get("pcie_width"))]
        most, width = (None if value is None else int(value) for value in widths)
        return GpuLinks(pcie_width=width, pcie_width_max=most)

    def read(self) -> GpuReading:
        values = self._fields("amdsmi_get_gpu_metrics_info")
        clocks_mhz = _numbers(values.get("current_gfxclks")) or _numbers([values.get("current_gfxclk")])
        powers_w = _numbers([values.get("current_socket_power"), values.get("average_socket_power")])
        counters = {name: _number(values.get(key)) for name, key in SLOWDOWNS.items()}
        slowdowns = {name: int(count) for name, count in counters.items() if count is not None}
        return GpuReading(
            clock_mhz=statistics.mean(clocks_mhz) if clocks_mhz else None,
            power_w=powers_w[0] if powers_w else None,
            energy_j=self._energy_j(),
            temperature_c=_number(values.get("temperature_hotspot")),
            memory_clock_mhz=_number(values.get("current_uclk")),
            slowdowns=slowdowns or None,
        )

    def _energy_j(self) -> float | None:
        """Return the device's energy counter, or None if the counter covers a package with several devices. The count
        times the resolution is the energy in microjoules (py-interface/README.md, amdsmi_get_energy_count). Before ROCm
        6.4, the field is called `power`. Virtual machines have no counter."""
        if self.identity.compute_partition not in WHOLE or DIVIDED_PACKAGE.search(self.identity.name):
            return None
        fields = self._fields("amdsmi_get_energy_count")
        count = _number(fields.get("energy_accumulator", fields.get("power")))
        resolution_uj = _number(fields.get("counter_resolution"))
        return count * resolution_uj / 1e6 if count and resolution_uj else None

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call a function of AMD SMI for this GPU. Return None if the function raises or this release lacks it."""
        try:
            return getattr(self._module, function)(self._handle, *arguments)
        except Exception:  # from AMD SMI, or from ctypes if the library is older than the package
            return None

    def _fields(self, function: str, *arguments: Any) -> Mapping[str, Any]:
        value = self._call(function, *arguments)
        return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value not in ("", "N/A") else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(values: Any) -> list[float]:
    """Return the positive numbers in a list. An absent or sleeping unit reports N/A or zero."""
    return [number for value in (values if isinstance(values, list) else []) if (number := _number(value))]


def _watts(power: Any) -> float | None:
    number = _number(power)
    if not number:
        return None
    return number / 1e6 if number >= MIN_MICROWATTS else number


def visible_numbers(environment: Mapping[str, str]) -> list[int] | None:
    """Return HIP's numbers for the visible GPUs; None if all are visible or if the environment lists UUIDs."""
    variables = dict(environment)
    visible_devices.unify(variables)
    numbers = variables.get(visible_devices.HIP, "").split(",")
    return [int(number) for number in numbers] if all(number.strip().isdigit() for number in numbers) else None
