"""The scaling chart: speed over the number of GPUs, next to ideal scaling and the cost model's projection."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from sweeper.commands.report.platform_panels import build_error_bars
from sweeper.metrics.derivation import LINEAR_BANDS
from sweeper.pages.chart_style import COLOURS
from sweeper.results.ranking import MAIN_WORK_NAMES, BestResult, group_by_work, sort_by_platform

BATCH = "global_batch"  # the part of the work that may grow with the devices
AXIS_MARGIN = 1.5  # the factor between the outermost points and the ends of the logarithmic axes
NOTE = (
    "Points are the best configuration for each number of ranks with its 95% interval and its share of ideal scaling "
    "(dashed) from the smallest number; the band is 85 to 95% of that."
)
PROJECTION_NOTE = " Dotted is the cost model's projection of the smallest number's best result. Assumed: "


@dataclass(frozen=True)
class Projection:
    """The cost model's projection to more devices.

    Attributes:
        speeds: tokens/s by the number of devices; empty without a projection.
    """

    speeds: Mapping[int, float]
    assumptions: str = ""


def group_by_scaling(results: Sequence[BestResult]) -> Iterator[tuple[str, list[BestResult]]]:
    """Yield results that scale one kind of work, with a title: of the same batch, then of the same batch per device."""
    for work, group in group_by_work(results).items():
        yield f"Scaling of {work}", sort_by_platform(group)
    groups: dict[str, list[BestResult]] = {}
    for result in results:
        if BATCH in result.work:
            other_work = sorted((name, value) for name, value in result.work.items() if name != BATCH)
            batch_per_device = float(result.work[BATCH]) / result.devices
            groups.setdefault(f"{batch_per_device} {other_work}", []).append(result)
    for group in groups.values():
        if len({result.devices for result in group}) > 1:
            batch = float(group[0].work[BATCH]) / group[0].devices
            work = " ".join(group[0].work[name] for name in MAIN_WORK_NAMES if name in group[0].work)
            yield f"Scaling of {work} with a batch of {batch:g} per device", sort_by_platform(group)


def build_scaling_figure(results: Sequence[BestResult], sweeps: pd.DataFrame) -> tuple[go.Figure, str] | None:
    """Return the chart of results of one kind of work and its note.

    None for work without tokens/s, and if no device has several counts or a projection.
    """
    if results[0].speed_metric != "tokens_per_s":
        return None
    figure = go.Figure()
    assumptions = []
    for n, device in enumerate(dict.fromkeys(result.device for result in results)):
        by_count = sorted((result for result in results if result.device == device), key=lambda result: result.devices)
        projection = read_projection(by_count[0], sweeps)
        assumptions += [f"{device}: {projection.assumptions}"] if projection.assumptions else []
        if len(by_count) > 1 or projection.speeds:
            _add_device(figure, by_count, projection.speeds, COLOURS[n % len(COLOURS)])
    if not figure.data:
        return None
    counts = [count for line in figure.data for count in line.x]
    speeds = [speed for line in figure.data for speed in line.y]
    ranks = "processes" if results[0].is_cpu else "GPUs"
    figure.update_xaxes(title=ranks, type="log", range=_axis_range(counts), tickvals=sorted(set(counts)))
    figure.update_yaxes(title="tokens/s", type="log", range=_axis_range(speeds), tickvals=_ticks(*_axis_range(speeds)))
    return figure, NOTE + (PROJECTION_NOTE + "; ".join(assumptions) if assumptions else "")


def read_projection(result: BestResult, sweeps: pd.DataFrame) -> Projection:
    """Return the projection that the sweep of this result stored."""
    column = f"tag.projected_{result.speed_metric}"
    if column not in sweeps:
        return Projection({})
    is_stored = (sweeps["tag.sweeper.study"] == result.trial["tag.sweeper.study"]) & sweeps[column].notna()
    if not is_stored.any():
        return Projection({})
    sweep = sweeps[is_stored].iloc[0]
    speeds = {int(count): float(speed) for count, speed in json.loads(sweep[column]).items()}
    return Projection(speeds, str(sweep["tag.projection_assumes"]))


def _add_device(figure: go.Figure, by_count: Sequence[BestResult], projected: Mapping[int, float], colour: str) -> None:
    """Add one device's lines: the band, ideal scaling, the projection and the measured points."""
    smallest = by_count[0]
    per_device = smallest.speed.value / smallest.devices
    counts = sorted({result.devices for result in by_count} | set(projected))
    low, high = ([share * per_device * count for count in counts] for share in LINEAR_BANDS)
    line_style = {"x": counts, "mode": "lines", "showlegend": False, "hoverinfo": "skip"}
    figure.add_scatter(y=low, line={"width": 0}, name="85%", **line_style)
    figure.add_scatter(y=high, line={"width": 0}, fill="tonexty", fillcolor=f"{colour}22", name="95%", **line_style)
    ideal = [per_device * count for count in counts]
    figure.add_scatter(y=ideal, line={"color": colour, "dash": "dash"}, name="ideal", **line_style)
    if projected:
        figure.add_scatter(
            x=list(projected),
            y=list(projected.values()),
            mode="lines+markers",
            line={"color": colour, "dash": "dot"},
            marker={"symbol": "circle-open"},
            name=f"{smallest.device}, projected",
        )
    speeds = [result.speed for result in by_count]
    shares = [f"{result.speed.value / (per_device * result.devices):.0%}" for result in by_count[1:]]
    figure.add_scatter(
        x=[result.devices for result in by_count],
        y=[speed.value for speed in speeds],
        error_y=build_error_bars(speeds),
        text=["", *shares],
        textposition="bottom right",
        mode="lines+markers+text",
        line_color=colour,
        name=smallest.device,
    )


def _axis_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis as exponents of ten."""
    return math.log10(min(values) / AXIS_MARGIN), math.log10(max(values) * AXIS_MARGIN)


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten between two exponents of ten."""
    ticks = (digit * 10.0**power for power in range(math.floor(low), math.ceil(high)) for digit in (1, 2, 5))
    return [tick for tick in ticks if low <= math.log10(tick) <= high]
