"""The history drawn: each series as numbers, and from them an HTML page that opens offline, or an image."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper.commands.history.new_runs import describe_changes
from sweeper.commands.history.output import (
    build_runs_table,
    build_table,
    compute_level,
    describe_hardware,
    label_series,
)
from sweeper.commands.history.reference_file import History, Series
from sweeper.common.format import count, format_interval, format_number
from sweeper.pages.chart_style import COLORS
from sweeper.pages.html_page import Chart
from sweeper.pages.html_page import build_page as build_report_page
from workloads.api.errors import UserInputError, describe_os_error

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_TICKS = 6
GREY = "#888"  # is seen on a light page and on a dark one
DPI = 150
WIDTH_IN = 8.0
HEIGHT_IN = 3.6  # of a series
NOTE_COLUMNS = 110  # characters of a line below a series


@dataclass(frozen=True)
class Level:
    """Runs that belong together: their first and last place, from 1, and their mean."""

    first: int
    last: int
    value: float


@dataclass(frozen=True)
class Change:
    """What changed before a run: its place, from 1, and the versions; a new level without any says so."""

    place: int
    text: str


@dataclass(frozen=True)
class Picture:
    """One series.

    Attributes:
        dates: of the runs, in their order.
        errors: the distances from the value to the bounds of its interval, zero without one.
        texts: what each run is, for a pointer over it.
    """

    title: str
    unit: str
    dates: list[str]
    values: list[float]
    errors: list[tuple[float, float]]
    texts: list[str]
    levels: list[Level]
    changes: list[Change]

    @property
    def note(self) -> str:
        """What the numbers in the picture mean."""
        changes = [f"{n}: {change.text}" for n, change in enumerate(self.changes, 1)]
        explained = "Points are runs with their own 95% intervals, dashed lines the levels that later runs are held to."
        return f"{explained} {'Changes. ' if changes else ''}{'; '.join(changes)}".strip()

    @property
    def ticks(self) -> list[int]:
        """The places whose dates are shown: a few, the first and the last among them."""
        count = len(self.dates)
        shown = min(count, MOST_TICKS)
        return sorted({1 + round(n * (count - 1) / max(1, shown - 1)) for n in range(shown)})


def build_pictures(history: History) -> list[Picture]:
    """Return a picture of each series."""
    labels = label_series([series.identity for series in history.series])
    return [_build_picture(series, label) for series, label in zip(history.series, labels, strict=True)]


def _build_picture(series: Series, label: str) -> Picture:
    runs, identity = series.runs, series.identity
    errors = [
        (0.0, 0.0) if run.low is None or run.high is None else (run.value - run.low, run.high - run.value)
        for run in runs
    ]
    bounds = [format_interval(run.low or math.nan, run.high or math.nan) for run in runs]
    values = [
        f"{format_number(run.value)} {identity.unit}" + (f" ({bound})" if bound else "")
        for run, bound in zip(runs, bounds, strict=True)
    ]
    return Picture(
        title=f"{label} on {describe_hardware(identity)}",
        unit=identity.unit,
        dates=[run.date[:10] for run in runs],
        values=[run.value for run in runs],
        errors=errors,
        texts=[f"{run.sweep}, {run.date}<br>{value}" for run, value in zip(runs, values, strict=True)],
        levels=_find_levels(series),
        changes=_find_changes(series),
    )


def _find_levels(series: Series) -> list[Level]:
    starts = [place for place, run in enumerate(series.runs) if run.starts_level or not place]
    ends = [*starts[1:], len(series.runs)]
    return [
        Level(start + 1, end, compute_level(series.runs[start:end])) for start, end in zip(starts, ends, strict=True)
    ]


def _find_changes(series: Series) -> list[Change]:
    changes = []
    for place, (before, after) in enumerate(zip(series.runs, series.runs[1:], strict=False), 2):
        texts = describe_changes(before, after)
        texts += ["a new level"] if after.starts_level else []
        if texts:
            changes.append(Change(place, f"{', '.join(texts)} ({after.date[:10]})"))
    return changes


def build_page(history: History, name: str) -> str:
    """Return the HTML: the present levels, a chart of each series, and its runs."""
    pictures = build_pictures(history)
    tables = [build_table(history)]
    tables += [
        build_runs_table(series, picture.title) for series, picture in zip(history.series, pictures, strict=True)
    ]
    charts = [Chart(picture.title, [build_figure(picture)], picture.note) for picture in pictures]
    runs = sum(len(series.runs) for series in history.series)
    overview = f"{name}: {count(runs, 'run')} of {count(len(pictures), 'kind')} of work and hardware."
    return build_report_page("sweeper: performance over time", tables, charts, overview)


def build_figure(picture: Picture) -> go.Figure:
    """Return the chart of a series: its runs, their levels, and a numbered line at each change."""
    import plotly.graph_objects as go

    places = list(range(1, len(picture.values) + 1))
    below, above = ([error[side] for error in picture.errors] for side in (0, 1))
    error_y = {"array": above, "arrayminus": below, "color": COLORS[0], "thickness": 1}
    figure = go.Figure()
    figure.add_scatter(
        x=places,
        y=picture.values,
        error_y=error_y,
        mode="markers",
        marker={"color": COLORS[0], "size": 8},
        hovertext=picture.texts,
        hoverinfo="text",
        showlegend=False,
    )
    for level in picture.levels:
        line = {"color": COLORS[1], "dash": "dash"}
        ends = [level.first - 0.4, level.last + 0.4]
        figure.add_scatter(x=ends, y=[level.value] * 2, mode="lines", line=line, hoverinfo="y", showlegend=False)
    for n, change in enumerate(picture.changes, 1):
        figure.add_vline(x=change.place - 0.5, line={"color": GREY, "dash": "dot", "width": 1})
        label = {"text": str(n), "hovertext": change.text, "showarrow": False, "font": {"size": 12}}
        figure.add_annotation(x=change.place - 0.5, y=1.0, yref="paper", yanchor="bottom", **label)
    ticks = picture.ticks
    axis = {"tickvals": ticks, "ticktext": [picture.dates[place - 1] for place in ticks]}
    figure.update_xaxes(range=[0.5, len(places) + 0.5], **axis)
    return figure.update_yaxes(title=picture.unit)


def write_image(history: History, path: Path) -> None:
    """Write an image of all series, one below the other, in the format of the path's ending."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pictures = build_pictures(history)
    size_in = (WIDTH_IN, HEIGHT_IN * len(pictures))
    figure, axes_column = pyplot.subplots(len(pictures), 1, figsize=size_in, squeeze=False)
    for picture, axes in zip(pictures, axes_column[:, 0], strict=True):
        _draw(axes, picture)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UserInputError(f"out={path}: cannot be written: {describe_os_error(error)}") from error
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
