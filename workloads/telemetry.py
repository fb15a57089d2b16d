"""What a GPU was at while a figure was taken: its clock, power, temperature, and why it ran slower if it did.

Read through NVML, whose power is an average over about the last second and whose clock is of the moment; on an AMD GPU
through AMD SMI, as `torch.cuda` reads it, where the reasons for a lower clock are not to be had. Where there is neither
(a CPU, a ROCm without amdsmi) nothing is known, and nothing is made up.
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

# NVML's reasons for a lower clock, by the word used here. The tainting ones are of the machine, not of the work: a
# figure taken under them says nothing about the GPU. A power cap is how every GPU runs under a full load.
REASONS = {
    "software_power_cap": nvml.nvmlClocksEventReasonSwPowerCap,
    "software_thermal": nvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hardware_slowdown": nvml.nvmlClocksEventReasonHwSlowdown,
    "hardware_thermal": nvml.nvmlClocksEventReasonHwThermalSlowdown,
    "power_brake": nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
TAINTING = {"software_thermal", "hardware_slowdown", "hardware_thermal", "power_brake"}


@dataclass
class Watch:
    """The readings taken during one measurement."""

    clocks_mhz: list[float] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    temperatures_c: list[float] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    reasons_known: bool = False

    @property
    def tainted(self) -> bool:
        """Whether the machine slowed the GPU down."""
        return bool(self.reasons & TAINTING)

    def metrics(self) -> dict[str, float]:
        """The median clock in MHz, and the highest power in W and temperature in °C; what was not read is not there."""
        metrics = {}
        if self.clocks_mhz:
            metrics["sm_clock_mhz"] = float(statistics.median(self.clocks_mhz))
        if self.powers_w:
            metrics["power_w"] = max(self.powers_w)
        if self.temperatures_c:
            metrics["temperature_c"] = float(max(self.temperatures_c))
        return metrics

    def machine_info(self) -> dict[str, Scalar]:
        """Why the clock was lower than it could be, and whether that spoils the figure."""
        if not self.reasons_known:
            return {}
        return {"slowed_by": " ".join(sorted(self.reasons)), "tainted": self.tainted}


@contextmanager
def watching(device: torch.device) -> Iterator[Watch]:
    """Read the GPU's state every 20 ms, once at least, until the block ends."""
    watch = Watch()
    read = _reader(device)
    if read is None:
        yield watch
        return
    done = threading.Event()

    def read_until_done() -> None:
        while not done.wait(INTERVAL_S):
            read(watch)

    reader = threading.Thread(target=read_until_done, daemon=True)
    reader.start()
    try:
        yield watch
        read(watch)
    finally:
        done.set()
        reader.join()


def _reader(device: torch.device) -> Callable[[Watch], None] | None:
    """What takes one reading of a torch device, which counts among the visible ones only; None where nothing can."""
    if device.type != "cuda":
        return None
    if torch.version.hip:
        return partial(_read_amdsmi, device) if importlib.util.find_spec("amdsmi") else None
    try:
        return partial(_read_nvml, _handle(device))
    except nvml.NVMLError:
        return None


def _handle(device: torch.device) -> Any:
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def power_limit_w(device: torch.device) -> float | None:
    """What an NVIDIA GPU may draw, as it is enforced now; None where that is not known."""
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        return float(nvml.nvmlDeviceGetEnforcedPowerLimit(_handle(device)) / 1e3)
    except nvml.NVMLError:
        return None


def _read_nvml(handle: Any, watch: Watch) -> None:
    try:
        watch.clocks_mhz.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        watch.powers_w.append(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        watch.temperatures_c.append(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        watch.reasons |= {name for name, bit in REASONS.items() if bits & bit}
        watch.reasons_known = True
    except nvml.NVMLError:
        pass  # a reading that this GPU does not give is missing, and its figure with it


def _read_amdsmi(device: torch.device, watch: Watch) -> None:
    # torch gives W here, whatever its documentation says of mW, and zero for what the GPU does not tell.
    readings = (
        (watch.clocks_mhz, torch.cuda.clock_rate),
        (watch.powers_w, torch.cuda.power_draw),
        (watch.temperatures_c, torch.cuda.temperature),
    )
    for into, read in readings:
        try:
            value = float(read(device))
        except Exception:  # amdsmi's own errors, which cannot be named where it is not installed
            continue
        if value:
            into.append(value)
