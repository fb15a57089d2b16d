"""Draw the plots of a finished search as PNG images and as one interactive page.

The page includes plotly.js (5 MB), so it opens anywhere, even in MLflow's artifact view.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from sweeper.common.format import format_point
from sweeper.common.trials import TrialRecord
from sweeper.pages import parameter_charts
from sweeper.pages.chart_style import COLORS, plain_label
from sweeper.pages.front_plot import FrontPlot, build_panel_figures
from sweeper.pages.html_page import Chart, build_page
from sweeper.pages.image import write_image
from sweeper.pages.parameter_charts import GridAxis
from workloads.api.metrics import get_metric

MAX_CELLS = 20  # on each side of the heatmap
SIZE_IN = (9.0, 6.0)  # size of an image with a single panel
PANEL_IN = (5.0, 4.5)  # size of each panel if there are several
PAGE = "plots.html"


@dataclass(frozen=True)
class SearchResult:
    points: pd.DataFrame  # a row for each trial and a column for each varying parameter
    values: pd.Series  # each trial's objective, in the unit of `label`
    numbers: Sequence[int]  # the trials' numbers
    label: str  # the objective and its unit
    minimize: bool

    @property
    def parameters(self) -> pd.DataFrame:
        """The points as strings, which is how MLflow stores them."""
        return self.points.map(str)

    @cached_property
    def ranks(self) -> pd.Series:
        """The rank of each trial from 0 to 1. The best trial has the highest rank."""
        return self.values.rank(pct=True, ascending=not self.minimize)

    @cached_property
    def importances(self) -> dict[str, float]:
        """The importance of each parameter, or an empty dict if there is nothing to compare."""
        if self.values.nunique() < 2 or self.points.shape[1] < 2:
            return {}
        return parameter_charts.compute_importances(self.ranks, self.parameters)

    @cached_property
    def heatmap(self) -> tuple[GridAxis, GridAxis, np.ndarray] | None:
        """The axes of the first two varying parameters, and the best value in each cell."""
        columns = {str(name): values.tolist() for name, values in self.points.items()}
        varying = [name for name, values in columns.items() if len(set(values)) > 1]
        if len(varying) < 2:
            return None
        x, y = (parameter_charts.build_grid_axis(name, columns[name], MAX_CELLS) for name in varying[:2])
        return x, y, parameter_charts.find_best_in_cells(x, y, self.values.to_list(), minimize=self.minimize)


def draw(
    folder: Path,
    records: Sequence[TrialRecord],
    names: Iterable[str],
    objective: str,
    direction: str,
    front: FrontPlot | None = None,
) -> list[Path]:
    """Write a PNG for each plot of the ranked trials, and a page with all plots. Return the paths. `names` are the
    varying parameters. `front` is the front's plot if there are several objectives."""
    charts = dict(_build_charts(build_search_result(records, names, objective, direction), front))
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


def build_search_result(
    records: Sequence[TrialRecord], names: Iterable[str], objective: str, direction: str
) -> SearchResult:
    """Return the trials as tables of values to draw."""
    metric = get_metric(objective)
    points = pd.DataFrame(
        {name: [plain_label(record.params[name]) for record in records] for name in names}, dtype=object
    )
    values = pd.Series([record.metrics[objective] * metric.factor for record in records], dtype=float)
    numbers = [record.number for record in records]
    return SearchResult(points, values, numbers, metric.heading, direction == "minimize")


def _build_charts(search: SearchResult, front: FrontPlot | None) -> Iterator[tuple[str, Chart]]:
    if front:
        yield "front", Chart(front.title, build_panel_figures(front))
    texts = [format_point(row) for row in cast("list[dict[str, Any]]", search.points.to_dict("records"))]
    trials = pd.DataFrame({"x": search.numbers, "y": search.values, "run": texts})
    best = trials.assign(y=trials.y.cummin() if search.minimize else trials.y.cummax())
    history = parameter_charts.build_points(trials, best, "best so far", "trial", search.label)
    yield "history", Chart("Optimization history", [history])
    yield (
        "parallel_coordinates",
        parameter_charts.build_parallel_coordinates(
            "Parallel coordinates", search.parameters, search.ranks, search.values, search.label
        ),
    )
    yield "slice", Chart("Each parameter by itself", [_draw_slice(search, str(name)) for name in search.points])
    if search.importances:
        yield "importances", parameter_charts.build_importances("Parameter importances", search.importances)
    if search.heatmap:
        figure = parameter_charts.build_heatmap(*search.heatmap, search.label)
        yield "heatmap", Chart(f"best {search.label} over all other parameters", [figure])


def _draw_slice(search: SearchResult, name: str) -> go.Figure:
    xs = search.points[name] if parameter_charts.is_numeric(search.points[name]) else search.parameters[name]
    points = go.Scatter(x=xs, y=search.values, mode="markers", marker={"color": COLORS[0]}, text=search.numbers)
    is_wide = parameter_charts.is_numeric(xs) and min(xs) > 0 and max(xs) > 100 * min(xs)
    figure = go.Figure(points).update_xaxes(title=name, type="log" if is_wide else None)
    return figure.update_yaxes(title=search.label)
