"""Build the report's interactive charts of the results in the store."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from sweeper.commands.report import platform_panels
from sweeper.commands.report.notes import NOTES
from sweeper.commands.report.platform_panels import MAX_POINTS, VENDORS, list_names
from sweeper.common.format import format_number
from sweeper.metrics.derivation import LINEAR_BANDS, MEMORY_METRICS
from sweeper.pages import parameter_charts
from sweeper.pages.chart_style import COLORS, GRAY, add_band, bar_chart_height_px, build_error_bars, cut_name
from sweeper.pages.html_page import Chart
from sweeper.pages.parameter_charts import build_grid_axis, build_heatmap, find_best_in_cells, is_numeric
from sweeper.results import ranking
from sweeper.results.imported import Imported, list_results, select_fastest
from sweeper.results.mlflow_results import Stored
from workloads.api.metrics import get_metric

MIN_TRIALS_FOR_HISTORY = 5
MIN_TRIALS_FOR_MEMORY = 3
# The metrics that training heatmaps show in addition to tokens/s. All give the same ranking within one kind of work.
HEATMAP_METRICS = {"tflops": "TFLOP/s", "mfu": "MFU %", "hfu": "HFU %"}
BATCH = "global_batch"  # the only property of the work that may grow with the number of devices
AXIS_MARGIN = 1.5  # the factor by which logarithmic axes extend beyond the outermost points
MIN_IMPORTED = 6  # the number of results of one kind of work needed for a heatmap
MAX_FIGURES = 24  # the largest number of charts side by side
MAX_NAME_LENGTH = 30  # the length of the longest result name next to a bar, in characters
BUDGETS = ("param.host_gib", "param.device_gib")  # the axes of ml_dataflow's result tables


def build_charts(stored: Stored) -> Iterator[Chart]:
    """Yield every chart for which the store has enough trials, and the charts of imported results."""
    for work, results in ranking.group_by_work(stored.best_results).items():
        results = ranking.sort_by_platform(results)
        if len(results) > 1:
            yield platform_panels.build_chart(work, results)
        yield from _build_parameters(work, results)
    for title, results in group_by_scaling(stored.best_results):
        yield from _build_scaling(title, results, stored.sweeps)
    for sweep, sweep_trials in stored.trials.groupby("tag.sweep") if len(stored.trials) else ():
        for work, work_trials in ranking.split_by_work(sweep_trials):
            title = f"{sweep}, {work}" if work else str(sweep)
            yield from build_heatmaps(title, work_trials)
            yield from _build_trial_charts(title, work_trials)
    yield from _build_timeline(stored.trials)
    yield from build_imported_charts(stored.imported)


def _build_parameters(work: str, results: Sequence[ranking.BestResult]) -> Iterator[Chart]:
    trials = rank_trials(results)
    parameters = select_varying_parameters(trials)
    if parameters.shape[1] < 2 or len(trials) < parameter_charts.MIN_TRIALS:
        return
    with_platform = parameters
    if trials["platform"].nunique() > 1:
        with_platform = pd.concat([trials["platform"], parameters], axis="columns")
    label = results[0].unit + (" per device" if results[0].is_rate else "")
    ranks, values = trials["rank"], trials["value"]
    title = f"Parallel coordinates: {work}"
    yield parameter_charts.build_parallel_coordinates(title, with_platform, ranks, values, label)
    if importances := parameter_charts.compute_importances(ranks, parameters):
        yield parameter_charts.build_importances(f"Parameter importances: {work}", importances)


def select_varying_parameters(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of the parameters that vary between trials, labeled with the parameter names."""
    names = ranking.list_varying_parameters(trials)
    return trials[[f"param.{name}" for name in names]].set_axis(names, axis="columns")


def rank_trials(results: Sequence[ranking.BestResult]) -> pd.DataFrame:
    """Return one kind of work's trials on several platforms, with columns `platform`, `value` (rates per device)
    and `rank`. The rank of a trial among all trials of the platform is 1 for the best and near 0 for the worst."""
    parts = []
    for platform, result in zip(list_names(results), results, strict=True):
        values = result.trials[f"metric.{result.objective.metric}"]
        ranks = values.rank(pct=True, ascending=result.objective.direction == "maximize")
        shares = values / result.devices if result.is_rate else values
        parts.append(result.trials.assign(platform=platform, value=shares, rank=ranks))
    return pd.concat(parts, ignore_index=True)


def group_by_scaling(results: Sequence[ranking.BestResult]) -> Iterator[tuple[str, list[ranking.BestResult]]]:
    """Yield titled groups of results for one kind of work: first at equal batch, then at equal batch per device."""
    for work, group in ranking.group_by_work(results).items():
        yield f"Scaling of {work}", ranking.sort_by_platform(group)
    groups: dict[tuple[object, ...], list[ranking.BestResult]] = {}
    for result in results:
        if BATCH in result.work:
            other_work = sorted((name, value) for name, value in result.work.items() if name != BATCH)
            groups.setdefault((float(result.work[BATCH]) / result.devices, *other_work), []).append(result)
    for (batch, *_), group in groups.items():
        if len({result.devices for result in group}) > 1:
            work = " ".join(group[0].work[name] for name in ranking.MAIN_WORK_NAMES if name in group[0].work)
            yield f"Scaling of {work} with a batch of {batch:g} per device", ranking.sort_by_platform(group)


def _build_scaling(title: str, results: Sequence[ranking.BestResult], sweeps: pd.DataFrame) -> Iterator[Chart]:
    """Build a chart of speed against the number of GPUs, with ideal scaling and the cost model's projection. Build no
    chart if the work has no tokens/s, or if no device has results for several counts or a projection."""
    if results[0].objective.metric != "tokens_per_s":
        return
    figure = go.Figure()
    assumptions = []
    for n, device in enumerate(dict.fromkeys(result.device for result in results)):
        by_count = sorted((result for result in results if result.device == device), key=lambda result: result.devices)
        projected, assumed = _read_projection(by_count[0], sweeps)
        assumptions += [f"{device}: {assumed}"] if assumed else []
        if len(by_count) > 1 or projected:
            _add_device(figure, by_count, projected, COLORS[n % len(COLORS)])
    if not figure.data:
        return
    # Plotly takes the ends of logarithmic axes as exponents of ten.
    counts, speeds = ([value for line in figure.data for value in line[axis]] for axis in "xy")
    count_range, (low, high) = (
        (math.log10(min(values) / AXIS_MARGIN), math.log10(max(values) * AXIS_MARGIN)) for values in (counts, speeds)
    )
    ticks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high)) for step in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    ranks = "processes" if results[0].is_cpu else "GPUs"
    figure.update_xaxes(title=ranks, type="log", range=count_range, tickvals=sorted(set(counts)))
    figure.update_yaxes(title="tokens/s", type="log", range=(low, high), tickvals=ticks)
    projection = NOTES["projection"] + "; ".join(assumptions) if assumptions else ""
    yield Chart(title, [figure], NOTES["scaling"] + projection)


def _read_projection(result: ranking.BestResult, sweeps: pd.DataFrame) -> tuple[dict[int, float], str]:
    column = f"tag.projected_{result.objective.metric}"
    is_sweep = sweeps["tag.sweeper.study"] == result.trial["tag.sweeper.study"]
    stored = sweeps[is_sweep & sweeps[column].notna()] if column in sweeps else sweeps[:0]
    if not len(stored):
        return {}, ""
    speeds = {int(count): float(speed) for count, speed in json.loads(stored[column].iloc[0]).items()}
    return speeds, str(stored["tag.projection_assumes"].iloc[0])


def _add_device(
    figure: go.Figure, by_count: Sequence[ranking.BestResult], projected: Mapping[int, float], color: str
) -> None:
    smallest = by_count[0]
    per_device = smallest.estimate.value / smallest.devices
    counts = sorted({result.devices for result in by_count} | set(projected))
    ideal = [per_device * count for count in counts]
    add_band(figure, counts, ideal, LINEAR_BANDS, color)
    line = {"color": color, "dash": "dash"}
    figure.add_scatter(x=counts, y=ideal, mode="lines", line=line, name="ideal", showlegend=False, hoverinfo="skip")
    if projected:
        style = {"mode": "lines+markers", "line": {"color": color, "dash": "dot"}, "marker": {"symbol": "circle-open"}}
        name = f"{smallest.device}, projected"
        figure.add_scatter(x=list(projected), y=list(projected.values()), name=name, **style)
    speeds = [result.estimate for result in by_count]
    shares = [f"{result.estimate.value / (per_device * result.devices):.0%}" for result in by_count[1:]]
    points = {"x": [result.devices for result in by_count], "y": [speed.value for speed in speeds]}
    texts = {"text": ["", *shares], "textposition": "bottom right", "mode": "lines+markers+text"}
    figure.add_scatter(**points, error_y=build_error_bars(speeds), line_color=color, name=smallest.device, **texts)


def build_heatmaps(title: str, trials: pd.DataFrame) -> Iterator[Chart]:
    """Build heatmaps over the first two varying numeric parameters, or a scatter chart if most points are untried."""
    complete = ranking.select_complete(trials)
    numeric = [name for name in ranking.list_varying_parameters(trials) if is_numeric(trials[f"param.{name}"])]
    objective = ranking.find_objective(complete)
    if objective is None or len(numeric) < 2:
        return
    goal = objective.metric
    x, y = numeric[:2]
    grid = trials.assign(x=pd.to_numeric(trials[f"param.{x}"]), y=pd.to_numeric(trials[f"param.{y}"]))
    columns, rows = grid.x.nunique(), grid.y.nunique()
    if min(columns, rows) < 2:
        return
    unit = ranking.find_unit(goal)
    if columns * rows > min(MAX_POINTS, 4 * len(grid)):
        # Draw the best trials last, so that they are on top.
        rising = objective.direction == "maximize"
        points = ranking.select_complete(grid).sort_values(f"metric.{goal}", ascending=rising).tail(MAX_POINTS)
        values = points[f"metric.{goal}"]
        marker = {"color": values, "colorscale": "Viridis", "colorbar": {"title": unit}, "size": 11}
        text = [f"{run}: {format_number(value)} {unit}" for run, value in zip(points["run"], values, strict=True)]
        figure = go.Figure(go.Scatter(x=points.x, y=points.y, mode="markers", marker=marker, text=text))
        figure.update_xaxes(title=x).update_yaxes(title=y)
        yield Chart(f"{title}: {unit} over {x} and {y}", [figure])
        return
    labels = {goal: unit}
    for metric, label in HEATMAP_METRICS.items() if goal == "tokens_per_s" else ():
        if f"metric.{metric}" in complete and complete[f"metric.{metric}"].notna().any():
            labels[metric] = label
    minimize = objective.direction == "minimize"
    figures = [_build_marked_heatmap(grid, metric, label, x, y, minimize=minimize) for metric, label in labels.items()]
    yield Chart(f"{title}: best {', '.join(labels.values())} over {x} and {y}", figures)


def _build_marked_heatmap(grid: pd.DataFrame, metric: str, label: str, x: str, y: str, *, minimize: bool) -> go.Figure:
    x_axis, y_axis = build_grid_axis(x, grid.x.tolist()), build_grid_axis(y, grid.y.tolist())
    values = grid[f"metric.{metric}"] * (100 if label.endswith("%") else 1)
    best = find_best_in_cells(x_axis, y_axis, values.tolist(), minimize=minimize)
    figure = build_heatmap(x_axis, y_axis, best, label)
    worked = ranking.select_complete(grid).set_index(["x", "y"]).index
    is_marked = (grid["tag.outcome"] == "infeasible") & ~grid.set_index(["x", "y"]).index.isin(worked)
    marks = [[axis.labels[cell] for cell in compress(axis.cells, is_marked)] for axis in (x_axis, y_axis)]
    style = {"mode": "markers", "marker": {"symbol": "x", "size": 12, "color": GRAY}, "name": "infeasible"}
    return figure.add_scatter(x=marks[0], y=marks[1], text=grid[is_marked].get("tag.reason"), **style)


def _build_trial_charts(title: str, trials: pd.DataFrame) -> Iterator[Chart]:
    complete = ranking.select_complete(trials)
    objective = ranking.find_objective(complete)
    if objective is None:
        return
    unit = ranking.find_unit(objective.metric)
    ranked = complete.assign(y=complete[f"metric.{objective.metric}"])
    best_so_far = pd.Series.cummax if objective.direction == "maximize" else pd.Series.cummin
    ranked = ranked[ranked.y.notna()]
    if len(complete) >= MIN_TRIALS_FOR_HISTORY:
        in_order = ranked.sort_values("start").tail(MAX_POINTS)
        in_order = in_order.assign(x=pd.to_numeric(in_order["tag.sweeper.trial"]))
        best = in_order.assign(y=best_so_far(in_order.y))
        yield Chart(f"{title}: trials", [parameter_charts.build_points(in_order, best, "best so far", "trial", unit)])
    memory = next((f"metric.{name}" for name in MEMORY_METRICS if f"metric.{name}" in complete), None)
    if memory is None:
        return
    by_memory = ranked.assign(x=ranked[memory]).dropna(subset="x").sort_values("x")
    if len(by_memory) >= MIN_TRIALS_FOR_MEMORY:
        front = by_memory[by_memory.y == best_so_far(by_memory.y)]
        figure = parameter_charts.build_points(by_memory, front, "Pareto front", "memory of one device, GiB", unit)
        name = "speed" if get_metric(objective.metric).is_rate else objective.metric
        yield Chart(f"{title}: {name} against memory", [figure])


def _build_timeline(trials: pd.DataFrame) -> Iterator[Chart]:
    if "tag.node" not in trials:
        return
    ended = trials[trials["end"].notna() & trials["tag.node"].notna()].tail(MAX_POINTS)
    if not len(ended):
        return
    gpus = ended["tag.gpus"].fillna("") if "tag.gpus" in ended else pd.Series("", index=ended.index)
    devices = ended["tag.node"] + gpus.map(lambda gpu: f" GPU {gpu}" if gpu else "")
    figure = go.Figure()
    for n, (outcome, group) in enumerate(ended.groupby("tag.outcome")):
        color = COLORS[n % len(COLORS)]
        # On a timeline of months, a trial of minutes is narrower than a pixel. The outline keeps the trial visible.
        marker = {"color": color, "line": {"width": 1.5, "color": color}}
        lengths_ms = (group["end"] - group["start"]).dt.total_seconds() * 1000
        bars = {"base": group["start"], "x": lengths_ms, "y": devices[group.index], "orientation": "h"}
        figure.add_bar(name=str(outcome), marker=marker, text=group["run"], textposition="none", **bars)
    last_study = ended.sort_values("start")["tag.sweeper.study"].iloc[-1]
    last_sweep = ended[ended["tag.sweeper.study"] == last_study]
    figure.update_xaxes(type="date", title="UTC", range=[last_sweep["start"].min(), last_sweep["end"].max()])
    figure.update_layout(barmode="overlay", showlegend=True)
    note = "Shows the last sweep; double-click to show all." if len(last_sweep) < len(ended) else ""
    yield Chart("Timeline of the devices", [figure], note)


def build_imported_charts(runs: pd.DataFrame) -> Iterator[Chart]:
    """Yield charts of the imported results that report tokens/s and contain no contradictions."""
    if not len(runs):
        return
    results = [result for result in list_results(runs) if not result.contradictions]
    works: dict[str, list[Imported]] = {}
    for result in select_fastest(results):
        if not math.isnan(result.rate_per_device):
            model, length, _, dtype, *_ = result.work
            parts = [model or result.name, dtype, f"{length} tokens a sequence" if length else ""]
            works.setdefault(" ".join(filter(None, parts)), []).append(result)
    figures = [_build_imported_bars(work, of_work) for work, of_work in works.items()]
    if figures:
        left_out = f" {len(figures) - MAX_FIGURES} more are not drawn." if len(figures) > MAX_FIGURES else ""
        note = NOTES["imported_charts"] + left_out
        yield Chart("Imported results: tokens/s of one device", figures[:MAX_FIGURES], note)
    is_drawn = {result.run["run_id"] for result in results}
    # Also draw infeasible points, such as a budget at which nothing fits.
    yield from _build_imported_heatmaps(runs[runs["run_id"].isin(is_drawn) | (runs["tag.outcome"] == "infeasible")])


def _build_imported_bars(work: str, results: Sequence[Imported]) -> go.Figure:
    names = []
    for result in results:
        *_, device, devices = result.work
        names.append(f"{devices} x {VENDORS.sub('', device) or 'unknown'}, {cut_name(result.name, MAX_NAME_LENGTH)}")
    claims = pd.Series([result.claim_per_device("tokens_per_s") for result in results], names).dropna()
    rates = [result.rate_per_device for result in results]
    figure = go.Figure(go.Bar(x=rates, y=names, orientation="h", marker_color=COLORS[0], name="derived"))
    if len(claims):
        marker = {"symbol": "x", "size": 10, "color": COLORS[5]}
        figure.add_scatter(x=claims, y=claims.index, mode="markers", marker=marker, name="claimed")
    figure.update_layout(title=work, height=bar_chart_height_px(len(results)), showlegend=False)
    figure.update_yaxes(autorange="reversed", automargin=True, type="category")
    return figure.update_xaxes(title="tokens/s per device", rangemode="tozero")


def _build_imported_heatmaps(runs: pd.DataFrame) -> Iterator[Chart]:
    if "metric.tokens_per_s" not in runs:
        return
    for _, of_file in runs.groupby("parent", sort=False):
        figures = []
        lengths = of_file.get("param.sequence_length", pd.Series("", index=of_file.index)).fillna("")
        for length in sorted(set(lengths), key=lambda text: float(text or 0)):
            of_length = of_file[lengths == length].dropna(axis="columns", how="all")
            if all(name in of_length and of_length[name].nunique() > 1 for name in BUDGETS):
                # The tool chose all other parameters separately for each budget.
                chosen = [name for name in of_length if str(name).startswith("param.") and name not in BUDGETS]
                of_length = of_length.drop(columns=chosen)
            if len(of_length) < MIN_IMPORTED or "metric.tokens_per_s" not in of_length:
                continue
            for chart in build_heatmaps("", of_length):
                figures.append(chart.figures[0].update_layout(title=f"{length} tokens a sequence" if length else ""))
        if figures:
            name = Path(str(of_file["run"].iloc[0]).partition(" line ")[0]).name
            yield Chart(f"{name}, imported: tokens/s", figures[:MAX_FIGURES], "A cross is where nothing worked.")
