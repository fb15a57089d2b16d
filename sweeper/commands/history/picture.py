"""Draw the history as an HTML page that opens offline."""

from itertools import pairwise
from statistics import geometric_mean

import plotly.graph_objects as go

from sweeper.commands.history.output import build_runs_table, build_table, label_series
from sweeper.commands.history.reference_file import History, Series, round_value
from sweeper.common.format import count, format_interval, format_number
from sweeper.pages import html_page
from sweeper.pages.chart_style import COLORS, GRAY, build_error_bars
from sweeper.pages.html_page import Chart, Table

NOTE = "Points are runs with their own 95% intervals, dashed lines the levels that later runs are compared with."


def build_page(history: History, name: str) -> str:
    """Return an HTML page with the current levels, and a chart and a table of runs for each series."""
    sections: list[Chart | Table] = [build_table(history)]
    for series, label in zip(history.series, label_series([s.identity for s in history.series]), strict=True):
        title = f"{label} on {series.identity.hardware}"
        sections += [build_chart(title, series), build_runs_table(series, f"Runs of {title}")]
    runs = sum(len(series.runs) for series in history.series)
    overview = f"{name}: {count(runs, 'run')} of {count(len(history.series), 'kind')} of work and hardware."
    return html_page.build_page("sweeper: performance over time", sections, overview)


def build_chart(title: str, series: Series) -> Chart:
    """Chart the runs of a series in order, with the levels and a numbered line at each version change."""
    runs, unit, figure = series.runs, series.identity.unit, go.Figure()
    bounds = [format_interval(*run.interval.bounds[1:]) for run in runs]
    texts = [
        f"{run.sweep}, {run.date}<br>{format_number(run.value)} {unit}{f' ({bound})' if bound else ''}"
        for run, bound in zip(runs, bounds, strict=True)
    ]
    figure.add_scatter(
        x=list(range(1, len(runs) + 1)),
        y=[run.value for run in runs],
        error_y={**(build_error_bars([run.interval for run in runs]) or {}), "color": COLORS[0], "thickness": 1},
        mode="markers",
        marker={"color": COLORS[0], "size": 8},
        hovertext=texts,
        hoverinfo="text",
        showlegend=False,
    )
    starts = [place for place, run in enumerate(runs) if run.starts_level or not place]
    style = {"mode": "lines", "line": {"color": COLORS[1], "dash": "dash"}, "hoverinfo": "y", "showlegend": False}
    for start, end in pairwise([*starts, len(runs)]):
        level = round_value(geometric_mean(run.value for run in runs[start:end]))  # the mean of one may differ from it
        figure.add_scatter(x=[start + 0.6, end + 0.4], y=[level, level], **style)
    notes = list[str]()
    for place, (run, changed) in enumerate(zip(runs, series.changes, strict=True)):
        if place and changed:
            text = f"{', '.join(changed)} ({run.date[:10]})"
            notes.append(f"{len(notes) + 1}: {text}")
            figure.add_vline(x=place + 0.5, line={"color": GRAY, "dash": "dot", "width": 1})
            label = {"text": str(len(notes)), "hovertext": text, "showarrow": False, "font": {"size": 12}}
            figure.add_annotation(x=place + 0.5, y=1.0, yref="paper", yanchor="bottom", **label)
    shown = min(len(runs), 6)
    ticks = sorted({1 + round(n * (len(runs) - 1) / max(1, shown - 1)) for n in range(shown)})
    dates = [runs[place - 1].date[:10] for place in ticks]
    figure.update_xaxes(range=[0.5, len(runs) + 0.5], tickvals=ticks, ticktext=dates)
    note = f"{NOTE} {'Changes. ' if notes else ''}{'; '.join(notes)}".strip()
    return Chart(title, [figure.update_yaxes(title=unit)], note)
