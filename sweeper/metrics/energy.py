"""Energy and money, derived from what the devices drew and from prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweeper.common.clock import SECONDS_PER_HOUR
from workloads.api.contract import Measurement
from workloads.api.metrics import COST

JOULES_PER_KWH = 3.6e6
EFFICIENCY = ("joules_per_token", "tflop_per_joule", "tokens_per_joule")  # of one trial they say the same


@dataclass(frozen=True)
class Prices:
    """Prices in one currency. Those that are None are not counted.

    Attributes:
        per_hour: of one device.
        per_kwh: of the electricity of the devices.
    """

    per_hour: float | None = None
    per_kwh: float | None = None


def energy_metrics(measurements: Sequence[Measurement], world_size: int) -> dict[str, float]:
    """Return the energy of a step of the gang and what follows from it; empty unless every rank has its energy.

    Args:
        measurements: one entry a rank, or the one that describes the gang.
        world_size: the devices of the gang.
    """
    if missing_energy(measurements):
        return {}
    energies = [measurement.energy for measurement in measurements if measurement.energy]
    joules = sum(energy.joules / energy.steps for energy in energies)
    power_w = sum(energy.joules / energy.seconds for energy in energies)
    metrics = {"joules_per_step": joules, "average_power_w": power_w}
    if world_size > 1:
        metrics["average_power_w_per_gpu"] = power_w / world_size
    if tokens := sum(measurement.tokens_per_step for measurement in measurements):
        metrics |= {"joules_per_token": joules / tokens, "tokens_per_joule": tokens / joules}
    if flops := sum(measurement.flops_per_step for measurement in measurements):
        metrics["tflop_per_joule"] = flops / 1e12 / joules
    return metrics


def missing_energy(measurements: Sequence[Measurement]) -> str:
    """Return why a rank's energy is not known; empty if it is known of all."""
    reasons = (m.energy.missing if m.energy else "no driver reports it" for m in measurements)
    return next((reason for reason in reasons if reason), "")


def hidden_metrics(trials: Sequence[Mapping[str, float]], objective: str) -> set[str]:
    """Return the metrics of energy and money that a table of these trials leaves out.

    The objective is shown; of `EFFICIENCY` only one, and nothing in which the trials do not differ.
    """
    first = next((name for name in EFFICIENCY if any(name in metrics for metrics in trials)), "")
    efficiency = objective if objective in EFFICIENCY else first
    constant = {name for name in (efficiency, COST) if len({metrics.get(name) for metrics in trials}) < 2}
    return ({*EFFICIENCY, "average_power_w"} - {efficiency} | constant) - {objective}


def cost_metrics(metrics: Mapping[str, float], world_size: int, prices: Prices) -> dict[str, float]:
    """Return the cost of a million tokens; empty without a price, or if one that is set cannot be applied."""
    if "tokens_per_s" not in metrics or (prices.per_hour is None and prices.per_kwh is None):
        return {}
    if prices.per_kwh is not None and "joules_per_token" not in metrics:
        return {}
    hours = world_size / metrics["tokens_per_s"] / SECONDS_PER_HOUR
    kwh = metrics.get("joules_per_token", 0.0) / JOULES_PER_KWH
    return {COST: 1e6 * (hours * (prices.per_hour or 0.0) + kwh * (prices.per_kwh or 0.0))}
