"""The panels as images for print, one for each kind of work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from sweeper.commands.report.platform_panels import NOTE, Panel, build_panels, list_colours, list_names
from sweeper.pages.front_plot import FrontPlot, draw_image
from sweeper.results.ranking import BestResult, group_by_work, sort_by_platform

matplotlib.use("agg")
from matplotlib import pyplot

HATCHES = ["", "///", "..."]
DPI = 150
PANEL_WIDTH_IN = 5.2
MIN_PANEL_HEIGHT_IN = 3.4
THOUSANDS = EngFormatter(sep="")  # used from 1000 on: it formats 0.3 as 300m


def write_images(results: Sequence[BestResult], path: Path) -> Iterator[Path]:
    """Write an image for each kind of work and yield its path: that of `path` with the work in its name."""
    for work, work_results in group_by_work(results).items():
        image_path = name_image(path, work)
        _write_image(sort_by_platform(work_results), work, image_path)
        yield image_path


def name_image(path: Path, content: str) -> Path:
    """Return the path of an image: that of `path` with what it shows in its name."""
    return path.with_name(f"{path.stem}_{re.sub(r'[^A-Za-z0-9.]+', '_', content).strip('_')}.png")


def save_front(plot: FrontPlot, path: Path) -> None:
    """Write the image of a front."""
    figure = draw_image(plot)
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    pyplot.close(figure)


def _write_image(results: Sequence[BestResult], title: str, path: Path) -> None:
    panels = build_panels(results)
    side = 3 if len(panels) > 1 else 1
    panel_height_in = max(MIN_PANEL_HEIGHT_IN, 1.8 + 0.3 * len(results))
    size_in = (PANEL_WIDTH_IN * side, panel_height_in * side)
    figure, axes_grid = pyplot.subplots(side, side, figsize=size_in, squeeze=False)
    for panel, axes in zip(panels, np.ravel(axes_grid), strict=True):
        _draw_panel(axes, panel, list_names(results), list_colours(results))
    figure.suptitle(title)
    figure.text(0.01, 0.0, NOTE if side > 1 else "", fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    pyplot.close(figure)


def _draw_panel(axes: Any, panel: Panel, names: Sequence[str], colours: Sequence[str]) -> None:
    rows = np.arange(len(names))
    axes.set(title=panel.title, xlabel=panel.unit)
    axes.set_yticks(rows, names)
    if panel.is_empty:
        axes.text(0.5, 0.5, "not in the store", transform=axes.transAxes, ha="center")
        axes.set(xticks=[], yticks=[])
        return
    _draw_bars(axes, panel, rows, colours)
    if panel.spread:
        _draw_boxes(axes, panel, rows, colours)
        axes.set_yticks(rows, names)
    if len(panel.known_series) > 1:
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=3)  # below, clear of the bars
    axes.set_xlim(left=0)
    margin = max(0.0, 3 - len(names)) / 2  # a single platform's bar does not fill the panel
    axes.set_ylim(-0.5 - margin, len(names) - 0.5 + margin)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda value, _: THOUSANDS(value) if value >= 1000 else f"{value:g}")
    axes.invert_yaxis()


def _draw_bars(axes: Any, panel: Panel, rows: np.ndarray, colours: Sequence[str]) -> None:
    series = panel.known_series
    height = 0.8 / max(1, len(series))
    for n, (name, measured) in enumerate(series.items()):
        values = [value.value for value in measured]
        style = {"color": colours, "edgecolor": "#333", "hatch": HATCHES[n], "label": name}
        positions = rows + (n - (len(series) - 1) / 2) * height
        errors = [[value.error_below for value in measured], [value.error_above for value in measured]]
        axes.barh(positions, values, height, xerr=errors, error_kw={"capsize": 2}, **style)


def _draw_boxes(axes: Any, panel: Panel, rows: np.ndarray, colours: Sequence[str]) -> None:
    style = {"positions": rows, "orientation": "horizontal", "patch_artist": True, "widths": 0.6}
    boxes = axes.boxplot(panel.spread, medianprops={"color": "black"}, **style)["boxes"]
    for box, colour in zip(boxes, colours, strict=True):
        box.set_facecolor(colour)
