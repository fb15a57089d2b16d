"""From collectives to a topology: the links that plans assume, so that their collectives take the measured time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sweeper.commands.calibrate.rates import Row, bus_gb_s, latency_s
from workloads.estimator.cluster import Topology, Wiring
from workloads.estimator.communication import LINK_SHARE, NETWORK_SHARE

# Of a switch, two GPUs have all of a GPU's links; of links between pairs one of several.
PAIRS_BELOW = 0.6


def measured_topology(rows: Sequence[Row], assumed: Topology, gpus: int, per_node: int) -> Topology:
    """Return the topology whose all-gathers take the measured time. What was not measured is as assumed.

    The planner takes a share of a link's bandwidth for collectives, by which the measured one is divided here.
    """
    local = 0 if per_node == gpus else per_node
    bus, pair, whole = bus_gb_s(rows, local), bus_gb_s(rows, 2), bus_gb_s(rows, 0)
    latency = latency_s(rows, local)
    topology = replace(assumed, name="measured", gpus_per_domain=per_node)
    if per_node > 1 and not math.isnan(bus):
        wiring: Wiring = "pairs" if pair < PAIRS_BELOW * bus else assumed.wiring
        topology = replace(topology, link_gb_s=_short(bus / LINK_SHARE), wiring=wiring)
        topology = replace(topology, link_latency_s=_short(latency / (per_node - 1)))
    if per_node < gpus and not math.isnan(whole):
        topology = replace(topology, network_gb_s=_short(whole / per_node / NETWORK_SHARE), oversubscription=1.0)
    return topology


def _short(value: float) -> float:
    """Return the value with four significant digits."""
    return float(f"{value:.4g}")
