"""The plots of a finished search: PNG images, and one interactive page with all of them.

The page includes plotly.js (5 MB), so that it opens anywhere, in MLflow's artifact view too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning

from sweeper.common.trials import TrialRecord
from sweeper.pages.chart_style import plain_label, without_markup
from sweeper.pages.front_plot import FrontPlot, build_figure, draw_image
from workloads.api.metrics import get_metric

if TYPE_CHECKING:
    import pandas as pd

    from sweeper.pages.parameter_charts import GridAxis

MIN_TRIALS = 20  # a table shows fewer better
MAX_CELLS = 20  # along each side of the heatmap
MIN_SIZE_IN = (9.0, 6.0)
DPI = 110
PAGE = "plots.html"
PARALLEL_COORDINATES = "Parallel coordinates (the redder, the better)"
IMPORTANCES = "Parameter importances (Kelley's epsilon squared)"


@dataclass(frozen=True)
class SearchResult:
    """The ranked trials of one search.

    Attributes:
        study: an Optuna study of the trials in memory, for Optuna's plots.
        parameters: a column for each parameter that varies, as text, as MLflow stores them.
        label: the objective and its unit.
    """

    study: optuna.Study
    parameters: pd.DataFrame
    label: str

    @property
    def minimize(self) -> bool:
        return self.study.direction is optuna.study.StudyDirection.MINIMIZE

    @cached_property
    def values(self) -> pd.Series:
        """The objective of each trial, in the unit of `label`."""
        import pandas as pd

        return pd.Series([trial.value for trial in self.study.trials], dtype=float)

    @cached_property
    def ranks(self) -> pd.Series:
        """The rank of each trial from 0 to 1, the highest for the best."""
        return self.values.rank(pct=True, ascending=not self.minimize)

    @cached_property
    def importances(self) -> dict[str, float]:
        """The importance of each parameter; empty where there is nothing to compare."""
        from sweeper.pages.parameter_charts import compute_importances

        if self.values.nunique() < 2 or self.parameters.shape[1] < 2:
            return {}
        return compute_importances(self.ranks, self.parameters)

    @cached_property
    def heatmap(self) -> tuple[GridAxis, GridAxis, np.ndarray] | None:
        """The axes of the first two parameters with several values, and the best value in each cell."""
        from sweeper.pages.parameter_charts import build_grid_axis, find_best_in_cells

        columns = {name: [trial.params[name] for trial in self.study.trials] for name in map(str, self.parameters)}
        varying = [name for name, values in columns.items() if len(set(values)) > 1]
        if len(varying) < 2:
            return None
        x, y = (build_grid_axis(name, columns[name], MAX_CELLS) for name in varying[:2])
        return x, y, find_best_in_cells(x, y, self.values.to_list(), minimize=self.minimize)


def are_drawn(records: Sequence[TrialRecord], parameters: Sized) -> bool:
    """Return whether these ranked trials of a search with these parameters have plots."""
    return len(records) >= MIN_TRIALS and len(parameters) > 0


def draw(
    folder: Path,
    records: Sequence[TrialRecord],
    distributions: Mapping[str, BaseDistribution],
    objective: str,
    direction: str,
    front: FrontPlot | None = None,
) -> list[Path]:
    """Write a PNG for each plot and the page with all of them. Returns their paths, none for a small search.

    Args:
        records: the ranked trials of one search.
        distributions: those of the parameters that vary.
        direction: "maximize" or "minimize".
        front: with several objectives, the picture of their front.
    """
    if not are_drawn(records, distributions):
        return []
    search = build_search_result(records, distributions, objective, direction)
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of values in other scripts
        return [*_write_images(folder, search, front), _write_page(folder / PAGE, search, front)]


def build_search_result(
    records: Sequence[TrialRecord], distributions: Mapping[str, BaseDistribution], objective: str, direction: str
) -> SearchResult:
    """Return the trials as an Optuna study and as a table."""
    import pandas as pd

    metric = get_metric(objective)
    study = optuna.create_study(direction=direction)
    distributions = {name: _drawn_distribution(distribution) for name, distribution in distributions.items()}
    for record in records:
        value = record.metrics[objective] * metric.factor
        params = {name: plain_label(record.params[name]) for name in distributions}
        study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=value))
    parameters = pd.DataFrame({name: [str(plain_label(r.params[name])) for r in records] for name in distributions})
    return SearchResult(study, parameters, metric.heading)


def _drawn_distribution(distribution: BaseDistribution) -> BaseDistribution:
    """Return the distribution with its choices as they are drawn."""
    if not isinstance(distribution, CategoricalDistribution):
        return distribution
    return CategoricalDistribution([plain_label(choice) for choice in distribution.choices])


def _write_images(folder: Path, search: SearchResult, front: FrontPlot | None) -> list[Path]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as optuna_plots

    def draw_with_optuna(plot: Callable[..., Any]) -> Any:
        return np.ravel(plot(search.study, target_name=search.label))[0].figure

    figures = {
        "history": draw_with_optuna(optuna_plots.plot_optimization_history),
        "parallel_coordinates": draw_with_optuna(optuna_plots.plot_parallel_coordinate),
        "slice": draw_with_optuna(optuna_plots.plot_slice),
    }
    if search.importances:
        figures["importances"] = _draw_importances(search.importances)
    if search.heatmap:
        figures["heatmap"] = _draw_heatmap(*search.heatmap, search.label)
    if front:
        figures["front"] = draw_image(front)
    paths = [_save(figure, folder / f"{name}.png") for name, figure in figures.items()]
    pyplot.close("all")
    return paths


def _draw_importances(importances: Mapping[str, float]) -> Any:
    from matplotlib import pyplot

    from sweeper.pages.chart_style import COLORS
    from sweeper.pages.parameter_charts import MEASURE

    figure, axes = pyplot.subplots()
    axes.barh(list(importances), list(importances.values()), color=COLORS[0])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel=MEASURE, title=IMPORTANCES)
    return figure


def _draw_heatmap(x: GridAxis, y: GridAxis, best: np.ndarray, label: str) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 7))
    image = axes.imshow(best, origin="lower", aspect="auto", cmap="viridis")
    axes.grid(False)
    axes.set_xticks(range(len(x.labels)), x.labels, rotation=90)
    axes.set_yticks(range(len(y.labels)), y.labels)
    axes.set(xlabel=x.title, ylabel=y.title, title=_heatmap_title(label))
    figure.colorbar(image, label=label)
    return figure


def _save(figure: Any, path: Path) -> Path:
    figure.set_size_inches(*np.maximum(MIN_SIZE_IN, figure.get_size_inches()))
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    return path


def _write_page(path: Path, search: SearchResult, front: FrontPlot | None) -> Path:
    """Write the interactive plots. The first one includes plotly.js for all."""
    from optuna import visualization as optuna_plots

    from sweeper.pages import parameter_charts

    parallel_coordinates = parameter_charts.build_parallel_coordinates(
        search.parameters, search.ranks, search.values, search.label
    )
    figures = [
        *([build_figure(front)] if front else []),
        optuna_plots.plot_optimization_history(search.study, target_name=search.label),
        parallel_coordinates.update_layout(title=PARALLEL_COORDINATES, margin={"t": 150}),
        optuna_plots.plot_slice(search.study, target_name=search.label),
    ]
    if search.importances:
        figures.append(parameter_charts.build_importances(search.importances).update_layout(title=IMPORTANCES))
    if search.heatmap:
        heatmap = parameter_charts.build_heatmap(*search.heatmap, search.label)
        figures.append(heatmap.update_layout(title=_heatmap_title(search.label)))
    pages = [without_markup(figure) for figure in figures]
    parts = [figure.to_html(full_html=False, include_plotlyjs=not n) for n, figure in enumerate(pages)]
    head = f"<!doctype html><meta charset='utf-8'><title>{escape(search.label)}</title>\n"
    path.write_text(head + "\n".join(parts))
    return path


def _heatmap_title(label: str) -> str:
    return f"best {label} over all other parameters"
