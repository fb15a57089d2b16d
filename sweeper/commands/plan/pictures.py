"""Pictures of a plan as inline SVG. Positions are in percent, so that they fit any width and text keeps its size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from sweeper.commands.plan.rounding import round_to_band
from workloads.estimator.schedules import Kind
from workloads.estimator.timeline import Operation

BAR_HEIGHT, ROW_HEIGHT = 26, 18  # pixels
# Shades of one colour for one kind of use: computation blue, communication orange and red, then the rest.
STEP_COLOURS = {
    "products": "#0072B2",
    "attention": "#3b94c8",
    "head_and_loss": "#77b8dd",
    "other_compute": "#b3d7ec",
    "tensor_parallel": "#D55E00",
    "context_parallel": "#e07f33",
    "expert_parallel": "#E69F00",
    "data_parallel": "#f0bd57",
    "pipeline": "#f6dca3",
    "bubble": "#999999",
    "copies": "#CC79A7",
    "optimizer": "#009E73",
}
MEMORY_COLOURS = {
    "parameters": "#0072B2",
    "gathered": "#56B4E9",
    "gradients": "#009E73",
    "optimizer_states": "#CC79A7",
    "activations": "#E69F00",
    "working": "#D55E00",
    "runtime": "#999999",
    "reserved": "#cccccc",
}
PASS_COLOURS: Mapping[Kind, str] = {
    "forward": "#0072B2",
    "backward": "#009E73",
    "backward_input": "#E69F00",
    "backward_weight": "#CC79A7",
}
PASS_NAMES: Mapping[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward for inputs",
    "backward_weight": "backward for weights",
}
CHUNK_SHADES = 5  # shades of stages of one rank


@dataclass(frozen=True)
class Bar:
    """A stacked bar: its parts by name in one unit, and the text above it."""

    text: str
    parts: Mapping[str, float]


def draw_bars(
    bars: Sequence[Bar], colours: Mapping[str, str], unit: str, *, error_share: float, limit: float = 0.0
) -> str:
    """Return stacked bars of one scale, with their legend; a line marks the limit if there is one.

    Args:
        error_share: of the estimates, which says how many digits their titles have.
    """
    largest = max([limit, *(sum(bar.parts.values()) for bar in bars)])
    used = [name for name in colours if any(bar.parts.get(name) for bar in bars)]
    legend = "".join(f"<span><i style='background:{colours[name]}'></i>{escape(name)}</span>" for name in used)
    rows = []
    for bar in bars:
        pieces, start = [], 0.0
        for name in used:
            share = 100 * bar.parts.get(name, 0.0) / largest
            title = f"{name}: {round_to_band(bar.parts.get(name, 0.0), error_share)} {unit}"
            pieces.append(_rect(start, share, 0, BAR_HEIGHT, colours[name], title))
            start += share
        if limit:
            pieces.append(_line(100 * limit / largest, BAR_HEIGHT))
        svg = f"<svg class='bar' height='{BAR_HEIGHT}' role='img'>{''.join(pieces)}</svg>"
        rows.append(f"<p class='label'>{escape(bar.text)}</p>{svg}")
    return f"<div class='legend'>{legend}</div>{''.join(rows)}"


def draw_timeline(operations: Sequence[Operation]) -> str:
    """Return a row for each pipeline rank, with its passes in the colours of their kinds."""
    end_s = max(operation.stop_s for operation in operations)
    rows = []
    for rank in range(1 + max(operation.rank for operation in operations)):
        pieces = [_draw_operation(item, end_s) for item in operations if item.rank == rank]
        svg = f"<svg class='bar' height='{ROW_HEIGHT}' role='img'>{''.join(pieces)}</svg>"
        rows.append(f"<div class='rank'><span>{rank}</span>{svg}</div>")
    used = {operation.action.kind for operation in operations}
    legend = "".join(
        f"<span><i style='background:{colour}'></i>{PASS_NAMES[kind]}</span>"
        for kind, colour in PASS_COLOURS.items()
        if kind in used
    )
    axis = f"<div class='rank note'><span>rank</span><span>0</span><span class='end'>{end_s:.2g} s</span></div>"
    return f"<div class='legend'>{legend}</div>{''.join(rows)}{axis}"


def _draw_operation(item: Operation, end_s: float) -> str:
    action = item.action
    title = f"micro-batch {action.microbatch}, stage {action.chunk} of the rank, {PASS_NAMES[action.kind]}"
    start, share = 100 * item.start_s / end_s, 100 * (item.stop_s - item.start_s) / end_s
    opacity = 1 - 0.7 * (action.chunk % CHUNK_SHADES) / CHUNK_SHADES
    colour = PASS_COLOURS[action.kind]
    return _rect(start, share, 0, ROW_HEIGHT, colour, title, f" class='pass' fill-opacity='{opacity:.2g}'")


@dataclass(frozen=True)
class Point:
    """A value with its band, by number of GPUs."""

    gpus: int
    value: float
    low: float
    high: float


def draw_scaling(points: Sequence[Point], unit: str) -> str:
    """Return a line over the number of GPUs, on a logarithmic axis, with its band."""
    top = _round_up(max(point.high for point in points))
    span = max(1.0, math.log2(points[-1].gpus / points[0].gpus))
    xs = [4 + 90 * math.log2(point.gpus / points[0].gpus) / span for point in points]
    band = [(x, _y(p.high, top)) for x, p in zip(xs, points, strict=True)]
    band += [(x, _y(p.low, top)) for x, p in reversed(list(zip(xs, points, strict=True)))]
    line = [(x, _y(p.value, top)) for x, p in zip(xs, points, strict=True)]
    dots = "".join(
        f"<circle cx='{x:.2f}%' cy='{y:.2f}%' r='4' fill='#0072B2'><title>{point.gpus:,} GPUs: "
        f"{point.value:,.0f} {unit} ({point.low:,.0f} to {point.high:,.0f})</title></circle>"
        for (x, y), point in zip(line, points, strict=True)
    )
    shapes = (
        f"<svg viewBox='0 0 100 100' preserveAspectRatio='none' width='100%' height='100%'>"
        f"<polygon points='{_list_points(band)}' fill='#0072B2' fill-opacity='.2'/>"
        f"<polyline points='{_list_points(line)}' fill='none' stroke='#0072B2' stroke-width='2' "
        "vector-effect='non-scaling-stroke'/></svg>"
    )
    return f"<svg class='scaling' height='300' role='img'>{_draw_axes(points, xs, top, unit)}{shapes}{dots}</svg>"


def _draw_axes(points: Sequence[Point], xs: Sequence[float], top: float, unit: str) -> str:
    pieces = []
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        label = f"{value:,.0f}{f' {unit}, by number of GPUs' if step == 4 else ''}"
        pieces.append(f"<line x1='0' x2='100%' y1='{y:.2f}%' y2='{y:.2f}%' stroke='var(--grid)'/>")
        pieces.append(f"<text x='0' y='{y:.2f}%' dy='-3'>{escape(label)}</text>")
    for place, (point, x) in enumerate(zip(points, xs, strict=True)):
        if place % 2 == (len(points) - 1) % 2:
            pieces.append(f"<text x='{x:.2f}%' y='98%' text-anchor='middle'>{point.gpus:,}</text>")
    return "".join(pieces)


def _y(value: float, top: float) -> float:
    return 90 - 82 * value / top


def _round_up(value: float) -> float:
    """Return the next value of which a quarter is a round number."""
    unit = 10 ** math.floor(math.log10(value))
    return next(factor * unit for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if factor * unit >= value)


def _list_points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points)


def _line(x: float, height: int) -> str:
    return f"<line x1='{x:.2f}%' x2='{x:.2f}%' y1='0' y2='{height}' stroke='var(--ink)' stroke-width='2'/>"


def _rect(x: float, width: float, y: int, height: int, colour: str, title: str, more: str = "") -> str:
    if width <= 0:
        return ""
    box = f"x='{x:.3f}%' y='{y}' width='{width:.3f}%' height='{height}' fill='{colour}'{more}"
    return f"<rect {box}><title>{escape(title)}</title></rect>"
