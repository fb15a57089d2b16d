"""The nine panels as an image for print: one for each kind of work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from sweeper.report import panels as nine
from sweeper.report.best import BestResult, by_work

matplotlib.use("agg")
from matplotlib import pyplot

HATCHES = ["", "///", "..."]
DPI = 150
THOUSANDS = EngFormatter(sep="")  # below one it would say 300m


def images(found: Sequence[BestResult], path: Path) -> Iterator[Path]:
    """Write them beside `path`, each under its name and the work's."""
    for work, own in by_work(found).items():
        here = path.with_name(f"{path.stem}_{re.sub(r'[^A-Za-z0-9.]+', '_', work).strip('_')}.png")
        own = sorted(own, key=lambda peak: (peak.device, peak.devices))
        drawn = nine.panels(own)
        side = 3 if len(drawn) > 1 else 1
        figure, axes = pyplot.subplots(
            side, side, figsize=(5.2 * side, max(3.4, 1.8 + 0.3 * len(own)) * side), squeeze=False
        )
        for panel, place in zip(drawn, np.ravel(axes), strict=True):
            _draw(place, panel, nine.names(own), nine.colours(own))
        figure.suptitle(work)
        figure.text(0.01, 0.0, nine.NOTE if side > 1 else "", fontsize=8)
        figure.tight_layout(rect=(0, 0.02, 1, 1))
        figure.savefig(here, dpi=DPI, bbox_inches="tight")
        pyplot.close(figure)
        yield here


def _draw(axes: Any, panel: nine.Panel, names: Sequence[str], colours: Sequence[str]) -> None:
    places = np.arange(len(names))
    axes.set(title=panel.title, xlabel=panel.unit)
    axes.set_yticks(places, names)
    if panel.empty:
        axes.text(0.5, 0.5, "not in the store", transform=axes.transAxes, ha="center")
        axes.set(xticks=[], yticks=[])
        return
    shown = panel.shown
    height = 0.8 / max(1, len(shown))
    for n, (name, figures) in enumerate(shown.items()):
        values = [f.value for f in figures]
        errors = [[f.value - f.low for f in figures], [f.high - f.value for f in figures]]
        style = {"color": colours, "edgecolor": "#333", "hatch": HATCHES[n], "label": name}
        above = places + (n - (len(shown) - 1) / 2) * height
        axes.barh(above, values, height, xerr=errors, error_kw={"capsize": 2}, **style)
    if panel.spread:
        boxes = {"positions": places, "orientation": "horizontal", "patch_artist": True, "widths": 0.6}
        drawn = axes.boxplot(panel.spread, medianprops={"color": "black"}, **boxes)
        for box, colour in zip(drawn["boxes"], colours, strict=True):
            box.set_facecolor(colour)
        axes.set_yticks(places, names)
    if len(shown) > 1:
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=3)  # no bar is behind it there
    axes.set_xlim(left=0)
    room = max(0.0, 3 - len(names)) / 2  # one platform alone would be a wall
    axes.set_ylim(-0.5 - room, len(names) - 0.5 + room)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda value, _: THOUSANDS(value) if value >= 1000 else f"{value:g}")
    axes.invert_yaxis()
