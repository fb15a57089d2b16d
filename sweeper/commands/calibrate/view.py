"""A calibration as a table: each figure, the value that plans had before, and the measured one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Replacement:
    """One figure of a calibration.

    Attributes:
        before: the value that plans had; NaN where they had none.
        source: of that value.
    """

    name: str
    before: float
    source: str
    measured: Figure

    @property
    def cells(self) -> list[str]:
        measured = self.measured
        bounds = [format_number(math.nan if bound is None else bound) for bound in (measured.low, measured.high)]
        change = "" if math.isnan(self.before) else f"{100 * (measured.value / self.before - 1):+.1f}"
        return [self.name, format_number(self.before), self.source, format_number(measured.value), *bounds, change]


def draw_replacements(replacements: Sequence[Replacement]) -> Table:
    """Return the table."""
    heading = ["figure", "before", "which is", "measured", "95% from", "to", "change %"]
    return draw(heading, [replacement.cells for replacement in replacements], 2, terminal_width())


def device_replacements(calibration: Calibration, before: Device | None, rows: Sequence[Row]) -> Iterator[Replacement]:
    """Yield the figures of a device. `before` is None for one that could not be planned; `rows` are of attention."""
    for dtype, figure in calibration.sustained_tflops.items():
        yield Replacement(f"products in {dtype}, TFLOP/s", *_products_before(before, dtype), figure)
    headroom = Figure(calibration.power_headroom)
    yield Replacement("short over lasting products", before.power_headroom if before else math.nan, "table", headroom)
    if calibration.copy_gb_s:
        copied = before.memory_gb_s * COPY_SHARE if before else math.nan
        yield Replacement("copies, GB/s", copied, f"{COPY_SHARE:g} of the data sheet", calibration.copy_gb_s)
    for row in _longest(rows):
        length, mode = float(row["param.sequence_length"]), row["param.mode"]
        name = f"attention {row['param.kernel']} {mode}, {length:,.0f} tokens, TFLOP/s"
        yield Replacement(name, _attention_before(before, row), "table", figure_of(row, "tflops_sustained"))


def _products_before(before: Device | None, dtype: str) -> tuple[float, str]:
    if before is None or not (before.sustained_tflops or before.peak_tflops):
        return math.nan, ""
    try:
        rate = sustained_flops(before, dtype) / 1e12
    except ValueError:  # no matrix units for it in the catalogue
        return math.nan, ""
    return rate, "table" if dtype in measured_tflops(before.name) else "share of the peak"


def _attention_before(before: Device | None, row: Row) -> float:
    """Return the table's rate of a kernel at the length of a trial."""
    if before is None:
        return math.nan
    rates = attention_rates(before, PLANNER_KERNELS[row["param.kernel"]])
    share = rates.forward_share if row["param.mode"] == "forward" else rates.backward_share
    length = float(row["param.sequence_length"])
    return sustained_flops(before, "bf16") / 1e12 * share * length / (length + rates.half_tokens)


def _longest(rows: Sequence[Row]) -> list[Row]:
    """Return the trial with the longest sequences of each kernel and pass."""
    ordered = sorted(rows, key=lambda row: float(row["param.sequence_length"]))
    longest = {(row["param.kernel"], row["param.mode"]): row for row in ordered}
    return [longest[key] for key in sorted(longest)]


def link_replacements(
    measured: Topology, assumed: Topology, rows: Sequence[Row], cluster: Cluster
) -> Iterator[Replacement]:
    """Yield the figures of links: bandwidths as collectives reach them, and the latency of one message."""
    local = 0 if measured.gpus_per_domain == cluster.gpus else measured.gpus_per_domain
    for ranks in dict.fromkeys((local, 0)):
        bus = bus_gb_s(rows, ranks)
        if not math.isnan(bus):
            group = Group(ranks or cluster.gpus)
            before = bandwidth_gb_s(cluster, group)
            source = f"{LINK_SHARE:g} of {assumed.link_gb_s:g}" if ranks == local else "table"
            yield Replacement(f"all-gather of {group.ranks} GPUs, bus GB/s", before, source, Figure(bus))
    if measured.link_latency_s != assumed.link_latency_s:
        latency = Figure(1e6 * measured.link_latency_s)
        yield Replacement("latency of a link, µs", 1e6 * assumed.link_latency_s, "table", latency)
