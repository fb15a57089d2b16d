"""Draw the charts of a finished search."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import pandas as pd
import plotly.graph_objects as go

from sweeper.common.format import format_point, one_line
from sweeper.common.trials import TrialRecord
from sweeper.config.space import Value
from sweeper.pages import parameter_charts
from sweeper.pages.chart_style import COLORS
from sweeper.pages.html_page import Chart
from workloads.api.metrics import get_metric

MAX_CELLS = 20  # on each side of the heatmap


def build_charts(
    records: Sequence[TrialRecord], names: Iterable[str], objective: str, direction: str
) -> Iterator[Chart]:
    """Yield the charts of the ranked trials. Charts without anything to compare are left out."""
    metric, minimize = get_metric(objective), direction == "minimize"
    points = pd.DataFrame({name: [_label(record.params[name]) for record in records] for name in names}, dtype=object)
    values = pd.Series([record.metrics[objective] * metric.factor for record in records], dtype=float)
    parameters = points.map(str)  # which is how MLflow stores them
    ranks = values.rank(pct=True, ascending=not minimize)  # from 0 to 1; the best trial has the highest rank
    numbers, label = [record.number for record in records], metric.heading
    texts = [format_point(row) for row in cast("list[dict[str, Any]]", points.to_dict("records"))]
    trials = pd.DataFrame({"x": numbers, "y": values, "run": texts})
    best = trials.assign(y=trials.y.cummin() if minimize else trials.y.cummax())
    history = parameter_charts.build_points(trials, best, "best so far", "trial", label)
    yield Chart("Optimization history", [history])
    yield parameter_charts.build_parallel_coordinates("Parallel coordinates", parameters, ranks, values, label)
    slices = [_draw_slice(points[name], values, numbers, label) for name in points]
    yield Chart("Each parameter by itself", slices)
    is_comparable = values.nunique() > 1 and points.shape[1] > 1
    if is_comparable and (importances := parameter_charts.compute_importances(ranks, parameters)):
        yield parameter_charts.build_importances("Parameter importances", importances)
    varying = [name for name in points if points[name].nunique(dropna=False) > 1]
    if len(varying) > 1:
        x, y = (parameter_charts.build_grid_axis(str(name), points[name].tolist(), MAX_CELLS) for name in varying[:2])
        cells = parameter_charts.find_best_in_cells(x, y, values.to_list(), minimize=minimize)
        figure = parameter_charts.build_heatmap(x, y, cells, label)
        yield Chart(f"best {label} over all other parameters", [figure])


def _label(value: Value) -> Value:
    return one_line(value) if isinstance(value, str) else value


def _draw_slice(xs: pd.Series, values: pd.Series, numbers: Sequence[int], label: str) -> go.Figure:
    as_numbers = pd.to_numeric(xs, errors="coerce")
    x = as_numbers if as_numbers.notna().all() else xs.map(str)
    is_wide = x is as_numbers and min(x) > 0 and max(x) > 100 * min(x)
    figure = go.Figure(go.Scatter(x=x, y=values, mode="markers", marker={"color": COLORS[0]}, text=numbers))
    return figure.update_xaxes(title=str(xs.name), type="log" if is_wide else None).update_yaxes(title=label)
