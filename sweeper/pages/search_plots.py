"""Draw the plots of a finished search as PNG images and as one interactive page.

The page includes plotly.js (5 MB), so it opens anywhere, even in MLflow's artifact view.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd
import plotly.graph_objects as go

from sweeper.common.format import format_point
from sweeper.common.trials import TrialRecord
from sweeper.pages import parameter_charts
from sweeper.pages.chart_style import COLORS, plain_label
from sweeper.pages.html_page import Chart, build_page
from sweeper.pages.image import write_image
from workloads.api.metrics import get_metric

MAX_CELLS = 20  # on each side of the heatmap
SIZE_IN = (9.0, 6.0)  # size of an image with a single panel
PANEL_IN = (5.0, 4.5)  # size of each panel if there are several
PAGE = "plots.html"


def draw(
    folder: Path,
    records: Sequence[TrialRecord],
    names: Iterable[str],
    objective: str,
    direction: str,
    front: Chart | None = None,
) -> list[Path]:
    """Write a PNG for each plot of the ranked trials, and a page with all plots. Return the paths. `names` are the
    varying parameters. `front` is the front's chart if there are several objectives."""
    charts = dict(build_charts(records, names, objective, direction, front))
    folder.mkdir(exist_ok=True)
    page = folder / PAGE
    page.write_text(build_page(f"{folder.parent.name}: {get_metric(objective).heading}", [*charts.values()]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # for values in non-Latin scripts
        for name, chart in charts.items():
            columns = min(len(chart.figures), 3)
            size_in = SIZE_IN if columns == 1 else PANEL_IN
            write_image(folder / f"{name}.png", chart.figures, columns, size_in, chart.title)
    return [*(folder / f"{name}.png" for name in charts), page]


def build_charts(
    records: Sequence[TrialRecord], names: Iterable[str], objective: str, direction: str, front: Chart | None = None
) -> Iterator[tuple[str, Chart]]:
    """Yield the charts of the ranked trials by file name. Charts without anything to compare are left out."""
    metric, minimize = get_metric(objective), direction == "minimize"
    points = pd.DataFrame(
        {name: [plain_label(record.params[name]) for record in records] for name in names}, dtype=object
    )
    values = pd.Series([record.metrics[objective] * metric.factor for record in records], dtype=float)
    parameters = points.map(str)  # which is how MLflow stores them
    ranks = values.rank(pct=True, ascending=not minimize)  # from 0 to 1; the best trial has the highest rank
    numbers, label = [record.number for record in records], metric.heading
    if front:
        yield "front", front
    texts = [format_point(row) for row in cast("list[dict[str, Any]]", points.to_dict("records"))]
    trials = pd.DataFrame({"x": numbers, "y": values, "run": texts})
    best = trials.assign(y=trials.y.cummin() if minimize else trials.y.cummax())
    history = parameter_charts.build_points(trials, best, "best so far", "trial", label)
    yield "history", Chart("Optimization history", [history])
    lines = parameter_charts.build_parallel_coordinates("Parallel coordinates", parameters, ranks, values, label)
    yield "parallel_coordinates", lines
    slices = [_draw_slice(points[name], values, numbers, label) for name in points]
    yield "slice", Chart("Each parameter by itself", slices)
    is_comparable = values.nunique() > 1 and points.shape[1] > 1
    if is_comparable and (importances := parameter_charts.compute_importances(ranks, parameters)):
        yield "importances", parameter_charts.build_importances("Parameter importances", importances)
    varying = [name for name in points if points[name].nunique(dropna=False) > 1]
    if len(varying) > 1:
        x, y = (parameter_charts.build_grid_axis(str(name), points[name].tolist(), MAX_CELLS) for name in varying[:2])
        cells = parameter_charts.find_best_in_cells(x, y, values.to_list(), minimize=minimize)
        figure = parameter_charts.build_heatmap(x, y, cells, label)
        yield "heatmap", Chart(f"best {label} over all other parameters", [figure])


def _draw_slice(xs: pd.Series, values: pd.Series, numbers: Sequence[int], label: str) -> go.Figure:
    as_numbers = pd.to_numeric(xs, errors="coerce")
    x = as_numbers if as_numbers.notna().all() else xs.map(str)
    is_wide = x is as_numbers and min(x) > 0 and max(x) > 100 * min(x)
    figure = go.Figure(go.Scatter(x=x, y=values, mode="markers", marker={"color": COLORS[0]}, text=numbers))
    return figure.update_xaxes(title=str(xs.name), type="log" if is_wide else None).update_yaxes(title=label)
