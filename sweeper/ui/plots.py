"""Pictures of a search: Optuna's own and a heatmap, as images and on one interactive page.

The page carries its JavaScript (plotly.js, 5 MB) with it, so that it opens anywhere, MLflow's artifact view included.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning

from sweeper.common.metrics import DISPLAY
from sweeper.common.trials import TrialRecord

FEWEST_TRIALS = 20  # below that a table says more
MOST_CELLS = 20  # along each side of the heatmap
PLOTS = {
    "history": "plot_optimization_history",
    "parallel_coordinates": "plot_parallel_coordinate",
    "slice": "plot_slice",
    "importances": "plot_param_importances",
}


def draw(
    folder: Path,
    records: Sequence[TrialRecord],
    distributions: Mapping[str, BaseDistribution],
    objective: str,
    direction: str,
) -> list[Path]:
    """The files, in `folder`: a PNG for each picture and `pictures.html` with all of them. None for a small search.

    `records` are the ranked trials of one search; `distributions` are those of the parameters that vary.
    """
    if len(records) < FEWEST_TRIALS or not distributions:
        return []
    label, unit, factor = DISPLAY.get(objective, (objective, "", 1.0))
    named = f"{label} {unit}".strip()
    study = optuna.create_study(direction=direction)
    for record in records:
        value = record.metrics[objective] * factor
        study.add_trial(optuna.create_trial(params=dict(record.params), distributions=dict(distributions), value=value))
    varied = len({trial.value for trial in study.trials}) > 1
    plots = {name: plot for name, plot in PLOTS.items() if name != "importances" or (varied and len(distributions) > 1)}
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        images = _images(folder, study, plots, named)
        return [*images, _page(folder / "pictures.html", study, plots, named)]


def _images(folder: Path, study: optuna.Study, plots: Mapping[str, str], named: str) -> list[Path]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as drawn

    paths = []
    for name, plot in plots.items():
        axes = getattr(drawn, plot)(study, target_name=named)
        figure = np.ravel(axes)[0].figure
        paths.append(_saved(figure, folder / f"{name}.png"))
    if cells := heat(study.trials, minimize=study.direction.name == "MINIMIZE"):
        x, y, xs, ys, best = cells
        figure, axes = pyplot.subplots(figsize=(9, 7))
        image = axes.imshow(best, origin="lower", aspect="auto", cmap="viridis")
        axes.grid(False)
        axes.set_xticks(range(len(xs)), xs, rotation=90)
        axes.set_yticks(range(len(ys)), ys)
        axes.set(xlabel=x, ylabel=y, title=f"best {named} over all else")
        figure.colorbar(image, label=named)
        paths.append(_saved(figure, folder / "heatmap.png"))
    pyplot.close("all")
    return paths


def _saved(figure: Any, path: Path) -> Path:
    figure.set_size_inches(max(9.0, figure.get_size_inches()[0]), max(6.0, figure.get_size_inches()[1]))
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return path


def _page(path: Path, study: optuna.Study, plots: Mapping[str, str], named: str) -> Path:
    import plotly.graph_objects as go
    from optuna import visualization as drawn

    figures = [getattr(drawn, plot)(study, target_name=named) for name, plot in plots.items()]
    if cells := heat(study.trials, minimize=study.direction.name == "MINIMIZE"):
        x, y, xs, ys, best = cells
        figure = go.Figure(go.Heatmap(z=best, x=xs, y=ys, colorscale="Viridis", colorbar={"title": named}))
        figure.update_layout(title=f"best {named} over all else")
        figure.update_xaxes(title=x, type="category").update_yaxes(title=y, type="category")
        figures.append(figure)
    parts = [figure.to_html(full_html=False, include_plotlyjs=not n) for n, figure in enumerate(figures)]
    path.write_text(f"<!doctype html><meta charset='utf-8'><title>{named}</title>\n" + "\n".join(parts))
    return path


def heat(
    trials: Sequence[optuna.trial.FrozenTrial], *, minimize: bool
) -> tuple[str, str, list[str], list[str], list[list[float]]] | None:
    """The best value in each cell over the first two parameters that vary: their names, the cells' names along x and y,
    and the values by row (y), NaN where nothing was tried. None where fewer than two vary."""
    varying = [name for name in trials[0].params if len({trial.params[name] for trial in trials}) > 1][:2]
    if len(varying) < 2:
        return None
    places, names = zip(*(_cells([trial.params[name] for trial in trials]) for name in varying), strict=True)
    better = min if minimize else max
    best = [[math.nan] * len(names[0]) for _ in names[1]]
    for trial, column, row in zip(trials, *places, strict=True):
        assert trial.value is not None
        so_far = best[row][column]
        best[row][column] = trial.value if math.isnan(so_far) else better(so_far, trial.value)
    return varying[0], varying[1], names[0], names[1], best


def _cells(values: Sequence[Any]) -> tuple[list[int], list[str]]:
    """Which cell each value falls into, and what the cells are called: the values themselves where they are few."""
    numbers = all(isinstance(value, (int, float)) for value in values)
    different = sorted(set(values), key=None if numbers else str)
    if len(different) <= MOST_CELLS or not numbers:
        return [different.index(value) for value in values], [str(value) for value in different]
    edges = np.linspace(different[0], different[-1], MOST_CELLS + 1)
    places = np.clip(np.digitize(values, edges) - 1, 0, MOST_CELLS - 1)
    return [int(place) for place in places], [f"{edge:.4g}+" for edge in edges[:-1]]
