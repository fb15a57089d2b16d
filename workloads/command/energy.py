"""Measure the energy that a program uses on a trial's GPUs on this node, from the last warm-up to the last step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from workloads.api.contract import Energy, Rank
from workloads.api.gpus import Gpu, open_gpus
from workloads.api.gpus.energy import EnergySample, energy_between

# The wait before a reading, as a share of the time so far. An hour then needs about 8,000 readings, at equal accuracy.
INTERVAL_SHARE = 1e-3


class EnergyMeter:
    """Reads the GPUs while a program runs. Reads nothing on a CPU, or if the gang spans several nodes.

    Each program on a node reads all of the gang's GPUs on this node, because only the first one to report steps counts.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank, self._drivers = rank, ExitStack()
        self._gpus: list[Gpu] = []
        self._samples: list[list[EnergySample]] = []
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._started_s = self._ended_s = 0.0

    def __enter__(self) -> EnergyMeter:
        if self._rank.node_devices and self._rank.nodes == 1:
            self._gpus = select_gpus(self._drivers.enter_context(open_gpus()), self._rank.node_devices)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread:
            self._thread.join()
        self._drivers.close()

    def mark_step(self, number: int) -> None:
        """Record that a step has ended. `number` counts measured steps from 1; the last warm-up step is 0."""
        if number < 0 or not self._gpus:
            return
        self._ended_s = time.perf_counter()
        if self._thread is None:
            self._started_s = self._ended_s
            self._samples = [[] for _ in self._gpus]
            self._thread = threading.Thread(target=self._read_until_done, daemon=True)
            self._thread.start()

    def _read_until_done(self) -> None:
        interval_s = max(gpu.interval_s for gpu in self._gpus)
        while True:
            for gpu, samples in zip(self._gpus, self._samples, strict=True):
                before_s = time.perf_counter()
                reading = gpu.read()
                at_s = (before_s + time.perf_counter()) / 2
                samples.append(EnergySample(at_s, reading.energy_j, reading.power_w))
            if self._done.wait(max(interval_s, INTERVAL_SHARE * (time.perf_counter() - self._started_s))):
                return

    def energy(self, step_time_s: float) -> Energy | None:
        """Return the energy of all GPUs over the measured steps, each taking `step_time_s` by the program's own clock.

        Programs print step lines with varying delays, and some print only every tenth step. Power is therefore measured
        between these lines, and the number of steps is derived from the printed step time.
        """
        if self._rank.node_devices and self._rank.nodes > 1:
            return Energy(missing=f"the program runs on {self._rank.nodes} nodes; only those of one node are read")
        if not self._gpus or not step_time_s:
            return None
        window = (self._started_s, self._ended_s, (self._ended_s - self._started_s) / step_time_s)
        return add_energies([energy_between(list(samples), *window) for samples in self._samples])


def select_gpus(gpus: Sequence[Gpu], devices: str) -> list[Gpu]:
    """Return the GPUs that a list such as CUDA_VISIBLE_DEVICES selects by number or UUID; none if any is missing."""
    names = devices.split(",")
    chosen = [gpu for name in names for gpu in gpus if name in (str(gpu.identity.number), gpu.identity.uuid)]
    return chosen if len(chosen) == len(names) else []


def add_energies(energies: Sequence[Energy | None]) -> Energy | None:
    """Return the sum over devices for one window, or the first reason why a device has no energy."""
    known = [energy for energy in energies if energy]
    if not known or len(known) < len(energies):
        return None
    if missing := next((energy for energy in known if energy.missing), None):
        return missing
    sampled = next((energy for energy in known if energy.source == "power"), known[0])
    return replace(sampled, joules=sum(energy.joules for energy in known))
