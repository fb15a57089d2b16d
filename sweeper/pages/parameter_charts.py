"""Draw the parameter charts of a sweep's plots and of the report: heatmap, parallel coordinates, importances.

A parameter's importance is Kelley's epsilon squared on ranks, a measure that requires no model.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from sweeper.common.format import format_number, short_value
from sweeper.pages.chart_style import COLORS, bar_chart_height_px, cut_name
from sweeper.pages.html_page import Chart

SLOW_TO_FAST = [[0, "#A8B3BF"], [0.5, "#E69F00"], [1, "#C22F00"]]  # visible on white and on black
LABEL_ANGLE = -25  # degrees; the labels of parallel coordinates are wider than the space between axes
AXIS_WIDTH_PX = 130  # distance between axes of parallel coordinates
MAX_LINES = 2000  # maximum number of lines in parallel coordinates
MAX_TICKS = 8  # maximum number of distinct numbers that each get a tick on an axis of parallel coordinates
MAX_CATEGORIES = 30  # maximum number of names on an axis
MAX_NAME_LENGTH = 24
MAX_LABELED_CELLS = 100  # a heatmap with more cells shows no values
MIN_TRIALS = 20  # minimum number of trials for importances
MIN_TRIALS_PER_GROUP = 4  # on average; a value tried only once would explain all of its variance
MAX_BINS = 8
MEASURE = "share of the variance of ranks"
LINES_NOTE = "the redder the better on their platform. Drag along an axis to select the lines that pass there."
IMPORTANCES_NOTE = (
    "The share of the variance of the trials' ranks on their platform that each parameter explains alone "
    "(Kelley's epsilon squared). Parameters that matter only together do not show, and a sampler that has "
    "converged leaves little to explain."
)


class GridAxis(NamedTuple):
    """One axis of a heatmap: the cell index of each trial, and the label of each cell."""

    title: str
    cells: Sequence[int]
    labels: Sequence[str]


def build_grid_axis(title: str, values: Sequence[Any], max_cells: int | None = None) -> GridAxis:
    """Return an axis with a cell for each value. Group more than `max_cells` numbers into cells of equal width."""
    numeric = all(isinstance(value, (int, float, np.number)) for value in values)
    distinct = sorted(set(values), key=None if numeric else str)
    if max_cells is None or len(distinct) <= max_cells or not numeric:
        index = {value: cell for cell, value in enumerate(distinct)}
        return GridAxis(title, [index[value] for value in values], [short_value(value) for value in distinct])
    edges = np.linspace(distinct[0], distinct[-1], max_cells + 1)
    cells = np.clip(np.digitize(values, edges) - 1, 0, max_cells - 1)
    return GridAxis(title, cells.tolist(), [f"{format_number(edge)}+" for edge in edges[:-1]])


def find_best_in_cells(x: GridAxis, y: GridAxis, values: Sequence[float], *, minimize: bool = False) -> np.ndarray:
    """Return the best value in each cell, by row (y) and column (x). Empty cells are NaN."""
    best = np.full((len(y.labels), len(x.labels)), math.nan)
    better = np.fmin if minimize else np.fmax  # both ignore NaN
    better.at(best, (np.asarray(y.cells), np.asarray(x.cells)), np.asarray(values, dtype=float))
    return best


def build_heatmap(x: GridAxis, y: GridAxis, best: np.ndarray, label: str) -> go.Figure:
    """Build a heatmap of the values from `find_best_in_cells`. If the heatmap is small, each cell shows its value."""
    text = [[format_number(value) for value in row] for row in best]
    template = "%{text}" if best.size <= MAX_LABELED_CELLS else None
    style = {"colorscale": "Viridis", "colorbar": {"title": label}, "texttemplate": template}
    figure = go.Figure(go.Heatmap(z=best, x=list(x.labels), y=list(y.labels), text=text, **style))
    figure.update_xaxes(title=x.title, type="category", categoryarray=list(x.labels))
    return figure.update_yaxes(title=y.title, type="category", categoryarray=list(y.labels))


def build_parallel_coordinates(
    title: str, parameters: pd.DataFrame, ranks: pd.Series, speeds: pd.Series, label: str
) -> Chart:
    """Build a chart with a line for each trial, redder for better ranks. Only the best `MAX_LINES` trials are drawn.

    Args:
        title: the chart's title.
        parameters: a column for each axis. A column with more than `MAX_CATEGORIES` names gets no axis.
        ranks: the rank of each trial. The best trial has the highest rank.
        speeds: the values on the last axis, which is titled `label`.
    """
    shown = ranks.sort_values().index[-MAX_LINES:]
    axes = []
    for name, column in parameters.items():
        values, heading = column[shown], cut_name(str(name), MAX_NAME_LENGTH)
        if is_numeric(values):
            numbers = pd.to_numeric(values)
            ticks = {"tickvals": sorted(numbers.unique())} if numbers.nunique() <= MAX_TICKS else {}
            axes.append({"label": heading, "values": numbers, **ticks})
        elif values.nunique() <= MAX_CATEGORIES:  # names are drawn at whole numbers
            codes, names = pd.factorize(values.fillna("none"), sort=True)
            texts = [cut_name(text, MAX_NAME_LENGTH) for text in names]
            axes.append({"label": heading, "values": codes, "tickvals": list(range(len(names))), "ticktext": texts})
    axes.append({"label": label, "values": speeds[shown]})
    line = {"color": ranks[shown], "colorscale": SLOW_TO_FAST}
    figure = go.Figure(go.Parcoords(line=line, dimensions=axes, labelangle=LABEL_ANGLE, labelside="top"))
    figure.update_layout(margin={"l": 80, "r": 80, "t": 100})
    shown_trials = f"{len(ranks)} trials" if len(ranks) <= MAX_LINES else f"the {MAX_LINES} best of {len(ranks)} trials"
    return Chart(title, [figure], f"Lines are {shown_trials}, {LINES_NOTE}", AXIS_WIDTH_PX * len(axes))


def is_numeric(values: pd.Series) -> bool:
    """Return whether every value is a number or a string that contains a number."""
    return bool(pd.to_numeric(values, errors="coerce").notna().all())


def build_importances(title: str, importances: Mapping[str, float]) -> Chart:
    """Build a bar chart of parameter importances, from top to bottom in the given order."""
    bars = go.Bar(x=list(importances.values()), y=list(importances), orientation="h", marker_color=COLORS[0])
    figure = go.Figure(bars).update_layout(height=bar_chart_height_px(len(importances)))
    figure.update_xaxes(title=MEASURE, range=[0, 1]).update_yaxes(autorange="reversed", automargin=True)
    return Chart(title, [figure], IMPORTANCES_NOTE)


def compute_importances(ranks: pd.Series, parameters: pd.DataFrame) -> dict[str, float]:
    """Return the fraction of the ranks' variance that each parameter explains by itself, highest first.

    For n trials in k groups, the fraction is (H - k + 1) / (n - k), clipped to [0, 1], with the Kruskal-Wallis
    statistic H. If a numeric parameter has many values, they are binned into groups of equal size. The rest of the
    variance is noise or interaction. Parameters with a single value, and text parameters whose values hardly repeat,
    are left out. Ranks may have any scale. The rows of `parameters` are in the order of `ranks`.
    """
    importances: dict[str, float] = {}
    if len(ranks) < MIN_TRIALS:
        return importances
    total = float(((ranks - ranks.mean()) ** 2).sum())
    for name, values in parameters.items():
        numbers, groups = pd.to_numeric(values, errors="coerce"), values.fillna("none")
        bins = min(MAX_BINS, len(values) // MIN_TRIALS_PER_GROUP)
        if numbers.notna().all() and numbers.nunique() > bins:
            groups = pd.qcut(numbers, bins, labels=False, duplicates="drop")
        if 1 < groups.nunique() <= len(groups) / MIN_TRIALS_PER_GROUP:
            within = float(((ranks - ranks.groupby(groups.to_numpy()).transform("mean")) ** 2).sum())
            share = 1 - within / (len(ranks) - groups.nunique()) / (total / (len(ranks) - 1)) if total else 0.0
            importances[str(name)] = float(np.clip(share, 0, 1))
    return dict(sorted(importances.items(), key=lambda item: -item[1]))


def build_points(points: pd.DataFrame, steps: pd.DataFrame, name: str, x_title: str, y_title: str) -> go.Figure:
    """Build a scatter chart of trials (columns `x`, `y`, and `run` for the labels) with a step line."""
    figure = go.Figure()
    marker, line = {"color": COLORS[0]}, {"color": COLORS[5], "shape": "hv"}
    figure.add_scatter(x=points.x, y=points.y, mode="markers", marker=marker, text=points["run"], name="trials")
    figure.add_scatter(x=steps.x, y=steps.y, mode="lines", line=line, name=name)
    return figure.update_xaxes(title=x_title).update_yaxes(rangemode="tozero", title=y_title)
