"""The history as an SVG or PNG image."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib

from sweeper.commands.history.picture import Picture, build_pictures
from sweeper.commands.history.reference_file import History
from sweeper.pages.chart_style import COLORS
from workloads.api.errors import UserInputError, describe_os_error

matplotlib.use("agg")
from matplotlib import pyplot

DPI = 150
WIDTH_IN = 8.0
HEIGHT_IN = 3.6  # of a series
NOTE_COLUMNS = 110  # characters of a line below a series


def write_image(history: History, path: Path) -> None:
    """Write an image of all series, one below the other, in the format of the path's ending."""
    pictures = build_pictures(history)
    size_in = (WIDTH_IN, HEIGHT_IN * len(pictures))
    figure, axes_column = pyplot.subplots(len(pictures), 1, figsize=size_in, squeeze=False)
    for picture, axes in zip(pictures, axes_column[:, 0], strict=True):
        _draw(axes, picture)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UserInputError(f"--out {path}: cannot be written: {describe_os_error(error)}") from error
    finally:
        pyplot.close(figure)


def _draw(axes: Any, picture: Picture) -> None:
    places = range(1, len(picture.values) + 1)
    errors = list(zip(*picture.errors, strict=True))
    axes.errorbar(places, picture.values, yerr=errors, fmt="o", color=COLORS[0], capsize=2, markersize=4)
    for level in picture.levels:
        axes.hlines(level.value, level.first - 0.4, level.last + 0.4, colors=COLORS[1], linestyles="dashed")
    for n, change in enumerate(picture.changes, 1):
        axes.axvline(change.place - 0.5, color="#888", linestyle="dotted", linewidth=1)
        axes.annotate(str(n), (change.place - 0.5, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    axes.set_xticks(picture.ticks, [picture.dates[place - 1] for place in picture.ticks])
    axes.set_xlim(0.5, len(picture.values) + 0.5)
    axes.set_title(picture.title, fontsize=10, pad=14)
    axes.set_ylabel(picture.unit)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_xlabel(textwrap.fill(picture.note, NOTE_COLUMNS), fontsize=7, loc="left")
