"""Tests of the report on a real MLflow store: its tables, comparisons, charts and refusals."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient

from sweeper.common.trials import TrialStatus
from sweeper.ingest.__main__ import import_file
from sweeper.report import charts, compare, export, page, panels, store, summary
from sweeper.report.__main__ import main
from sweeper.report.best import (
    MeasuredValue,
    describe_differences,
    find_best_results,
    group_by_work,
    split_by_work,
)
from sweeper.report.scaling import group_by_scaling
from sweeper.report.verdict import Gate, Verdict
from sweeper.tracking.process import Store
from sweeper.ui.importance import compute_importances
from tests.conftest import CommandResult
from tests.support.factories import complete_trials, trial_record

PARENT = {"workload": "offload", "hardware": "h200", "device": "NVIDIA H200", "version.torch": "2.11"}


def write_sweep(
    folder: Path,
    sweep: str,
    speeds: Mapping[str, float | None],
    *,
    model: str = "llama3_8b",
    device: str = "NVIDIA H200",
    spread: float = 0.01,
) -> None:
    """Write a finished sweep over `budget` with these tokens/s by its value, None for an infeasible trial."""
    params = {"model": model, "sequence_length": "8192", "sweep.gpus": 1, "budget": "choice(…)"}
    tags = {**PARENT, "device": device}
    written = Store(
        f"sqlite:///{folder}/mlflow.db",
        "offload",
        f"study of {sweep}",
        sweep,
        {"params": params, "started_at": "now", "tags": tags, "artifacts": {}},
    )
    for number, (budget, speed) in enumerate(speeds.items()):
        result: dict[str, object] = {"status": TrialStatus.INFEASIBLE, "reason": "3 GiB too little at best"}
        if speed is not None:
            metrics = {"steps": 3.0, "peak_device_gib": 20.0 + number}
            metrics |= {"tokens_per_s": speed, "mfu": speed / 2e4, "tflops": speed / 20}
            metrics |= {"tokens_per_s_ci_low": speed * (1 - spread), "tokens_per_s_ci_high": speed * (1 + spread)}
            machine_info = {"power_limit_w": 700.0, "tainted": number == 1}
            result = {"metrics": metrics, "measurements": [{"machine_info": machine_info, "matrix_dtype": "bf16"}]}
        record = trial_record(
            number,
            {"budget": budget},
            where={"node": "n1", "gpus": "0"},
            started_at_s=1.0e9 + number,
            ended_at_s=1.0e9 + number + 1,
            elapsed_s=float(number),
            **result,
        )
        written.write_trial(record)
    written.close("FINISHED", {}, {}, {}, [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results")
    write_sweep(path, "first", {"24": 9500.0, "40": 10200.0, "8": None})
    write_sweep(path, "second", {"24": 9450.0, "40": 11400.0})
    write_sweep(path, "small", {"24": 56000.0}, model="llama3_1b")
    write_sweep(path, "<script>alert(1)</script>", {"24": 5000.0}, device="A & B")
    return path


def run_report(folder: Path, *arguments: str) -> CommandResult:
    """Run the command in this process: MLflow takes seconds to import."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        for context in (contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
            stack.enter_context(context)
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(sys, "argv", ["sweeper.report", *arguments])
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return CommandResult(code, out.getvalue(), err.getvalue())


def read_store(folder: Path) -> store.Stored:
    return store.read(f"sqlite:///{folder}/mlflow.db")


def build_charts(trials: pd.DataFrame, **sweep: list[str]) -> list[charts.Chart]:
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
    return list(charts.build_charts(store.Stored(sweeps, trials.assign(**columns))))


def test_the_best_result_of_each_device_and_kind_of_work_is_one_row(folder: Path) -> None:
    results = find_best_results(read_store(folder).trials)
    assert {(r.work["model"], r.device): (r.speed.value, len(r.trials)) for r in results} == {
        ("llama3_8b", "NVIDIA H200"): (11400.0, 4),
        ("llama3_8b", "A & B"): (5000.0, 1),
        ("llama3_1b", "NVIDIA H200"): (56000.0, 1),
    }
    (table,) = [table for table in summary.build_tables(read_store(folder), 2.0) if table.title == "Best results"]
    best = next(row for row in table.rows if "11,400 tokens/s" in row)
    row = dict(zip(table.heading, best, strict=True))
    assert (
        row["TFLOP/s"] == "570"
        and row["as executed"] == "budget=40"
        and row["MFU %"] == "57.0"
        and row["95%"] == "11,286 to 11,514"
    )
    assert row["10^9 tokens a day"] == "0.985" and row["cost of 10^6 tokens"] == "0.04873"


def test_two_sweeps_of_the_same_work_are_compared_by_their_intervals(folder: Path) -> None:
    lines, verdict = compare.compare_sweeps(read_store(folder), "first", "second", Gate())
    assert lines == [
        "offload llama3_8b 8192 bf16 tokens_per_s: second on NVIDIA H200 is 1.12 times as fast as first on NVIDIA "
        "H200: 11,400 (11,286 to 11,514) against 10,200 (10,098 to 10,302) (95% +10.2% to +13.4%), from the steps of "
        "one trial each"
    ]
    assert verdict is Verdict.NOT_SLOWER
    assert compare.compare_sweeps(read_store(folder), "second", "first", Gate())[1] is Verdict.SLOWER
    (line,), verdict = compare.compare_sweeps(read_store(folder), "first", "small", Gate())
    assert "no comparable result (model llama3_8b against llama3_1b)" in line and verdict is None


def test_trials_of_different_work_are_not_ranked_together() -> None:
    trials = complete_trials({"H200": [10.0, 20.0, 30.0, 40.0]})
    base = {"workload": "parallel", "model": "llama3_8b", "tp": "searched", "type": "bf16"}
    batches = ("8", "8", "16", "16")
    trials["tag.work"] = [json.dumps({**base, "global_batch": batch}) for batch in batches]
    results = find_best_results(trials)
    assert {(result.work["global_batch"], result.speed.value) for result in results} == {("8", 20), ("16", 40)}
    assert set(group_by_work(results)) == {
        "parallel llama3_8b bf16 global_batch=8",
        "parallel llama3_8b bf16 global_batch=16",
    }
    assert describe_differences(results[0].work, results[1].work) == ["global_batch 16 against 8"]


def test_scaling_with_the_batch_is_drawn_for_equal_batches_per_device() -> None:
    frames = []
    for devices in (1, 2, 4):
        work = {"workload": "parallel", "model": "llama3_8b", "global_batch": str(8 * devices)}
        frames.append(
            complete_trials({"H200": [100.0 * devices]}, devices=devices).assign(**{"tag.work": json.dumps(work)})
        )
    titles = [title for title, group in group_by_scaling(find_best_results(pd.concat(frames))) if len(group) > 1]
    assert titles == ["Scaling of parallel llama3_8b with a batch of 8 per device"]


def test_the_differences_between_two_kinds_of_work_are_named() -> None:
    work = {"workload": "offload", "model": "llama3_8b", "sequence length": "8192"}
    assert describe_differences(work, {**work, "sequence length": "2048"}) == ["sequence length 8192 against 2048"]
    assert describe_differences(work, {"workload": "offload"}) == [
        "model llama3_8b against unknown",
        "sequence length 8192 against unknown",
    ]
    assert not describe_differences(work, dict(work))


def test_the_page_is_one_file_without_external_resources_and_escapes_every_value(folder: Path) -> None:
    assert run_report(folder).out == "report.html\n"
    text = (folder / "report.html").read_text()
    assert "<script>alert(1)</script>" not in text.split("<h2>Sweeps")[1].split("</table>")[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "A &amp; B" in text
    assert "<script>alert" not in text
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=.?https?:[^>]*>", text)
    assert "11,400 tokens/s" in text and "infeasible" in text and "prefers-color-scheme: dark" in text


def test_a_report_has_the_charts_that_its_trials_suffice_for(folder: Path) -> None:
    titles = [chart.title for chart in charts.build_charts(read_store(folder))]
    assert any("Nine views of offload llama3_8b" in title for title in titles)
    assert titles[-1] == "Timeline of the devices" and "plotly.js" not in page.build_page("t", [], [])


def test_nine_panels_show_each_platform_by_the_same_metrics() -> None:
    trials = pd.concat([complete_trials({"H200": [8000.0, 10000.0]}), complete_trials({"H200": [19000.0]}, devices=2)])
    results = sorted(find_best_results(trials), key=lambda result: result.devices)
    by_title = {panel.title: panel for panel in panels.build_panels(results)}
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
    assert panels.Panel("HFU", "%", {"": [panels.UNKNOWN]}).is_empty and not by_title["Tokens"].is_empty


def test_the_charts_of_a_sweep_never_mix_two_kinds_of_work() -> None:
    speeds = {"H200": [float(n) for n in range(1, 13)]}
    trials = complete_trials(speeds, host=[1, 1, 2, 2, 1, 2] * 2, device=[1, 2, 1, 2, 2, 1] * 2)
    trials["tag.dtype"] = ["bf16"] * 6 + ["fp8"] * 6
    infeasible = trials.head(1).assign(**{"tag.outcome": "infeasible", "tag.dtype": None, "param.device": "3"})
    trials = pd.concat([trials, infeasible], ignore_index=True)
    trials.loc[trials["tag.outcome"] == "infeasible", "metric.tokens_per_s"] = math.nan
    # The infeasible trial, whose type is unknown, is part of both.
    assert {work: len(group) for work, group in split_by_work(trials)} == {"bf16": 7, "fp8": 7}
    figures = {re.sub("/s, .* over", "/s over", chart.title): chart.figures[0] for chart in build_charts(trials)}
    cells = figures["s, bf16: best tokens/s over host and device"].data[0]
    assert np.nanmax(cells.z) == 6 and "s, fp8: best tokens/s over host and device" in figures
    assert list(figures["s, fp8: trials"].data[0].y) == [7, 8, 9, 10, 11, 12]


def test_heatmaps_of_training_show_speed_and_utilisation_and_mark_infeasible_cells() -> None:
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
    without_utilisation = pd.DataFrame(rows).assign(**{"metric.mfu": math.nan, "metric.hfu": math.nan})
    (chart,) = charts.build_heatmaps("sweep", without_utilisation)
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


def test_each_kind_of_work_has_an_image(folder: Path) -> None:
    names = run_report(folder, "--format", "png").out.splitlines()
    assert names == ["report_offload_llama3_1b_8192_bf16.png", "report_offload_llama3_8b_8192_bf16.png"]
    assert all((folder / name).read_bytes()[:4] == b"\x89PNG" for name in names)


def rank_importances(trials: pd.DataFrame) -> dict[str, float]:
    """Return the importances of all parameters as the report computes them."""
    ranked = charts.rank_trials(find_best_results(trials))
    return compute_importances(ranked["rank"], charts.select_varying_parameters(ranked))


def find_scaling(all_charts: list[charts.Chart]) -> list[charts.Chart]:
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
        {"H200": list(speeds)},
        layout=layout,
        batch=random.integers(1, 500, 200),
        name=[f"n{n}" for n in range(200)],
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


def test_published_and_imported_results_are_in_a_table_of_their_own_and_never_ranked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where artifacts go
    shutil.copy(folder / "mlflow.db", tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for speed in (4e6, 8e6):  # faster than every measured result; the fastest of each file is shown
        line = f"75,78,8192,15,16384,0,0,0,0,0,1,68,0.1,0.3,{68 * 8192 / speed},{speed},500,0.5,0.6\n"
        with (tmp_path / "h100_8b.csv").open("a") as file:
            file.write(line)
    (tmp_path / "other_8b.csv").write_text(line)
    for name in ("h100_8b.csv", "other_8b.csv"):
        assert "imported into" in import_file(tmp_path / name, uri, "imported")
    before, after = read_store(folder), read_store(tmp_path)
    assert [result.speed for result in before.best_results] == [result.speed for result in after.best_results]
    assert export.build_csv(before) == export.build_csv(after)
    tables = summary.build_tables(after, None)
    published, imported = [
        [dict(zip(table.heading, row, strict=True)) for row in table.rows] for table in tables if table.unranked
    ]
    assert [(row["result"], row["tokens/s per device"]) for row in imported] == [
        ("h100_8b line 2", "8,000,000"),
        ("other_8b line 1", "8,000,000"),
    ]
    assert {row["model"] for row in published} == {"llama3_8b"}
    claimed = [(row["source"], row["claimed tokens/s per device"]) for row in published]
    assert all(rate for _, rate in claimed) and ("dgxc-benchmarking v25.02", "10,253") in claimed
    html = page.build_page("t", tables, [])
    assert all(f"<section class=unranked><h2>{name} results</h2>" in html for name in ("Published", "Imported"))
    assert not store.read(uri, sweep="first").imported.size  # the report on one sweep has no imported results


def test_a_store_with_only_imported_results_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = f"75,78,8192,8,16384,0,0,0,0,0,1,68,0.1,0.3,{68 * 8192 / 1e4},10000,500,0.5,0.6\n"
    (tmp_path / "h100_8b.csv").write_text(line)
    import_file(tmp_path / "h100_8b.csv", f"sqlite:///{tmp_path}/mlflow.db", "imported")
    markdown = run_report(tmp_path, "--format", "markdown").out
    assert "| h100_8b line 1 |" in markdown and "Best results" not in markdown
    assert "there is no complete trial" in run_report(tmp_path, "--format", "csv").err
    assert run_report(tmp_path).code == 0
    assert "there is no complete trial" in run_report(tmp_path, "--format", "png").err
    assert "unknown sweep" in run_report(tmp_path, "--compare", "a", "b").err


def test_json_and_csv_are_unrounded_and_a_regression_has_an_exit_code(folder: Path) -> None:
    content = json.loads(run_report(folder, "--format", "json").out)
    first = next(row for row in content["Sweeps"] if row["sweep"] == "first")
    assert first["trials"] == "2 complete, 1 infeasible, 1 tainted" and first["versions"] == "torch 2.11"
    assert first["power limit W"] == "700" and first["ended"].endswith("UTC") and first["device"] == "NVIDIA H200"
    best = next(row for row in content["Best results"] if row["value"] == 11400.0)
    assert best["tflops"] == 570.0 and best["param.budget"] == "40" and best["rounds"] == 0 and best["hfu"] is None
    rows = pd.read_csv(io.StringIO(run_report(folder, "--format", "csv").out))
    assert {"value", "ci_low", "ci_high", "mfu"} <= set(rows.select_dtypes("number").columns)
    assert len(rows) == len(content["Best results"]) and "sequence_length" in rows and "hfu" not in rows
    assert "| offload | llama3_8b |" in run_report(folder, "--format", "markdown", "--sweep", "first").out
    slower = run_report(folder, "--baseline", "second", "--sweep", "first")
    assert slower.code == 1 and "1.12 times as fast" in slower.out
    assert run_report(folder, "--baseline", "first", "--sweep", "second").code == 0
    assert run_report(folder, "--baseline", "second", "--sweep", "first", "--threshold", "0.2").code == 0
    unclear = run_report(folder, "--baseline", "second", "--sweep", "first", "--between-runs", "0.1")
    assert unclear.code == 3 and "verdict: cannot be told, at a threshold of 0.02 and 0.1 between runs" in unclear.out
    different_work = run_report(folder, "--baseline", "first", "--sweep", "small")
    assert different_work.code == 2 and "small has no comparable result" in different_work.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "fist"], "Did you mean first?"),
        (["--format", "pdf"], "Available: csv, html, json, markdown, png"),
        (["--dir", "/nowhere"], "there is no such store"),
        (["--compare", "first", "secund"], "Did you mean second?"),
        (["ledderboard"], "Did you mean leaderboard?"),
        (["--store", "http://127.0.0.1:9"], "--store http://127.0.0.1:9: nothing answers there"),
        (["--fromat", "csv"], "unrecognized arguments: --fromat"),
    ],
)
def test_an_invalid_argument_is_refused_in_one_line(folder: Path, arguments: list[str], message: str) -> None:
    done = run_report(folder, *arguments)
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1


def test_the_best_result_of_a_sweep_with_finals_is_their_winner(tmp_path: Path) -> None:
    """The highest of the single trials was chosen for its luck; all rates are the winner's in the finals."""
    write_sweep(tmp_path, "first", {"24": 9500.0, "40": 11000.0})
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("offload")
    assert experiment is not None
    (parent,) = client.search_runs([experiment.experiment_id], "tags.`sweeper.kind` = 'sweep'")
    finals = {"final_tokens_per_s": 9000.0, "final_tokens_per_s_ci_low": 8900.0, "final_tokens_per_s_ci_high": 9100.0}
    for name, value in (finals | {"final_trial": 0.0, "final_rounds": 5.0}).items():
        client.log_metric(parent.info.run_id, name, value)
    (result,) = read_store(tmp_path).best_results
    assert (result.trial["param.budget"], result.rounds) == ("24", 5)
    assert result.speed == MeasuredValue(9000.0, 8900.0, 9100.0)
    assert result.get_metric("mfu") == pytest.approx(9000 / 2e4) and result.get_metric("tflops") == pytest.approx(450)
