"""Write images of a page's charts. matplotlib draws the Plotly figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import EngFormatter

from sweeper.pages.chart_style import GRAY, load_pyplot

DPI = 150
DASHES = {"dash": "dashed", "dot": "dotted", None: "solid"}
HATCHES = {"/": "///", ".": "...", "": "", None: ""}
THOUSANDS = EngFormatter(sep="")  # only for values of at least 1000, because it formats 0.3 as 300m


def write_image(
    path: Path, figures: Sequence[Any], columns: int, panel_in: tuple[float, float], title: str = "", note: str = ""
) -> None:
    """Write an image with a panel of size `panel_in` for each Plotly figure, in `columns` columns. Raises OSError."""
    rows = -(-len(figures) // columns)
    size_in = (panel_in[0] * columns, panel_in[1] * rows)
    image, grid = load_pyplot().subplots(rows, columns, figsize=size_in, squeeze=False)
    panels = list(np.ravel(grid))
    for figure in figures:
        _draw_panel(panels.pop(0), figure)
    for spare in panels:
        spare.remove()
    image.suptitle(title)
    image.text(0.01, 0.0, note, fontsize=8)
    image.tight_layout(rect=(0, 0.02, 1, 1))
    try:
        image.savefig(path, dpi=DPI, bbox_inches="tight")
    finally:
        load_pyplot().close(image)


def _draw_panel(axes: Any, figure: Any) -> None:
    layout, bars = figure.layout, [trace for trace in figure.data if trace.type == "bar"]
    axes.set_title(layout.title.text or "", pad=14 if layout.annotations else None)
    axes.set(ylabel=layout.yaxis.title.text or "")
    size = {"fontsize": layout.xaxis.title.font.size} if layout.xaxis.title.font.size else {}
    axes.set_xlabel(layout.xaxis.title.text or "", **size)
    names = list(layout.yaxis.categoryarray or [name for trace in bars for name in trace.y])
    groups = list(dict.fromkeys(trace.offsetgroup for trace in bars))
    for trace in figure.data:
        DRAWN[trace.type](axes, trace, names, groups)
    if any(trace.type in ("bar", "box") for trace in figure.data):
        axes.set_yticks(range(len(names)), names)
        margin = max(0.0, 3 - len(names)) / 2  # a single platform's bar should not fill the panel
        axes.set(xlim=(0, None), ylim=(len(names) - 0.5 + margin, -0.5 - margin))
        axes.xaxis.set_major_formatter(lambda value, _: THOUSANDS(value) if value >= 1000 else f"{value:g}")
    for axis, name in ((layout.xaxis, "x"), (layout.yaxis, "y")):
        if axis.type == "log":
            axes.set(**{f"{name}scale": "log"})
        if axis.rangemode == "tozero":
            axes.set(**{f"{name}lim": (0, None)})
        if axis.range:
            axes.set(**{f"{name}lim": axis.range})
        if axis.tickvals:
            axes.set(**{f"{name}ticks": axis.tickvals, f"{name}ticklabels": axis.ticktext or axis.tickvals})
    if layout.xaxis.showticklabels is False:
        axes.set(xticks=[], yticks=[])
    for line in layout.shapes:
        axes.axvline(line.x0, color=GRAY, linestyle=DASHES[line.line.dash], linewidth=1)
    for note in layout.annotations:
        transform = axes.transAxes if note.xref == "paper" else axes.get_xaxis_transform()
        axes.text(note.x, note.y, note.text, transform=transform, ha="center", va="bottom")
    shown = [trace for trace in figure.select_traces(lambda trace: trace.name) if trace.showlegend is not False]
    if len(shown) > 1 and layout.showlegend is not False:  # below the chart, clear of the bars
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=3)


def _draw_points(axes: Any, trace: Any, _: Sequence[str], __: Sequence[str]) -> None:
    line = DASHES[trace.line.dash] if "lines" in trace.mode else ""
    marker = "o" if "markers" in trace.mode else ""
    color = trace.marker.color or trace.line.color
    errors = [trace.error_y.arrayminus, trace.error_y.array] if trace.error_y.array is not None else None
    style = {"marker": marker, "markersize": 4, "linestyle": line, "linewidth": 1, "color": color}
    style["drawstyle"] = "steps-post" if trace.line.shape == "hv" else "default"
    axes.errorbar(trace.x, trace.y, yerr=errors, capsize=2, label=trace.name, **style)
    for x, y, text in zip(trace.x, trace.y, trace.text if "text" in trace.mode else (), strict=False):
        axes.annotate(text, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)


def _draw_bars(axes: Any, trace: Any, names: Sequence[str], groups: Sequence[str]) -> None:
    height, group = 0.8 / len(groups), groups.index(trace.offsetgroup)
    places = [names.index(name) + (group - (len(groups) - 1) / 2) * height for name in trace.y]
    errors = [trace.error_x.arrayminus, trace.error_x.array] if trace.error_x.array is not None else None
    label = trace.name if trace.showlegend is not False else None
    style = {"color": trace.marker.color, "edgecolor": "#333", "hatch": HATCHES[trace.marker.pattern.shape]}
    axes.barh(places, trace.x, height, xerr=errors, error_kw={"capsize": 2}, label=label, **style)


def _draw_box(axes: Any, trace: Any, names: Sequence[str], _: Sequence[str]) -> None:
    layout = {"positions": [names.index(trace.name)], "orientation": "horizontal", "widths": 0.6, "patch_artist": True}
    (box,) = axes.boxplot([trace.x], medianprops={"color": "black"}, **layout)["boxes"]
    box.set_facecolor(trace.marker.color)


def _draw_cells(axes: Any, trace: Any, _: Sequence[str], __: Sequence[str]) -> None:
    cells = axes.imshow(np.array(trace.z, dtype=float), origin="lower", aspect="auto", cmap="viridis")
    axes.grid(False)  # Optuna's plots set a style that has a grid
    axes.set_xticks(range(len(trace.x)), trace.x, rotation=90)
    axes.set_yticks(range(len(trace.y)), trace.y)
    axes.figure.colorbar(cells, label=trace.colorbar.title.text)


def _draw_lines(axes: Any, trace: Any, _: Sequence[str], __: Sequence[str]) -> None:
    columns = [np.asarray(dimension["values"], dtype=float) for dimension in trace.dimensions]
    heights = np.array([(column - column.min()) / (np.ptp(column) or 1.0) for column in columns])
    ranks = np.asarray(trace.line.color, dtype=float)
    colors = LinearSegmentedColormap.from_list("", [color for _, color in trace.line.colorscale])(ranks)
    for number in np.argsort(ranks):
        axes.plot(heights[:, number], color=colors[number], linewidth=1)
    axes.set_xticks(range(len(columns)), [dimension.label for dimension in trace.dimensions], rotation=25)
    axes.set_yticks([])
    for place, (column, dimension) in enumerate(zip(columns, trace.dimensions, strict=True)):
        names = dict(zip(dimension.tickvals or (), dimension.ticktext or (), strict=False))
        for height, value in ((0, column.min()), (1, column.max())):
            axes.annotate(names.get(value, f"{value:g}"), (place, height), fontsize=8)


DRAWN = {"scatter": _draw_points, "bar": _draw_bars, "box": _draw_box, "heatmap": _draw_cells, "parcoords": _draw_lines}
