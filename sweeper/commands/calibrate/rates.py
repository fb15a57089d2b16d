"""Compute device and link rates from a calibration's trials, and tabulate the values that these rates replace."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from rich.table import Table

from sweeper.common.format import format_number
from sweeper.common.grouping import group_values
from sweeper.pages.terminal import draw, terminal_width
from sweeper.preflight.calibration import Calibration, Figure
from workloads.api.recipes import RECIPES
from workloads.estimator import operations
from workloads.estimator.communication import LINK_SHARE, NETWORK_SHARE, Group, bandwidth_gb_s
from workloads.estimator.placed_job import COPY_SHARE, PlacedJob
from workloads.hardware.cluster import (
    UNKNOWN_CLUSTER,
    AttentionRates,
    Cluster,
    Device,
    Topology,
    Wiring,
    measured_tflops,
)
from workloads.hardware.precisions import sustained_flops
from workloads.layouts.layout import AttentionKernel, Job, Layout
from workloads.models.model import MODELS
from workloads.tables import read_toml

Row = dict[str, str]
Cells = list[str]  # one row of the table of replaced values
PAIRS_BELOW = 0.6  # a pair of GPUs uses all of a GPU's links through a switch, but only some of them without a switch
PLANNER_KERNELS: dict[str, AttentionKernel] = read_toml(__file__, "kernels.toml")


def sustained_tflops(rows: Sequence[Row]) -> dict[str, Figure]:
    """Return the sustained GEMM rate of each dtype: the FLOPs of all layers divided by the layers' total time."""
    by_dtype = group_values((row["param.dtype"], row) for row in rows)
    bounds = ("tflops_sustained_ci_low", "tflops_sustained_ci_high")
    return {
        RECIPES[dtype].matrix_dtype: Figure(
            _joint_rate(layers, "tflops_sustained"),
            *(_joint_rate(layers, name) if all(row.get(name) for row in layers) else None for name in bounds),
        )
        for dtype, layers in by_dtype.items()
    }


def power_headroom(rows: Sequence[Row]) -> float:
    """Return the speedup of short over sustained GEMMs, for bf16 if bf16 was measured, else for all dtypes together."""
    layers = [row for row in rows if row["param.dtype"] == "bf16"] or rows
    return max(1.0, _joint_rate(layers, "tflops") / _joint_rate(layers, "tflops_sustained"))


def _joint_rate(layers: Iterable[Row], metric: str) -> float:
    flops = [(2 * float(row["m"]) * float(row["n"]) * float(row["k"]), row) for row in layers]
    seconds = sum(operations / float(row[metric]) for operations, row in flops)
    return sum(operations for operations, _ in flops) / seconds


def grouped_tflops(rows: Sequence[Row]) -> dict[str, Figure]:
    """Return the median sustained rate of grouped GEMMs for each dtype."""
    return {
        RECIPES[dtype].matrix_dtype: Figure(statistics.median(float(row["tflops_sustained"]) for row in own))
        for dtype, own in group_values((row["param.dtype"], row) for row in rows).items()
    }


def assumed_grouped_tflops(device: Device, dtype: str, products: Figure, rows: Iterable[Row]) -> float:
    """Return the median rate that plans assume for the grouped GEMMs of these trials if only GEMMs are measured."""
    cluster = replace(UNKNOWN_CLUSTER, device=replace(device, sustained_tflops={dtype: products.value}))
    rates = []
    for row in rows:
        if RECIPES[row["param.dtype"]].matrix_dtype == dtype:
            model, held = MODELS[row["param.model"]], float(row["experts_held"])
            hidden, width = model.hidden_size, model.expert_intermediate_size
            n, k = (2 * width, hidden) if row["param.layer"] == "gate_up" else (hidden, width)
            product = operations.Product("", float(row["rows"]) / held, n, k, held, grouped=True)
            placed = PlacedJob(Job(model, Layout(), 1, precision=row["param.dtype"]), cluster)
            seconds = operations.product_s(placed, product, dtype) - 2 * operations.PRODUCT_OVERHEAD_S
            rates.append(product.flops / seconds / 1e12)
    return statistics.median(rates)


def launch_us(row: Row) -> Figure:
    """Return the microseconds between small GEMMs that run back to back, which their launches determine."""
    figure = figure_of(row, "tflops_sustained")
    flops = 2 * float(row["param.m"]) * float(row["param.n"]) * float(row["param.k"])
    low, high = (flops / rate / 1e6 if rate else None for rate in (figure.high, figure.low))
    return Figure(flops / figure.value / 1e6, low, high)


def figure_of(row: Row, metric: str) -> Figure:
    """Return a trial's metric with its 95% interval."""
    low, high = (float(row[name]) if row.get(name) else None for name in (f"{metric}_ci_low", f"{metric}_ci_high"))
    return Figure(float(row[metric]), low, high)


def attention_rates(rows: Sequence[Row], tflops: float, headroom: float) -> dict[str, AttentionRates]:
    """Return the fastest attention rates for each planner kernel name, as fractions of the GEMM rate."""
    rates: dict[str, AttentionRates] = {}
    for kernel, own in group_values((row["param.kernel"], row) for row in rows).items():
        fitted, name = _fit_attention(own, tflops, headroom), PLANNER_KERNELS[kernel]
        if fitted and (name not in rates or fitted.forward_share > rates[name].forward_share):
            rates[name] = fitted
    return rates


def _fit_attention(rows: Sequence[Row], tflops: float, headroom: float) -> AttentionRates | None:
    """Return the rates of one kernel, or None unless both passes were measured at two or more lengths, of which the
    longest is near its limit. The planner models the rate at L tokens as share · L / (L + half), so the inverse rate is
    linear in 1 / L. Both passes use the mean of their `half` values. The share of each pass is computed from its
    longest sequence. Short calls back to back may wait for their launches: FlashAttention 4 with 2,048 tokens had 156
    TFLOP/s back to back and 476 one by one, on an H200. So a rate is at least that of single calls over `headroom`."""
    halves, longest = [], {}
    for mode, own in group_values((row["param.mode"], row) for row in rows).items():
        points = sorted(
            (float(row["param.sequence_length"]), max(float(row["tflops_sustained"]), float(row["tflops"]) / headroom))
            for row in own
        )
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
    if max(shares.values()) > 2:  # the rate still grows with the length as on a line
        return None
    return AttentionRates(round(shares["forward"], 4), round(shares["backward"], 4), round(half, 1))


def describe_conditions(rows: Sequence[Row]) -> str:
    """Describe the measurement conditions: how long the GEMMs ran, and at which clock and power."""
    settling = [float(row["sustained_settling_s"]) for row in rows]
    lasted = max(float(row["param.sustained_s"]) for row in rows)
    settled = f"after {min(settling):.1f} to {max(settling):.1f} s in which the clocks settled"
    parts = [f"products back to back for {lasted:g} s, {settled}"]
    for name, unit in (("sustained_sm_clock_mhz", "MHz"), ("sustained_power_w", "W")):
        values = [float(row[name]) for row in rows if row.get(name)]
        if values:
            parts.append(f"{min(values):.0f} to {max(values):.0f} {unit}")
    return ", ".join(parts)


def list_gathers(rows: Iterable[Row], ranks: int) -> list[Row]:
    """Return the all-gathers in groups of `ranks` ranks, the smallest message first."""
    own = (row for row in rows if float(row["param.ranks"]) == ranks and row["param.collective"] == "all_gather")
    return sorted(own, key=lambda row: float(row["param.kib"]))


def bus_gb_s(rows: Iterable[Row], ranks: int) -> float:
    """Return the bus bandwidth of the largest all-gather in groups of `ranks` ranks; NaN if none was measured."""
    gathers = list_gathers(rows, ranks)
    return float(gathers[-1]["bus_gb_s"]) if gathers else math.nan


def measured_topology(rows: Sequence[Row], assumed: Topology, gpus: int, per_node: int) -> Topology:
    """Return the topology for which the planner predicts the measured all-gathers. Unmeasured values stay as assumed.
    Measured bandwidths are divided by the fraction of link bandwidth that the planner expects collectives to reach."""
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
    return float(f"{value:.4g}")


def draw_replacements(replacements: Sequence[Cells]) -> Table:
    """Return the table of measured values and the values that they replace."""
    heading = ["figure", "before", "which is", "measured", "95% from", "to", "change %"]
    return draw(heading, replacements, 2, terminal_width())


def _replace(name: str, before: float, source: str, measured: Figure) -> Cells:
    """Return a row of the table. `before` is the value that plans have used until now, or NaN if there is none."""
    bounds = [format_number(math.nan if bound is None else bound) for bound in (measured.low, measured.high)]
    change = "" if math.isnan(before) else f"{100 * (measured.value / before - 1):+.1f}"
    return [name, format_number(before), source, format_number(measured.value), *bounds, change]


def device_replacements(
    calibration: Calibration, before: Device | None, rows: Mapping[str, Sequence[Row]]
) -> Iterator[Cells]:
    """Yield a device's table rows. `before` is None if plans do not support the device."""
    for dtype, figure in calibration.sustained_tflops.items():
        rate, source = math.nan, ""
        if before and (before.sustained_tflops or before.peak_tflops):
            with suppress(ValueError):  # the catalog has no matrix units for this dtype
                rate = sustained_flops(before, dtype) / 1e12
                source = "table" if dtype in measured_tflops(before.name) else "share of the peak"
        yield _replace(f"products in {dtype}, TFLOP/s", rate, source, figure)
    headroom = Figure(calibration.power_headroom)
    yield _replace("short over lasting products", before.power_headroom if before else math.nan, "table", headroom)
    for dtype, figure in calibration.grouped_tflops.items():
        products = calibration.sustained_tflops.get(dtype)
        rate = assumed_grouped_tflops(before, dtype, products, rows["grouped"]) if before and products else math.nan
        source = f"{operations.GROUPED_SHARE:g} of the products{' and traffic' if dtype == 'fp8' else ''}"
        yield _replace(f"grouped products in {dtype}, TFLOP/s", rate, source, figure)
    copied = before.memory_gb_s * COPY_SHARE if before else math.nan
    for name, bandwidth in (("copies", calibration.copy_gb_s), ("AdamW's update", calibration.update_gb_s)):
        if bandwidth:
            yield _replace(f"{name}, GB/s", copied, f"{COPY_SHARE:g} of the data sheet", bandwidth)
    if calibration.launch_us:
        yield _replace("time between launches, µs", operations.LAUNCH_US, "table", calibration.launch_us)
    ordered = sorted(rows["attention"], key=lambda row: float(row["param.sequence_length"]))
    longest = {(row["param.kernel"], row["param.mode"]): row for row in ordered}
    for (kernel, mode), row in sorted(longest.items(), key=lambda item: item[0]):
        length, rate = float(row["param.sequence_length"]), math.nan
        if before:
            rates = operations.attention_rates(before, PLANNER_KERNELS[kernel])
            share = rates.forward_share if mode == "forward" else rates.backward_share
            rate = sustained_flops(before, "bf16") / 1e12 * share * length / (length + rates.half_tokens)
        name = f"attention {kernel} {mode}, {length:,.0f} tokens, TFLOP/s"
        yield _replace(name, rate, "table", figure_of(row, "tflops_sustained"))


def link_replacements(measured: Topology, assumed: Topology, rows: Sequence[Row], cluster: Cluster) -> Iterator[Cells]:
    """Yield the table rows for links: the bandwidth that collectives reach, and the latency of one message."""
    local = 0 if measured.gpus_per_domain == cluster.gpus else measured.gpus_per_domain
    for ranks in dict.fromkeys((local, 0)):
        bus = bus_gb_s(rows, ranks)
        if not math.isnan(bus):
            group = Group(ranks or cluster.gpus)
            source = f"{LINK_SHARE:g} of {assumed.link_gb_s:g}" if ranks == local else "table"
            name = f"all-gather of {group.ranks} GPUs, bus GB/s"
            yield _replace(name, bandwidth_gb_s(cluster, group), source, Figure(bus))
    if measured.link_latency_s != assumed.link_latency_s:
        latency = Figure(1e6 * measured.link_latency_s)
        yield _replace("latency of a link, µs", 1e6 * assumed.link_latency_s, "table", latency)
