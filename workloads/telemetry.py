"""Record a GPU's clock, power, temperature and the reasons for a lower clock during a measurement.

NVIDIA GPUs are read through NVML, whose power is an average over about the last second and whose clock is momentary.
AMD GPUs are read through AMD SMI by `torch.cuda`, which does not report the reasons for a lower clock. Without either
(a CPU, ROCm without amdsmi) there are no readings.
"""

from __future__ import annotations

import importlib.util
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pynvml as nvml
import torch

from workloads.api.contract import Scalar

INTERVAL_S = 0.02

# NVML's reasons for a lower clock, by their names here. The tainting ones are faults of the machine (cooling, power
# supply): a measurement under them does not describe the GPU. Every GPU runs at its power cap under full load.
REASONS = {
    "software_power_cap": nvml.nvmlClocksEventReasonSwPowerCap,
    "software_thermal": nvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hardware_slowdown": nvml.nvmlClocksEventReasonHwSlowdown,
    "hardware_thermal": nvml.nvmlClocksEventReasonHwThermalSlowdown,
    "power_brake": nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
TAINTING = {"software_thermal", "hardware_slowdown", "hardware_thermal", "power_brake"}


@dataclass
class GpuReadings:
    """The readings taken during one measurement.

    Attributes:
        reasons: the keys of `REASONS` seen in any reading.
        reasons_known: the GPU reports the reasons for a lower clock.
    """

    clocks_mhz: list[float] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    temperatures_c: list[float] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    reasons_known: bool = False

    @property
    def tainted(self) -> bool:
        """Return whether the machine slowed the GPU down."""
        return bool(self.reasons & TAINTING)

    def metrics(self) -> dict[str, float]:
        """Return the median clock in MHz and the highest power in W and temperature in °C, each if it was read."""
        metrics = {}
        if self.clocks_mhz:
            metrics["sm_clock_mhz"] = float(statistics.median(self.clocks_mhz))
        if self.powers_w:
            metrics["power_w"] = max(self.powers_w)
        if self.temperatures_c:
            metrics["temperature_c"] = float(max(self.temperatures_c))
        return metrics

    def machine_info(self) -> dict[str, Scalar]:
        """Return the reasons for a lower clock and whether they taint the measurement; empty if not known."""
        if not self.reasons_known:
            return {}
        return {"slowed_by": " ".join(sorted(self.reasons)), "tainted": self.tainted}


@contextmanager
def monitor_gpu(device: torch.device) -> Iterator[GpuReadings]:
    """Read the GPU's state every 20 ms, at least once, until the block ends."""
    readings = GpuReadings()
    read = _reader(device)
    if read is None:
        yield readings
        return
    done = threading.Event()

    def read_until_done() -> None:
        while not done.wait(INTERVAL_S):
            read(readings)

    thread = threading.Thread(target=read_until_done, daemon=True)
    thread.start()
    try:
        yield readings
        read(readings)
    finally:
        done.set()
        thread.join()


def _reader(device: torch.device) -> Callable[[GpuReadings], None] | None:
    """Return a function that takes one reading of the device; None if the device cannot be read."""
    if device.type != "cuda":
        return None
    if torch.version.hip:
        return partial(_read_amdsmi, device) if importlib.util.find_spec("amdsmi") else None
    try:
        return partial(_read_nvml, _handle(device))
    except nvml.NVMLError:
        return None


def _handle(device: torch.device) -> Any:
    """Return NVML's handle. It is found by UUID: torch's indices count the visible devices only, NVML's all of them."""
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def power_limit_w(device: torch.device) -> float | None:
    """Return the power limit in W that is enforced on an NVIDIA GPU now; None if it is not known."""
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        return float(nvml.nvmlDeviceGetEnforcedPowerLimit(_handle(device)) / 1e3)
    except nvml.NVMLError:
        return None


def _read_nvml(handle: Any, readings: GpuReadings) -> None:
    try:
        readings.clocks_mhz.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        readings.powers_w.append(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        readings.temperatures_c.append(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        readings.reasons |= {name for name, bit in REASONS.items() if bits & bit}
        readings.reasons_known = True
    except nvml.NVMLError:
        pass  # a value that this GPU does not report is missing, and so is its metric


def _read_amdsmi(device: torch.device, readings: GpuReadings) -> None:
    # torch returns W here, although its documentation says mW, and zero for a value that the GPU does not report.
    sensors = (
        (readings.clocks_mhz, torch.cuda.clock_rate),
        (readings.powers_w, torch.cuda.power_draw),
        (readings.temperatures_c, torch.cuda.temperature),
    )
    for values, read in sensors:
        try:
            value = float(read(device))
        except Exception:  # amdsmi's own errors, whose classes cannot be imported where it is not installed
            continue
        if value:
            values.append(value)
