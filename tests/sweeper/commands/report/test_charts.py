"""The charts of the report: what they show of which trials."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.commands.report import charts
from sweeper.commands.report.platform_panels import build_chart, build_panels
from sweeper.metrics.criteria import Objective
from sweeper.pages.html_page import Chart
from sweeper.pages.parameter_charts import compute_importances
from sweeper.results import mlflow_results
from sweeper.results.ranking import find_best_results, split_by_work
from tests.support.factories import complete_trials


def build_charts(trials: pd.DataFrame, **sweep: list[str]) -> list[Chart]:
    """Build the charts of the trials of one sweep."""
    columns = {
        "tag.sweep": "s",
        "tag.sweeper.study": "s",
        "end": pd.NaT,
        "run": "r",
        "start": 0,
        "tag.sweeper.trial": "0",
    }
    sweeps = pd.DataFrame({"tag.sweeper.study": ["s"], **sweep})
    return list(charts.build_charts(mlflow_results.Stored(sweeps, trials.assign(**columns))))


def test_nine_panels_show_each_platform_by_the_same_metrics() -> None:
    trials = pd.concat([complete_trials({"H200": [8000.0, 10000.0]}), complete_trials({"H200": [19000.0]}, devices=2)])
    results = sorted(find_best_results(trials), key=lambda result: result.devices)
    by_title = {panel.title: panel for panel in build_panels(results)}
    assert len(by_title) == 9 and len({panel.unit for panel in by_title.values()}) > 5
    assert [measured.value for measured in by_title["Tokens"].series[""]] == [10000, 19000]
    assert [str(measured) for measured in by_title["Tokens per GPU"].series[""]] == [
        "10,000 (9,000 to 11,000)",
        "9,500 (8,550 to 10,450)",
    ]
    peaks = by_title["Achieved rate and ceilings"].series["peak"]
    assert [measured.value for measured in peaks] == pytest.approx([1000, 1000])
    assert by_title["All configurations"].spread == [[8000, 10000], [9500]]
    gains = [measured.value for measured in by_title["Best over median configuration"].series[""]]
    assert gains[0] == pytest.approx(10 / 9) and math.isnan(gains[1])  # a single configuration has no median to beat
    (without_gain,) = [result for result in results if result.devices == 2]
    texts = {figure.layout.title.text: figure.layout.annotations for figure in build_chart("", [without_gain]).figures}
    (note,) = texts.pop("Best over median configuration")
    assert note.text == "not in the store" and not texts["Tokens"]


def test_the_charts_of_a_sweep_never_mix_two_kinds_of_work() -> None:
    speeds = {"H200": [float(n) for n in range(1, 13)]}
    trials = complete_trials(speeds, host=[1, 1, 2, 2, 1, 2] * 2, device=[1, 2, 1, 2, 2, 1] * 2)
    trials["tag.work"] = ['{"type": "bf16"}'] * 6 + ['{"type": "fp8"}'] * 6
    infeasible = trials.head(1).assign(**{"tag.outcome": "infeasible", "tag.work": None, "param.device": "3"})
    trials = pd.concat([trials, infeasible], ignore_index=True)
    trials.loc[trials["tag.outcome"] == "infeasible", "metric.tokens_per_s"] = math.nan
    # The infeasible trial, whose type is unknown, is part of both.
    assert {work: len(group) for work, group in split_by_work(trials)} == {"bf16": 7, "fp8": 7}
    figures = {re.sub("/s, .* over", "/s over", chart.title): chart.figures[0] for chart in build_charts(trials)}
    cells = figures["s, bf16: best tokens/s over host and device"].data[0]
    assert np.nanmax(cells.z) == 6 and "s, fp8: best tokens/s over host and device" in figures
    assert list(figures["s, fp8: trials"].data[0].y) == [7, 8, 9, 10, 11, 12]


def test_the_charts_of_a_loss_show_the_lowest_so_far_and_in_each_cell() -> None:
    trials = complete_trials({"H200": [1.0 + n for n in range(8)]}, lr=[1, 1, 2, 2] * 2, wd=[1, 2] * 4)
    losses = [3.0, 2.5, 2.75, 2.0, 2.25, 4.0, 3.5, 1.0]
    memory = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    columns = {"metric.loss": losses, "metric.peak_device_gib": memory}
    trials = trials.assign(objective=Objective("loss", "minimize"), **columns)
    figures = {chart.title: chart.figures[0] for chart in build_charts(trials)}
    assert list(figures["s: trials"].data[1].y) == [3.0, 2.5, 2.5, 2.0, 2.0, 2.0, 2.0, 1.0]
    assert figures["s: best loss over lr and wd"].data[0].z.tolist() == [[2.25, 2.75], [2.5, 1.0]]
    assert list(figures["s: loss against memory"].data[1].y) == [1.0]  # the smallest in memory has the lowest loss
    ranked = charts.rank_trials(find_best_results(trials))
    assert ranked.loc[ranked["rank"] == 1.0, "value"].tolist() == [1.0]


def test_heatmaps_of_training_show_speed_and_utilization_and_mark_infeasible_cells() -> None:
    budgets = [(host, device) for host in (40, 80) for device in (24, 48, 72)]
    rows = [
        {"tag.outcome": "complete", "param.host_gib": str(host), "param.device_gib": str(device)}
        | {"metric.tokens_per_s": 100.0 * host + device, "metric.mfu": 0.5, "metric.hfu": 0.6, "metric.tflops": 400.0}
        for host, device in budgets
    ]
    rows[0] = {
        **rows[0],
        "tag.outcome": "infeasible",
        "metric.tokens_per_s": math.nan,
        "tag.reason": "3 GiB too little",
    }
    (chart,) = charts.build_heatmaps("sweep", pd.DataFrame(rows))
    assert chart.title == "sweep: best tokens/s, TFLOP/s, MFU %, HFU % over host_gib and device_gib"
    labels = [figure.data[0].colorbar.title.text for figure in chart.figures]
    assert labels == ["tokens/s", "TFLOP/s", "MFU %", "HFU %"]
    assert np.nanmax(chart.figures[2].data[0].z) == 50
    assert list(chart.figures[0].data[1].text) == ["3 GiB too little"]
    # A complete trial in the same cell replaces the mark; a metric that is unknown everywhere has no heatmap.
    rows.append({**rows[1], "param.host_gib": "40", "param.device_gib": "24"})
    without_utilization = pd.DataFrame(rows).assign(**{"metric.mfu": math.nan, "metric.hfu": math.nan})
    (chart,) = charts.build_heatmaps("sweep", without_utilization)
    assert len(chart.figures) == 2 and not chart.figures[0].data[1].x


def test_a_mostly_empty_grid_is_drawn_as_points_with_the_fastest_on_top() -> None:
    random = np.random.default_rng(0)
    speeds = {"H200": list(range(1, 41))}
    trials = complete_trials(speeds, m=random.integers(1, 9999, 40), n=random.integers(1, 9999, 40))
    all_charts = build_charts(trials.drop(columns="metric.tokens_per_s"))
    chart = next(chart for chart in all_charts if "over m and n" in chart.title)
    assert chart.title == "s: TFLOP/s over m and n"
    (points,) = chart.figures[0].data
    fastest = trials.iloc[-1]
    assert len(points.x) == 40 and max(points.marker.color) == points.marker.color[-1] == 2
    assert (points.x[-1], points.y[-1]) == (float(fastest["param.m"]), float(fastest["param.n"]))


def rank_importances(trials: pd.DataFrame) -> dict[str, float]:
    """Return the importances of all parameters as the report computes them."""
    ranked = charts.rank_trials(find_best_results(trials))
    return compute_importances(ranked["rank"], charts.select_varying_parameters(ranked))


def find_scaling(all_charts: list[Chart]) -> list[Chart]:
    return [chart for chart in all_charts if chart.title.startswith("Scaling")]


def test_scaling_is_relative_to_the_smallest_number_of_the_same_device() -> None:
    trials = [
        complete_trials({"H200": [1000.0 * n * 0.9 ** (n > 1)], "MI300X": [900.0 * n]}, devices=n) for n in (1, 4)
    ]
    (chart,) = find_scaling(build_charts(pd.concat(trials)))
    lines = {line.name: line for line in chart.figures[0].data[:4]}
    assert list(lines["H200"].x) == list(lines["ideal"].x) == [1, 4] and list(lines["H200"].text) == ["", "90%"]
    assert list(lines["H200"].y) == [1000, 3600] and list(lines["ideal"].y) == [1000, 4000]
    assert (list(lines["85%"].y), list(lines["95%"].y)) == ([850, 3400], [950, 3800])
    assert lines["H200"].error_y.array[1] == pytest.approx(360)
    assert not find_scaling(build_charts(trials[0]))


def test_the_projection_is_drawn_next_to_the_measured_points() -> None:
    projection = {
        "tag.projected_tokens_per_s": ['{"1": 1100.0, "2": 2150.0, "8": 8000.0}'],
        "tag.projection_assumes": ["so"],
    }
    (chart,) = find_scaling(build_charts(complete_trials({"H200": [1000.0]}), **projection))
    lines = {line.name: line for line in chart.figures[0].data}
    assert (list(lines["H200"].y), list(lines["H200, projected"].y)) == ([1000], [1100, 2150, 8000])
    assert list(lines["ideal"].y) == [1000, 2000, 8000] and chart.note.endswith("Assumed: H200: so")
    trials = pd.concat([complete_trials({"H200": [1000.0]}), complete_trials({"H200": [1900.0]}, devices=2)])
    (chart,) = find_scaling(build_charts(trials, **projection))
    lines = {line.name: line for line in chart.figures[0].data}
    assert list(lines["H200"].text) == ["", "95%"] and list(lines["ideal"].x) == [1, 2, 8]


def test_a_parameters_importance_is_its_share_of_the_variance_of_ranks() -> None:
    random = np.random.default_rng(0)
    layout, noise = random.choice(["a", "b", "c"], 200), random.normal(size=200)
    speeds = 1000 + 100 * (layout == "b") + 200 * (layout == "c") + noise
    trials = complete_trials(
        {"H200": list(speeds)}, layout=layout, batch=random.integers(1, 500, 200), name=[f"n{n}" for n in range(200)]
    )
    # A platform that is ten times as fast, on which the same parameter matters: each platform has its own ranks.
    faster = trials.assign(**{"tag.device": "B200", "metric.tokens_per_s": 10 * speeds})
    both = pd.concat([trials, faster], ignore_index=True)
    importances = rank_importances(both)
    assert list(importances) == ["layout", "batch"]
    assert importances["layout"] > 0.8 and importances["batch"] < 0.1
    titles = {chart.title for chart in build_charts(both)}
    assert {"Parallel coordinates: parallel bf16", "Parameter importances: parallel bf16"} <= titles
    assert not rank_importances(both.head(10))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), min_size=20, max_size=40))
def test_an_importance_is_between_zero_and_one(points: list[tuple[str, int]]) -> None:
    letters, speeds = zip(*points, strict=True)
    trials = complete_trials({"H200": [1.0 + speed for speed in speeds]}, letter=letters, digit=speeds)
    importances = rank_importances(trials)
    assert all(0 <= share <= 1 for share in importances.values())
    if len(set(speeds)) > 1:
        assert importances["digit"] == pytest.approx(1)
