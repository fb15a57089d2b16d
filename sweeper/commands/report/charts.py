"""The report's interactive charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import plotly.graph_objects as go

from sweeper.commands.report.platform_panels import (
    NOTE,
    Panel,
    build_error_bars,
    build_panels,
    list_colours,
    list_names,
)
from sweeper.commands.report.scaling import build_scaling_figure, group_by_scaling
from sweeper.common.format import format_number
from sweeper.metrics.derivation import MEMORY_METRICS
from sweeper.pages.chart_style import COLOURS
from sweeper.pages.html_page import Chart
from sweeper.pages.importance import MIN_TRIALS, compute_importances
from sweeper.pages.parameter_charts import (
    MAX_LINES,
    bar_chart_height_px,
    build_grid_axis,
    build_heatmap,
    build_importances,
    build_parallel_coordinates,
    find_best_in_cells,
    is_numeric,
)
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import (
    SPEED_UNITS,
    BestResult,
    MeasuredValue,
    find_speed_metric,
    group_by_work,
    list_varying_parameters,
    select_complete,
    sort_by_platform,
    split_by_work,
)

PATTERNS = ["", "/", "."]  # distinguish bars of one colour, in print too
MAX_POINTS = 5000
AXIS_WIDTH_PX = 130  # of parallel coordinates
MIN_TRIALS_FOR_HISTORY = 5
MIN_TRIALS_FOR_MEMORY = 3
# What the heatmaps of training show besides tokens/s. Within one kind of work all of them have the same order.
HEATMAP_METRICS = {"tflops": "TFLOP/s", "mfu": "MFU %", "hfu": "HFU %"}


def build_charts(stored: Stored) -> Iterator[Chart]:
    """Yield every chart that the store has enough trials for."""
    trials = stored.trials
    if not len(trials):
        return
    for work, results in group_by_work(stored.best_results).items():
        results = sort_by_platform(results)
        if len(results) > 1:
            yield _build_platforms(work, results)
        yield from _build_parameters(work, results)
    for title, results in group_by_scaling(stored.best_results):
        if scaling := build_scaling_figure(results, stored.sweeps):
            figure, note = scaling
            yield Chart(title, [figure], note)
    for sweep, sweep_trials in trials.groupby("tag.sweep"):
        for work, work_trials in split_by_work(sweep_trials):
            title = f"{sweep}, {work}" if work else str(sweep)
            yield from build_heatmaps(title, work_trials)
            yield from _build_history(title, work_trials)
            yield from _build_memory(title, work_trials)
    yield from _build_timeline(trials)


def _build_platforms(work: str, results: Sequence[BestResult]) -> Chart:
    """Build the nine panels of training, or the one panel of other work."""
    names, colours = list_names(results), list_colours(results)
    figures = [_build_panel(panel, names, colours) for panel in build_panels(results)]
    if len(figures) > 1:
        return Chart(f"Nine views of {work}", figures, NOTE)
    return Chart(f"Best of each device: {work}", figures)


def _build_panel(panel: Panel, names: Sequence[str], colours: Sequence[str]) -> go.Figure:
    figure = go.Figure()
    for pattern, (name, values) in zip(PATTERNS, panel.known_series.items(), strict=False):
        _add_bars(figure, pattern, name, list(zip(names, colours, values, strict=True)))
    for name, colour, spread in zip(names, colours, panel.spread, strict=False):
        figure.add_box(x=spread[:MAX_POINTS], name=name, marker_color=colour, boxpoints="outliers")
    if panel.is_empty:
        figure.add_annotation(text="not in the store", showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
        figure.update_xaxes(showticklabels=False)
    figure.update_layout(
        title=panel.title,
        height=bar_chart_height_px(len(names)),
        showlegend=len(panel.known_series) > 1,
        barmode="group",
        legend={"orientation": "h", "y": -0.3},
    )
    figure.update_yaxes(autorange="reversed", automargin=True, type="category", categoryarray=list(names))
    return figure.update_xaxes(title=panel.unit, rangemode="tozero")


def _add_bars(figure: go.Figure, pattern: str, series: str, bars: Sequence[tuple[str, str, MeasuredValue]]) -> None:
    """Add one series of bars, each a platform's name, its colour and its value.

    Bars of a colour are one trace: plotly warns in the console of patterned bars that have a list of colours.
    """
    for n, colour in enumerate(dict.fromkeys(colour for _, colour, _ in bars)):
        of_colour = [(name, value) for name, bar_colour, value in bars if bar_colour == colour]
        figure.add_bar(
            x=[value.value for _, value in of_colour],
            y=[name for name, _ in of_colour],
            orientation="h",
            error_x=build_error_bars([value for _, value in of_colour]),
            marker={"color": colour, "pattern": {"shape": pattern}, "line": {"width": 1, "color": "#888"}},
            name=series,
            offsetgroup=series,
            legendgroup=series,
            showlegend=not n,
        )


def _build_parameters(work: str, results: Sequence[BestResult]) -> Iterator[Chart]:
    """Build the parallel coordinates of all trials and the importances of their parameters."""
    trials = rank_trials(results)
    parameters = select_varying_parameters(trials)
    if parameters.shape[1] < 2 or len(trials) < MIN_TRIALS:
        return
    with_platform = parameters
    if trials["platform"].nunique() > 1:
        with_platform = pd.concat([trials["platform"], parameters], axis="columns")
    label = f"{SPEED_UNITS[results[0].speed_metric]} per device"
    figure = build_parallel_coordinates(with_platform, trials["rank"], trials["speed_per_device"], label)
    shown = f"{len(trials)} trials" if len(trials) <= MAX_LINES else f"the {MAX_LINES} fastest of {len(trials)} trials"
    note = (
        f"Lines are {shown}, the redder the faster on their platform. Drag along an axis to select the lines that "
        "pass there."
    )
    width_px = AXIS_WIDTH_PX * len(figure.data[0].dimensions)
    yield Chart(f"Parallel coordinates: {work}", [figure], note, width_px)
    if importances := compute_importances(trials["rank"], parameters):
        note = (
            "The share of the variance of the trials' ranks on their platform that each parameter explains by itself "
            "(Kelley's epsilon squared). Parameters that matter only together do not show, and a sampler that has "
            "converged leaves little to explain."
        )
        yield Chart(f"Parameter importances: {work}", [build_importances(importances)], note)


def select_varying_parameters(trials: pd.DataFrame) -> pd.DataFrame:
    """Return a column for each parameter that is not the same for all trials, under its name."""
    names = list_varying_parameters(trials)
    return trials[[f"param.{name}" for name in names]].set_axis(names, axis="columns")


def rank_trials(results: Sequence[BestResult]) -> pd.DataFrame:
    """Return the trials of several platforms for one kind of work, with three columns more.

    `platform` is its name, `speed_per_device` the speed over the number of devices, and `rank` the rank among the
    platform's trials: 1 for the fastest, near 0 for the slowest.
    """
    parts = []
    for platform, result in zip(list_names(results), results, strict=True):
        speeds = result.trials[f"metric.{result.speed_metric}"]
        per_device = speeds / result.devices
        parts.append(result.trials.assign(platform=platform, speed_per_device=per_device, rank=speeds.rank(pct=True)))
    return pd.concat(parts, ignore_index=True)


def build_heatmaps(title: str, trials: pd.DataFrame) -> Iterator[Chart]:
    """Build the heatmaps over the first two numeric parameters that vary, with infeasible cells marked.

    A grid of mostly untried cells becomes a scatter chart.
    """
    complete = select_complete(trials)
    numeric = [name for name in list_varying_parameters(trials) if is_numeric(trials[f"param.{name}"])]
    speed_metric = find_speed_metric(complete)
    if speed_metric is None or len(numeric) < 2:
        return
    x, y = numeric[:2]
    grid = trials.assign(x=pd.to_numeric(trials[f"param.{x}"]), y=pd.to_numeric(trials[f"param.{y}"]))
    columns, rows = grid.x.nunique(), grid.y.nunique()
    if min(columns, rows) < 2:
        return
    if columns * rows > min(MAX_POINTS, 4 * len(grid)):
        figure = _build_scatter(select_complete(grid), speed_metric, x, y)
        yield Chart(f"{title}: {SPEED_UNITS[speed_metric]} over {x} and {y}", [figure])
        return
    candidates = HEATMAP_METRICS if speed_metric == "tokens_per_s" else {}
    labels = {speed_metric: SPEED_UNITS[speed_metric]}
    labels |= {m: label for m, label in candidates.items() if _has_values(complete, f"metric.{m}")}
    figures = [_build_marked_heatmap(grid, metric, label, x, y) for metric, label in labels.items()]
    yield Chart(f"{title}: best {', '.join(labels.values())} over {x} and {y}", figures)


def _has_values(trials: pd.DataFrame, column: str) -> bool:
    return column in trials and bool(trials[column].notna().any())


def _build_scatter(grid: pd.DataFrame, speed_metric: str, x: str, y: str) -> go.Figure:
    """Build a chart with a point for each trial, coloured by its speed, the fastest on top."""
    grid = grid.sort_values(f"metric.{speed_metric}").tail(MAX_POINTS)
    speeds, unit = grid[f"metric.{speed_metric}"], SPEED_UNITS[speed_metric]
    marker = {"color": speeds, "colorscale": "Viridis", "colorbar": {"title": unit}, "size": 11}
    text = [f"{run}: {format_number(speed)} {unit}" for run, speed in zip(grid["run"], speeds, strict=True)]
    figure = go.Figure(go.Scatter(x=grid.x, y=grid.y, mode="markers", marker=marker, text=text))
    return figure.update_xaxes(title=x).update_yaxes(title=y)


def _build_marked_heatmap(grid: pd.DataFrame, metric: str, label: str, x: str, y: str) -> go.Figure:
    """Build the heatmap of the highest value of a metric over grid.x and grid.y, with infeasible cells marked."""
    x_axis, y_axis = build_grid_axis(x, grid.x.tolist()), build_grid_axis(y, grid.y.tolist())
    values = grid[f"metric.{metric}"] * (100 if label.endswith("%") else 1)
    figure = build_heatmap(x_axis, y_axis, find_best_in_cells(x_axis, y_axis, values.tolist()), label)
    worked = select_complete(grid).set_index(["x", "y"]).index
    is_marked = (grid["tag.outcome"] == "infeasible") & ~grid.set_index(["x", "y"]).index.isin(worked)
    return figure.add_scatter(
        x=[x_axis.labels[cell] for cell, marked in zip(x_axis.cells, is_marked, strict=True) if marked],
        y=[y_axis.labels[cell] for cell, marked in zip(y_axis.cells, is_marked, strict=True) if marked],
        mode="markers",
        marker={"symbol": "x", "size": 12, "color": "#888"},
        name="infeasible",
        text=grid[is_marked].get("tag.reason"),
    )


def _build_history(title: str, trials: pd.DataFrame) -> Iterator[Chart]:
    """Build a chart of the speed of a sweep's trials in the order in which they ran."""
    complete = select_complete(trials)
    speed_metric = find_speed_metric(complete)
    if speed_metric is None or len(complete) < MIN_TRIALS_FOR_HISTORY:
        return
    column = f"metric.{speed_metric}"
    ranked = complete[complete[column].notna()].sort_values("start").tail(MAX_POINTS)
    numbers = pd.to_numeric(ranked["tag.sweeper.trial"])
    figure = _build_trials_figure(numbers, ranked, column)
    _add_steps(figure, numbers, ranked[column].cummax(), "best so far")
    figure.update_xaxes(title="trial").update_yaxes(title=SPEED_UNITS[speed_metric])
    yield Chart(f"{title}: trials", [figure])


def _build_memory(title: str, trials: pd.DataFrame) -> Iterator[Chart]:
    """Build a chart of speed against memory, with the Pareto front."""
    complete = select_complete(trials)
    speed_metric = find_speed_metric(complete)
    memory = next((f"metric.{name}" for name in MEMORY_METRICS if f"metric.{name}" in complete), None)
    if speed_metric is None or memory is None:
        return
    column = f"metric.{speed_metric}"
    ranked = complete[complete[memory].notna() & complete[column].notna()].sort_values(memory)
    if len(ranked) < MIN_TRIALS_FOR_MEMORY:
        return
    front = ranked[ranked[column] >= ranked[column].cummax()]
    figure = _build_trials_figure(ranked[memory], ranked, column)
    _add_steps(figure, front[memory], front[column], "Pareto front")
    figure.update_xaxes(title="memory of one device, GiB").update_yaxes(title=SPEED_UNITS[speed_metric])
    yield Chart(f"{title}: speed against memory", [figure])


def _build_trials_figure(x: pd.Series, trials: pd.DataFrame, column: str) -> go.Figure:
    """Build a chart with a point for each trial."""
    figure = go.Figure()
    marker = {"color": COLOURS[0]}
    figure.add_scatter(x=x, y=trials[column], mode="markers", marker=marker, text=trials["run"], name="trials")
    return figure.update_yaxes(rangemode="tozero")


def _add_steps(figure: go.Figure, x: pd.Series, y: pd.Series, name: str) -> None:
    """Add a line of steps."""
    figure.add_scatter(x=x, y=y, mode="lines", line={"color": COLOURS[5], "shape": "hv"}, name=name)


def _build_timeline(trials: pd.DataFrame) -> Iterator[Chart]:
    """Build a chart of the trials of each device over time."""
    if "tag.node" not in trials:
        return
    ended = trials[trials["end"].notna() & trials["tag.node"].notna()].tail(MAX_POINTS)
    if not len(ended):
        return
    gpus = ended["tag.gpus"].fillna("") if "tag.gpus" in ended else pd.Series("", index=ended.index)
    devices = ended["tag.node"] + gpus.map(lambda gpu: f" GPU {gpu}" if gpu else "")
    figure = go.Figure()
    for n, (outcome, group) in enumerate(ended.groupby("tag.outcome")):
        colour = COLOURS[n % len(COLOURS)]
        figure.add_bar(
            base=group["start"],
            x=(group["end"] - group["start"]).dt.total_seconds() * 1000,
            y=devices[group.index],
            orientation="h",
            name=str(outcome),
            # In a store of months a trial of minutes is narrower than a pixel, but its outline is not.
            marker={"color": colour, "line": {"width": 1.5, "color": colour}},
            text=group["run"],
            textposition="none",
        )
    last_study = ended.sort_values("start")["tag.sweeper.study"].iloc[-1]
    last_sweep = ended[ended["tag.sweeper.study"] == last_study]
    figure.update_xaxes(type="date", title="UTC", range=[last_sweep["start"].min(), last_sweep["end"].max()])
    figure.update_layout(barmode="overlay", showlegend=True)
    note = "Shows the last sweep; double-click to show all." if len(last_sweep) < len(ended) else ""
    yield Chart("Timeline of the devices", [figure], note)
