"""The history as one HTML file that opens offline, in the style of the report."""

from __future__ import annotations

import plotly.graph_objects as go

from sweeper.commands.history.overview import build_runs_table, build_table
from sweeper.commands.history.picture import Picture, build_pictures
from sweeper.commands.history.reference_file import History
from sweeper.common.format import count
from sweeper.pages.chart_style import COLORS
from sweeper.pages.html_page import Chart
from sweeper.pages.html_page import build_page as build_report_page

GREY = "#888"  # is seen on a light page and on a dark one


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
