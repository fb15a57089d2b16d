"""A calibration as a table: each figure, the value that plans had before, and the measured one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rich.table import Table

from sweeper.commands.calibrate.rates import PLANNER_KERNELS, Row, bus_gb_s, figure_of
from sweeper.common.format import format_number
from sweeper.pages.terminal import draw, terminal_width
from sweeper.preflight.calibration import Calibration, Figure
from workloads.estimator.communication import LINK_SHARE, Group, bandwidth_gb_s
from workloads.estimator.operations import attention_rates
from workloads.estimator.placed_job import COPY_SHARE
from workloads.hardware.cluster import Cluster, Device, Topology, measured_tflops
from workloads.hardware.precisions import sustained_flops

Cells = list[str]  # of one figure


def draw_replacements(replacements: Sequence[Cells]) -> Table:
    """Return the table."""
    heading = ["figure", "before", "which is", "measured", "95% from", "to", "change %"]
    return draw(heading, replacements, 2, terminal_width())


def _replace(name: str, before: float, source: str, measured: Figure) -> Cells:
    """Return the cells of a figure. `before` is the value that plans had, NaN where they had none, and its source."""
    bounds = [format_number(math.nan if bound is None else bound) for bound in (measured.low, measured.high)]
    change = "" if math.isnan(before) else f"{100 * (measured.value / before - 1):+.1f}"
    return [name, format_number(before), source, format_number(measured.value), *bounds, change]


def device_replacements(calibration: Calibration, before: Device | None, rows: Sequence[Row]) -> Iterator[Cells]:
    """Yield the figures of a device. `before` is None for one that could not be planned; `rows` are of attention."""
    for dtype, figure in calibration.sustained_tflops.items():
        rate, source = math.nan, ""
        if before and (before.sustained_tflops or before.peak_tflops):
            with suppress(ValueError):  # no matrix units for it in the catalogue
                rate = sustained_flops(before, dtype) / 1e12
                source = "table" if dtype in measured_tflops(before.name) else "share of the peak"
        yield _replace(f"products in {dtype}, TFLOP/s", rate, source, figure)
    headroom = Figure(calibration.power_headroom)
    yield _replace("short over lasting products", before.power_headroom if before else math.nan, "table", headroom)
    if calibration.copy_gb_s:
        copied = before.memory_gb_s * COPY_SHARE if before else math.nan
        yield _replace("copies, GB/s", copied, f"{COPY_SHARE:g} of the data sheet", calibration.copy_gb_s)
    ordered = sorted(rows, key=lambda row: float(row["param.sequence_length"]))
    longest = {(row["param.kernel"], row["param.mode"]): row for row in ordered}
    for (kernel, mode), row in sorted(longest.items(), key=lambda item: item[0]):
        length, rate = float(row["param.sequence_length"]), math.nan
        if before:
            rates = attention_rates(before, PLANNER_KERNELS[kernel])
            share = rates.forward_share if mode == "forward" else rates.backward_share
            rate = sustained_flops(before, "bf16") / 1e12 * share * length / (length + rates.half_tokens)
        name = f"attention {kernel} {mode}, {length:,.0f} tokens, TFLOP/s"
        yield _replace(name, rate, "table", figure_of(row, "tflops_sustained"))


def link_replacements(measured: Topology, assumed: Topology, rows: Sequence[Row], cluster: Cluster) -> Iterator[Cells]:
    """Yield the figures of links: bandwidths as collectives reach them, and the latency of one message."""
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
