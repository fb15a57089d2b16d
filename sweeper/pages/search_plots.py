"""The plots of a finished search: PNG images, and one interactive page with all of them.

The page includes plotly.js (5 MB), so that it opens anywhere, in MLflow's artifact view too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
from optuna import visualization
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning

from sweeper.common.trials import TrialRecord
from sweeper.pages import parameter_charts
from sweeper.pages.chart_style import load_pyplot, plain_label
from sweeper.pages.front_plot import FrontPlot, build_panel_figures, draw_front
from sweeper.pages.html_page import Chart, build_page
from sweeper.pages.image import draw_image
from sweeper.pages.parameter_charts import GridAxis
from workloads.api.metrics import get_metric

MAX_CELLS = 20  # along each side of the heatmap
MIN_SIZE_IN = (9.0, 6.0)
DPI = 110
PAGE = "plots.html"
SLICE_WIDTH_PX = 240  # of the values of one parameter


@dataclass(frozen=True)
class SearchResult:
    study: optuna.Study  # an Optuna study of the trials in memory, for Optuna's plots
    parameters: pd.DataFrame  # a column for each parameter that varies, as text, as MLflow stores them
    label: str  # the objective and its unit

    @property
    def minimize(self) -> bool:
        return self.study.direction is optuna.study.StudyDirection.MINIMIZE

    @cached_property
    def values(self) -> pd.Series:
        """The objective of each trial, in the unit of `label`."""
        return pd.Series([trial.value for trial in self.study.trials], dtype=float)

    @cached_property
    def ranks(self) -> pd.Series:
        """The rank of each trial from 0 to 1, the highest for the best."""
        return self.values.rank(pct=True, ascending=not self.minimize)

    @cached_property
    def importances(self) -> dict[str, float]:
        """The importance of each parameter; empty where there is nothing to compare."""
        if self.values.nunique() < 2 or self.parameters.shape[1] < 2:
            return {}
        return parameter_charts.compute_importances(self.ranks, self.parameters)

    @cached_property
    def heatmap(self) -> tuple[GridAxis, GridAxis, np.ndarray] | None:
        """The axes of the first two parameters with several values, and the best value in each cell."""
        columns = {name: [trial.params[name] for trial in self.study.trials] for name in map(str, self.parameters)}
        varying = [name for name, values in columns.items() if len(set(values)) > 1]
        if len(varying) < 2:
            return None
        x, y = (parameter_charts.build_grid_axis(name, columns[name], MAX_CELLS) for name in varying[:2])
        return x, y, parameter_charts.find_best_in_cells(x, y, self.values.to_list(), minimize=self.minimize)


def draw(
    folder: Path,
    records: Sequence[TrialRecord],
    distributions: Mapping[str, BaseDistribution],
    objective: str,
    direction: str,
    front: FrontPlot | None = None,
) -> list[Path]:
    """Write a PNG for each plot of the ranked trials, and the page with all of them. Returns their paths.

    `distributions` are those of the parameters that vary; `front` is the picture of several objectives' front.
    """
    search = build_search_result(records, distributions, objective, direction)
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of values in other scripts
        return [*_write_images(folder, search, front), _write_page(folder / PAGE, search, front)]


def build_search_result(
    records: Sequence[TrialRecord], distributions: Mapping[str, BaseDistribution], objective: str, direction: str
) -> SearchResult:
    """Return the trials as an Optuna study and as a table, with values as they are drawn."""
    metric, drawn = get_metric(objective), dict(distributions)
    study = optuna.create_study(direction=direction)
    for name, distribution in distributions.items():
        if isinstance(distribution, CategoricalDistribution):
            drawn[name] = CategoricalDistribution([plain_label(choice) for choice in distribution.choices])
    points = [{name: plain_label(record.params[name]) for name in drawn} for record in records]
    for record, point in zip(records, points, strict=True):
        value = record.metrics[objective] * metric.factor
        study.add_trial(optuna.create_trial(params=point, distributions=drawn, value=value))
    parameters = pd.DataFrame({name: [str(point[name]) for point in points] for name in drawn})
    return SearchResult(study, parameters, metric.heading)


def _write_images(folder: Path, search: SearchResult, front: FrontPlot | None) -> list[Path]:
    pyplot = load_pyplot()
    from optuna.visualization import matplotlib as optuna_plots

    plots = {
        "history": optuna_plots.plot_optimization_history,
        "parallel_coordinates": optuna_plots.plot_parallel_coordinate,
        "slice": optuna_plots.plot_slice,
    }
    figures = {name: np.ravel(plot(search.study, target_name=search.label))[0].figure for name, plot in plots.items()}
    for name, chart in _build_charts(search).items():
        figures[name] = draw_image(chart.figures, 1, MIN_SIZE_IN, chart.title)
    if front:
        figures["front"] = draw_front(front)
    paths = []
    for name, figure in figures.items():
        figure.set_size_inches(*np.maximum(MIN_SIZE_IN, figure.get_size_inches()))
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=DPI, bbox_inches="tight")
    pyplot.close("all")
    return paths


def _build_charts(search: SearchResult) -> dict[str, Chart]:
    """Return the charts of our own that the search has enough trials for, by the names of their images."""
    charts = {}
    if search.importances:
        charts["importances"] = parameter_charts.build_importances("Parameter importances", search.importances)
    if search.heatmap:
        figure = parameter_charts.build_heatmap(*search.heatmap, search.label)
        charts["heatmap"] = Chart(f"best {search.label} over all other parameters", [figure])
    return charts


def _write_page(path: Path, search: SearchResult, front: FrontPlot | None) -> Path:
    history = visualization.plot_optimization_history(search.study, target_name=search.label)
    values = visualization.plot_slice(search.study, target_name=search.label)
    width_px = SLICE_WIDTH_PX * search.parameters.shape[1]
    charts = [
        *([Chart(front.title, build_panel_figures(front))] if front else []),
        Chart("Optimization history", [history.update_layout(title=None)]),
        parameter_charts.build_parallel_coordinates(
            "Parallel coordinates", search.parameters, search.ranks, search.values, search.label
        ),
        Chart("Each parameter by itself", [values.update_layout(title=None)], min_width_px=width_px),
    ]
    path.write_text(
        build_page(f"{path.parent.parent.name}: {search.label}", [*charts, *_build_charts(search).values()])
    )
    return path
