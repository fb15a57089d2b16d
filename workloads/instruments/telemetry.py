"""Record a GPU's clock, power, energy, temperature and reasons for a lower clock during a measurement.

Without a driver (on a CPU, or on ROCm without amdsmi), no readings are taken.
"""

import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from workloads.api.contract import Energy, Scalar
from workloads.api.gpus import TAINTING_SLOWDOWNS, Gpu, GpuReading, amd, open_gpus
from workloads.api.gpus.energy import EnergySample, energy_between

# NVML's power is a mean over about a second, so a shorter measurement mostly reads earlier power.
POWER_WINDOW_S = 1.0
_OPEN_DRIVERS = ExitStack()  # the drivers stay open until the process ends


@dataclass
class GpuReadings:
    """The readings taken during one measurement.

    `reasons` lists the reasons for a lower clock, if the GPU reports them (`reasons_known`). The energy covers the
    window from `started_s` to `ended_s`, in `time.perf_counter` time.
    """

    clocks_mhz: list[float] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    temperatures_c: list[float] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    reasons_known: bool = False
    energy_samples: list[EnergySample] = field(default_factory=list)
    started_s: float = 0.0
    ended_s: float = 0.0
    before_steps: tuple[int, int, int] = (0, 0, 0)  # clock, power and temperature readings before the steps
    retries_before_steps: int = 0

    def begin_steps(self) -> None:
        """Exclude everything before now, such as warm-up steps, from the energy and the drifts."""
        self.started_s = time.perf_counter()
        self.before_steps = (len(self.clocks_mhz), len(self.powers_w), len(self.temperatures_c))
        self.retries_before_steps = count_allocator_retries()

    def energy(self, steps: float) -> Energy | None:
        """Return the energy of `steps` steps, from `begin_steps` to the end of the readings; None without a driver."""
        return energy_between(self.energy_samples, self.started_s, self.ended_s, steps)

    @property
    def tainted(self) -> bool:
        return bool(self.reasons & TAINTING_SLOWDOWNS)

    def add(self, reading: GpuReading, before: Mapping[str, int], at_s: float) -> None:
        """Add a reading with its time. `before` contains the slowdown counters from before the measurement."""
        self.energy_samples.append(EnergySample(at_s, reading.energy_j, reading.power_w))
        values = (self.clocks_mhz, reading.clock_mhz), (self.powers_w, reading.power_w)
        for read, value in (*values, (self.temperatures_c, reading.temperature_c)):
            if value:
                read.append(value)
        if reading.slowdowns is not None:
            self.reasons_known = True
            self.reasons |= {name for name, count in reading.slowdowns.items() if count > before.get(name, count)}

    def metrics(self) -> dict[str, float]:
        """Return the median clock in MHz, and the highest power in W and temperature in °C, if available."""
        metrics = {}
        if self.clocks_mhz:
            metrics["sm_clock_mhz"] = float(statistics.median(self.clocks_mhz))
        if self.powers_w and self.ended_s - self.started_s >= POWER_WINDOW_S:
            metrics["power_w"] = max(self.powers_w)
        if self.temperatures_c:
            metrics["temperature_c"] = float(max(self.temperatures_c))
        return metrics

    def drifts(self) -> dict[str, float]:
        """Return the mean of the last fifth of the steps' readings minus the mean of the first fifth, for each
        quantity that was read."""
        names = ("sm_clock_drift_mhz", "power_drift_w", "temperature_drift_c")
        metrics = {}
        read = (self.clocks_mhz, self.powers_w, self.temperatures_c)
        for name, values, before in zip(names, read, self.before_steps, strict=True):
            own = values[before:]
            if fifth := len(own) // 5:
                metrics[name] = statistics.mean(own[-fifth:]) - statistics.mean(own[:fifth])
        return metrics

    def machine_info(self) -> dict[str, Scalar]:
        """Return the reasons for a lower clock, and whether they taint the measurement; empty if unknown."""
        if not self.reasons_known:
            return {}
        return {"slowed_by": " ".join(sorted(self.reasons)), "tainted": self.tainted}


def count_allocator_retries() -> int:
    """Return how often this process's allocations have waited for memory to be given back to the driver."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_initialized() else 0


@contextmanager
def monitor_gpu(device: torch.device) -> Iterator[GpuReadings]:
    """Read the GPU's state at regular intervals, and at least once, until the block ends."""
    readings = GpuReadings()
    gpu = find_gpu(device)
    if gpu is None:
        yield readings
        return
    before = gpu.read().slowdowns or {}
    done = threading.Event()

    def read() -> None:
        started_s = time.perf_counter()
        reading = gpu.read()
        readings.add(reading, before, (started_s + time.perf_counter()) / 2)

    def read_until_done() -> None:
        while not done.wait(gpu.interval_s):
            read()

    thread = threading.Thread(target=read_until_done, daemon=True)
    thread.start()
    readings.begin_steps()
    try:
        yield readings
    finally:
        readings.ended_s = time.perf_counter()
        done.set()
        thread.join()
    read()


@cache
def find_gpu(device: torch.device) -> Gpu | None:
    """Return the driver's object for torch's `device`, or None for a CPU or if there is no driver."""
    if device.type != "cuda":
        return None
    gpus = _OPEN_DRIVERS.enter_context(open_gpus())
    if torch.version.hip:
        return _find_amd_gpu(gpus, device.index or 0)
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # torch numbers only the visible GPUs
    return next((gpu for gpu in gpus if gpu.identity.uuid == uuid), None)


def _find_amd_gpu(gpus: Sequence[Gpu], index: int) -> Gpu | None:
    """Return the `index`-th visible GPU. HIP's UUID differs from AMD SMI's, and partitions share a PCI address."""
    numbers = amd.visible_numbers(os.environ)
    number = index if numbers is None else numbers[index] if index < len(numbers) else None
    return next((gpu for gpu in gpus if gpu.identity.vendor == "amd" and gpu.identity.number == number), None)


def power_limit_w(device: torch.device) -> float | None:
    """Return a GPU's currently enforced power limit in W, or None if unknown."""
    gpu = find_gpu(device)
    return gpu.limits().power_limit_w if gpu else None
