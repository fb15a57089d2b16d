"""The history drawn: each series as numbers, and from them an HTML page that opens offline, or an image."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sweeper.cli.command import writing
from sweeper.commands.history.output import build_runs_table, build_table, compute_level, label_series
from sweeper.commands.history.reference_file import History, Series
from sweeper.common.format import count, format_interval, format_number
from sweeper.pages import html_page
from sweeper.pages.chart_style import COLORS, GREY, load_pyplot
from sweeper.pages.html_page import Chart
from sweeper.pages.image import DPI, draw_image

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_TICKS = 6
PANEL_IN = (8.0, 3.6)  # of a series
NOTE_COLUMNS = 110  # characters of a line below a series
NOTE = "Points are runs with their own 95% intervals, dashed lines the levels that later runs are held to."


@dataclass(frozen=True)
class Picture:
    """One series. Places are those of its runs, from 1.

    Attributes:
        errors: the distances of each run's value to the lower and to the upper bounds, zero without an interval.
        levels: the first place, the last place and the mean of each.
        changes: the place of a run and what changed before it.
        ticks: the places whose dates are shown: a few, the first and the last among them.
    """

    title: str
    series: Series
    values: list[float]
    errors: tuple[list[float], list[float]]
    levels: list[tuple[int, int, float]]
    changes: list[tuple[int, str]]
    ticks: list[int]

    @property
    def note(self) -> str:
        """What the numbers in the picture mean."""
        changes = [f"{n}: {text}" for n, (_, text) in enumerate(self.changes, 1)]
        return f"{NOTE} {'Changes. ' if changes else ''}{'; '.join(changes)}".strip()

    @property
    def dates(self) -> list[str]:
        """The dates of the ticks."""
        return [self.series.runs[place - 1].date[:10] for place in self.ticks]


def build_pictures(history: History) -> list[Picture]:
    """Return a picture of each series."""
    pictures = []
    for series, label in zip(history.series, label_series([s.identity for s in history.series]), strict=True):
        runs, places = series.runs, len(series.runs)
        errors = [run.interval.errors if run.interval.has_interval else (0.0, 0.0) for run in runs]
        starts = [place for place, run in enumerate(runs) if run.starts_level or not place]
        changes = zip(runs[1:], series.changes[1:], strict=True)
        shown = min(places, MOST_TICKS)
        picture = Picture(
            title=f"{label} on {series.identity.hardware}",
            series=series,
            values=[run.value for run in runs],
            errors=([below for below, _ in errors], [above for _, above in errors]),
            levels=[
                (start + 1, end, compute_level(runs[start:end]))
                for start, end in zip(starts, [*starts[1:], places], strict=True)
            ],
            changes=[
                (n, f"{', '.join(texts)} ({run.date[:10]})") for n, (run, texts) in enumerate(changes, 2) if texts
            ],
            ticks=sorted({1 + round(n * (places - 1) / max(1, shown - 1)) for n in range(shown)}),
        )
        pictures.append(picture)
    return pictures


def build_page(history: History, name: str) -> str:
    """Return the HTML: the present levels, a chart of each series, and its runs."""
    pictures = build_pictures(history)
    tables = [build_table(history), *(build_runs_table(picture.series, picture.title) for picture in pictures)]
    charts = [Chart(picture.title, [build_figure(picture)], picture.note) for picture in pictures]
    runs = sum(len(series.runs) for series in history.series)
    overview = f"{name}: {count(runs, 'run')} of {count(len(pictures), 'kind')} of work and hardware."
    return html_page.build_page("sweeper: performance over time", [*tables, *charts], overview)


def build_figure(picture: Picture) -> go.Figure:
    """Return the chart of a series: its runs, their levels, and a numbered line at each change."""
    import plotly.graph_objects as go

    runs, unit = picture.series.runs, picture.series.identity.unit
    bounds = [format_interval(*run.interval.bounds[1:]) for run in runs]
    texts = [
        f"{run.sweep}, {run.date}<br>{format_number(run.value)} {unit}{f' ({bound})' if bound else ''}"
        for run, bound in zip(runs, bounds, strict=True)
    ]
    below, above = picture.errors
    figure = go.Figure()
    figure.add_scatter(
        x=list(range(1, len(runs) + 1)),
        y=picture.values,
        error_y={"array": above, "arrayminus": below, "color": COLORS[0], "thickness": 1},
        mode="markers",
        marker={"color": COLORS[0], "size": 8},
        hovertext=texts,
        hoverinfo="text",
        showlegend=False,
    )
    for first, last, mean in picture.levels:
        line = {"color": COLORS[1], "dash": "dash"}
        figure.add_scatter(
            x=[first - 0.4, last + 0.4], y=[mean] * 2, mode="lines", line=line, hoverinfo="y", showlegend=False
        )
    for n, (place, text) in enumerate(picture.changes, 1):
        figure.add_vline(x=place - 0.5, line={"color": GREY, "dash": "dot", "width": 1})
        label = {"text": str(n), "hovertext": text, "showarrow": False, "font": {"size": 12}}
        figure.add_annotation(x=place - 0.5, y=1.0, yref="paper", yanchor="bottom", **label)
    figure.update_xaxes(range=[0.5, len(runs) + 0.5], tickvals=picture.ticks, ticktext=picture.dates)
    return figure.update_yaxes(title=unit)


def write_image(history: History, path: Path) -> None:
    """Write an image of all series, one below the other, in the format of the path's ending."""
    figures = []
    for picture in build_pictures(history):
        note = {"text": textwrap.fill(picture.note, NOTE_COLUMNS), "font": {"size": 7}}
        figures.append(build_figure(picture).update_layout(title=picture.title, xaxis_title=note))
    image = draw_image(figures, 1, PANEL_IN)
    try:
        with writing("out", path):
            image.savefig(path, dpi=DPI, bbox_inches="tight")
    finally:
        load_pyplot().close(image)
