"""From the trials of a calibration to the rates of a device and of its links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sweeper.preflight.calibration import Attention, Figure
from workloads.api.recipes import RECIPES
from workloads.estimator.communication import LINK_SHARE, NETWORK_SHARE
from workloads.hardware.cluster import Topology, Wiring
from workloads.layouts.layout import AttentionKernel

Row = dict[str, str]
PAIRS_BELOW = 0.6  # over a switch, two GPUs have all of a GPU's links; of links between pairs one of several
# The planner's names of attention kernels. FlashAttention 3 and 4 have one rate there; AMD's kernels are
# FlashAttention 2.
PLANNER_KERNELS: dict[str, AttentionKernel] = {
    "flash": "flash2",
    "aotriton": "flash2",
    "ck": "flash2",
    "aiter": "flash2",
    "cudnn": "cudnn",
    "flash4": "flash3",
}


def sustained_tflops(rows: Sequence[Row]) -> dict[str, Figure]:
    """Return the lasting rate of products by data type: all operations of the layers over the time of all."""
    by_dtype = _group(rows, "param.dtype")
    bounds = ("tflops_sustained_ci_low", "tflops_sustained_ci_high")
    return {
        RECIPES[dtype].matrix_dtype: Figure(
            _joint_rate(layers, "tflops_sustained"),
            *(_joint_rate(layers, name) if all(row.get(name) for row in layers) else None for name in bounds),
        )
        for dtype, layers in by_dtype.items()
    }


def power_headroom(rows: Sequence[Row]) -> float:
    """Return by which factor a short run of products in 16 bits, else of all, is faster than a lasting one."""
    layers = [row for row in rows if row["param.dtype"] == "bf16"] or rows
    return max(1.0, _joint_rate(layers, "tflops") / _joint_rate(layers, "tflops_sustained"))


def _joint_rate(layers: Iterable[Row], metric: str) -> float:
    """Return the rate of several products one after another."""
    flops = [(2 * float(row["m"]) * float(row["n"]) * float(row["k"]), row) for row in layers]
    seconds = sum(operations / float(row[metric]) for operations, row in flops)
    return sum(operations for operations, _ in flops) / seconds


def figure_of(row: Row, metric: str) -> Figure:
    """Return a metric of a trial with its interval."""
    low, high = (float(row[name]) if row.get(name) else None for name in (f"{metric}_ci_low", f"{metric}_ci_high"))
    return Figure(float(row[metric]), low, high)


def attention_rates(rows: Sequence[Row], tflops: float) -> dict[str, Attention]:
    """Return the rates of each attention kernel as shares of that of products, by the planner's names.

    Of kernels with one name there, the fastest one counts.
    """
    rates: dict[str, Attention] = {}
    for kernel, own in _group(rows, "param.kernel").items():
        fitted, name = _fit_attention(own, tflops), PLANNER_KERNELS[kernel]
        if fitted and (name not in rates or fitted.forward_share > rates[name].forward_share):
            rates[name] = fitted
    return rates


def _fit_attention(rows: Sequence[Row], tflops: float) -> Attention | None:
    """Return the rates of one kernel; None unless both passes were measured at two lengths.

    The planner's rate over L tokens is share · L / (L + half): its inverse is linear in 1 / L. Both passes have one
    half, the mean of theirs, and the share is that of the longest sequences.
    """
    halves, longest = [], {}
    for mode, own in _group(rows, "param.mode").items():
        points = sorted((float(row["param.sequence_length"]), float(row["tflops_sustained"])) for row in own)
        if len(points) < 2:
            return None
        (short, short_rate), (long, long_rate) = points[0], points[-1]
        slope = (1 / short_rate - 1 / long_rate) / (1 / short - 1 / long)
        halves.append(max(0.0, slope / max(1 / long_rate - slope / long, 1e-12)))
        longest[mode] = points[-1]
    if len(longest) < 2:
        return None
    half = sum(halves) / len(halves)
    shares = {mode: rate * (length + half) / length / tflops for mode, (length, rate) in longest.items()}
    return Attention(round(shares["forward"], 4), round(shares["backward"], 4), round(half, 1))


def describe_conditions(rows: Sequence[Row]) -> str:
    """Return how long the products lasted, at which clock and power."""
    settling = [float(row["sustained_settling_s"]) for row in rows]
    lasted = max(float(row["param.sustained_s"]) for row in rows)
    parts = [
        f"products back to back for {lasted:g} s, after {min(settling):.1f} to {max(settling):.1f} s in which the "
        "clocks settled"
    ]
    for name, unit in (("sustained_sm_clock_mhz", "MHz"), ("sustained_power_w", "W")):
        values = [float(row[name]) for row in rows if row.get(name)]
        if values:
            parts.append(f"{min(values):.0f} to {max(values):.0f} {unit}")
    return ", ".join(parts)


def _group(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def list_gathers(rows: Iterable[Row], ranks: int) -> list[Row]:
    """Return the all-gathers of groups of so many ranks, the smallest first."""
    own = (row for row in rows if float(row["param.ranks"]) == ranks and row["param.collective"] == "all_gather")
    return sorted(own, key=lambda row: float(row["param.kib"]))


def bus_gb_s(rows: Iterable[Row], ranks: int) -> float:
    """Return the bandwidth of the largest all-gather of groups of so many ranks; NaN if none was measured."""
    gathers = list_gathers(rows, ranks)
    return float(gathers[-1]["bus_gb_s"]) if gathers else math.nan


def measured_topology(rows: Sequence[Row], assumed: Topology, gpus: int, per_node: int) -> Topology:
    """Return the topology whose all-gathers take the measured time. What was not measured is as assumed.

    The planner takes a share of a link's bandwidth for collectives, by which the measured one is divided here.
    """
    local = 0 if per_node == gpus else per_node
    bus, pair, whole = bus_gb_s(rows, local), bus_gb_s(rows, 2), bus_gb_s(rows, 0)
    topology = replace(assumed, name="measured", gpus_per_domain=per_node)
    if per_node > 1 and not math.isnan(bus):
        wiring: Wiring = "pairs" if pair < PAIRS_BELOW * bus else assumed.wiring
        latency_s = float(list_gathers(rows, local)[0]["step_time_ms"]) / 1e3 / (per_node - 1)
        link_gb_s = _short(bus / LINK_SHARE)
        topology = replace(topology, wiring=wiring, link_gb_s=link_gb_s, link_latency_s=_short(latency_s))
    if per_node < gpus and not math.isnan(whole):
        topology = replace(topology, network_gb_s=_short(whole / per_node / NETWORK_SHARE), oversubscription=1.0)
    return topology


def _short(value: float) -> float:
    """Return the value with four significant digits."""
    return float(f"{value:.4g}")
