"""Derive a GPU's energy in a time window from readings of its counters.

NVML counts millijoules and does not document how often the counter changes. PETSc states 20 to 100 ms for newer GPUs
(PetscLogGpuEnergyMeter), and Zeus reads 0 J in shorter windows (ml-energy/zeus, `approx_instant_energy`). The
difference of two readings can therefore be off by up to two of these intervals. This module uses only the counter's
changes within the window. The mean power is the rise from the first to the last change, divided by the time between
them. The energy is this power times the window. The remaining error is the interval between two readings, 20 ms.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from workloads.api.contract import Energy

# The shortest windows, by source. A counter that changes every 100 ms changes nine times in a second. Its first and
# last change are each up to 20 ms late, an error of at most 2.5%. NVML's power is a mean over about the last second.
SHORTEST_S = {"counter": 1.0, "power": 5.0}
FEWEST_CHANGES = 8
FEWEST_READINGS = 20
# On some AMD GPUs, the counter does not count energy (ml-energy/zeus compares the counter with the power first). A
# counter that differs from the sampled power by more than this factor is not used.
LARGEST_FACTOR = 2.0


@dataclass(frozen=True)
class EnergySample:
    """A reading with its time on the host's monotonic clock. Values that the device does not report are None."""

    at_s: float
    energy_j: float | None
    power_w: float | None


def energy_between(samples: Sequence[EnergySample], start_s: float, end_s: float, steps: float) -> Energy | None:
    """Return the energy of a window of `steps` steps, or why there is none; None if the device reports nothing."""
    seconds = end_s - start_s
    inside = [sample for sample in samples if start_s <= sample.at_s <= end_s]
    has_counter = any(sample.energy_j is not None for sample in samples)
    powers_w = [sample.power_w for sample in inside if sample.power_w is not None]
    if not has_counter and all(sample.power_w is None for sample in samples):
        return None
    counter_w, missing = _power_of_counter(inside, seconds) if has_counter else (0.0, "")
    # Earlier load does not affect the power in the second half of the window.
    power_w = statistics.mean(powers_w[len(powers_w) // 2 :]) if len(powers_w) > 1 else counter_w
    if counter_w and power_w / LARGEST_FACTOR <= counter_w <= power_w * LARGEST_FACTOR:
        return Energy(counter_w * seconds, seconds, steps, "counter")
    if seconds >= SHORTEST_S["power"] and len(powers_w) >= FEWEST_READINGS:
        return Energy(statistics.mean(powers_w) * seconds, seconds, steps, "power")
    if counter_w:
        missing = f"the energy counter rises by {counter_w:.0f} W, at a power of {powers_w[-1]:.0f} W"
    return Energy(missing=missing or _describe_short(seconds, "power"))


def _power_of_counter(inside: Sequence[EnergySample], seconds: float) -> tuple[float, str]:
    """Return the mean power between the counter's first and last change, or 0 and the reason the power is unknown."""
    if seconds < SHORTEST_S["counter"]:
        return 0.0, _describe_short(seconds, "counter")
    known = [(sample.at_s, sample.energy_j) for sample in inside if sample.energy_j is not None]
    changes = [after for before, after in pairwise(known) if after[1] > before[1]]
    if len(changes) < FEWEST_CHANGES:
        return 0.0, f"the energy counter changed {len(changes)} times in {seconds:.1f} s; it needs {FEWEST_CHANGES}"
    (first_s, first_j), (last_s, last_j) = changes[0], changes[-1]
    return (last_j - first_j) / (last_s - first_s), ""


def _describe_short(seconds: float, source: str) -> str:
    name = {"counter": "energy counter", "power": "sampled power"}[source]
    return f"the steps took {seconds:.2g} s; the {name} needs {SHORTEST_S[source]:g} s"
