"""The report's images for print: the panels of each kind of work, and each Pareto front."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from sweeper.commands.report.fronts import SweepFront
from sweeper.commands.report.platform_panels import NOTE, Panel, build_panels, list_colors, list_names
from sweeper.pages.chart_style import load_pyplot
from sweeper.pages.front_plot import draw_image
from sweeper.results.ranking import BestResult, group_by_work, sort_by_platform

HATCHES = ["", "///", "..."]
DPI = 150
PANEL_WIDTH_IN = 5.2
MIN_PANEL_HEIGHT_IN = 3.4
THOUSANDS = EngFormatter(sep="")  # used from 1000 on: it formats 0.3 as 300m


def write_images(results: Sequence[BestResult], fronts: Sequence[SweepFront], path: Path) -> Iterator[Path]:
    """Write an image for each kind of work and each front, and yield its path: `path` with the content in its name."""
    for work, work_results in group_by_work(results).items():
        yield _save(_draw_panels(sort_by_platform(work_results), work), path, work)
    for front in fronts:
        yield _save(draw_image(front.plot), path, f"front {front.sweep}")


def _save(figure: Any, path: Path, content: str) -> Path:
    path = path.with_name(f"{path.stem}_{re.sub(r'[^A-Za-z0-9.]+', '_', content).strip('_')}.png")
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    load_pyplot().close(figure)
    return path


def _draw_panels(results: Sequence[BestResult], title: str) -> Any:
    panels = build_panels(results)
    side = 3 if len(panels) > 1 else 1
    panel_height_in = max(MIN_PANEL_HEIGHT_IN, 1.8 + 0.3 * len(results))
    size_in = (PANEL_WIDTH_IN * side, panel_height_in * side)
    figure, axes_grid = load_pyplot().subplots(side, side, figsize=size_in, squeeze=False)
    for panel, axes in zip(panels, np.ravel(axes_grid), strict=True):
        _draw_panel(axes, panel, list_names(results), list_colors(results))
    figure.suptitle(title)
    figure.text(0.01, 0.0, NOTE if side > 1 else "", fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    return figure


def _draw_panel(axes: Any, panel: Panel, names: Sequence[str], colors: Sequence[str]) -> None:
    rows, series = np.arange(len(names)), panel.known_series
    axes.set(title=panel.title, xlabel=panel.unit)
    axes.set_yticks(rows, names)
    if panel.is_empty:
        axes.text(0.5, 0.5, "not in the store", transform=axes.transAxes, ha="center")
        axes.set(xticks=[], yticks=[])
        return
    height = 0.8 / max(1, len(series))
    for n, (name, measured) in enumerate(series.items()):
        style = {"color": colors, "edgecolor": "#333", "hatch": HATCHES[n], "label": name}
        positions = rows + (n - (len(series) - 1) / 2) * height
        errors = list(zip(*(value.errors for value in measured), strict=True))
        values = [value.value for value in measured]
        axes.barh(positions, values, height, xerr=errors, error_kw={"capsize": 2}, **style)
    if panel.spread:
        layout = {"positions": rows, "orientation": "horizontal", "patch_artist": True, "widths": 0.6}
        boxes = axes.boxplot(panel.spread, medianprops={"color": "black"}, **layout)["boxes"]
        for box, color in zip(boxes, colors, strict=True):
            box.set_facecolor(color)
        axes.set_yticks(rows, names)
    if len(series) > 1:
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=3)  # below, clear of the bars
    axes.set_xlim(left=0)
    margin = max(0.0, 3 - len(names)) / 2  # a single platform's bar does not fill the panel
    axes.set_ylim(-0.5 - margin, len(names) - 0.5 + margin)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda value, _: THOUSANDS(value) if value >= 1000 else f"{value:g}")
    axes.invert_yaxis()
