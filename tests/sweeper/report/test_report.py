"""The report, from a real MLflow store: what is shown, what is compared, and what is refused."""

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

from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.ingest.__main__ import take
from sweeper.report import charts, compare, export, importance, page, panels, store, summary
from sweeper.report.__main__ import main
from sweeper.report.best import Figure, best_results, compared, differences, kinds
from sweeper.tracking.store import Store
from tests.conftest import Done
from tests.support.factories import complete_trials as trials

PARENT = {"workload": "offload", "hardware": "h200", "device": "NVIDIA H200", "version.torch": "2.11"}


def write(
    folder: Path,
    sweep: str,
    speeds: Mapping[str, float | None],
    *,
    model: str = "llama3_8b",
    device: str = "NVIDIA H200",
    spread: float = 0.01,
) -> None:
    """A finished sweep over `budget`: tokens/s by its value, None where that was infeasible."""
    parent = {"params": {"model": model, "sequence_length": "8192", "sweep.gpus": 1, "budget": "choice(…)"}}
    tags = {**PARENT, "device": device}
    stored = Store(
        f"sqlite:///{folder}/mlflow.db",
        "offload",
        f"study of {sweep}",
        sweep,
        {**parent, "started_at": "now", "tags": tags, "artifacts": {}},
    )
    for number, (budget, speed) in enumerate(speeds.items()):
        metrics = {"steps": 3.0, "peak_device_gib": 20.0 + number}
        if speed is not None:
            metrics |= {"tokens_per_s": speed, "mfu": speed / 2e4, "tflops": speed / 20}
            metrics |= {"tokens_per_s_ci_low": speed * (1 - spread), "tokens_per_s_ci_high": speed * (1 + spread)}
        ending = TrialStatus.COMPLETE if speed is not None else TrialStatus.INFEASIBLE
        measurement = {"machine_info": {"power_limit_w": 700.0, "tainted": number == 1}, "matrix_dtype": "bf16"}
        found = TrialRecord(
            number=number,
            params={"budget": budget},
            status=ending,
            reason="" if speed else "3 GiB too little at best",
            detail="",
            metrics=metrics if speed is not None else {},
            measurements=[measurement] if speed is not None else [],
            where={"node": "n1", "gpus": "0"},
            started_at_s=1.0e9 + number,
            ended_at_s=1.0e9 + number + 1,
            elapsed_s=float(number),
        )
        stored.write_trial(found)
    stored.close("FINISHED", {}, {}, {}, [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results")
    write(path, "first", {"24": 9500.0, "40": 10200.0, "8": None})
    write(path, "second", {"24": 9450.0, "40": 11400.0})
    write(path, "small", {"24": 56000.0}, model="llama3_1b")
    write(path, "<script>alert(1)</script>", {"24": 5000.0}, device="A & B")
    return path


def report(folder: Path, *words: str) -> Done:
    """The command, in this process: MLflow takes seconds to import."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.ExitStack() as during:
        for context in (contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
            during.enter_context(context)
        during.enter_context(pytest.MonkeyPatch.context()).setattr(sys, "argv", ["sweeper.report", *words])
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def stored(folder: Path) -> store.Stored:
    return store.read(f"sqlite:///{folder}/mlflow.db")


def test_the_best_of_each_device_at_each_kind_of_work_is_one_row(folder: Path) -> None:
    found = best_results(stored(folder).trials)
    assert {(p.work["model"], p.device): (p.figure.value, len(p.trials)) for p in found} == {
        ("llama3_8b", "NVIDIA H200"): (11400.0, 4),
        ("llama3_8b", "A & B"): (5000.0, 1),
        ("llama3_1b", "NVIDIA H200"): (56000.0, 1),
    }
    (table,) = [t for t in summary.tables(stored(folder), 2.0) if t.title == "Peaks"]
    best = next(row for row in table.rows if "11,400 tokens/s" in row)
    row = dict(zip(table.heading, best, strict=True))
    assert (
        row["TFLOP/s"] == "570"
        and row["as executed"] == "budget=40"
        and row["MFU %"] == "57.0"
        and row["95%"] == "11,286 to 11,514"
    )
    assert row["10^9 tokens a day"] == "0.985" and row["cost of 10^6 tokens"] == "0.0487"


def test_two_sweeps_of_the_same_work_are_compared_by_their_intervals(folder: Path) -> None:
    lines, worse = compare.sweeps(stored(folder), "first", "second", 0.02)
    assert lines == [
        "offload llama3_8b 8192 bf16 tokens_per_s: second on NVIDIA H200 is 1.12 times as fast as first on NVIDIA "
        "H200: 11,400 (11,286 to 11,514) against 10,200 (10,098 to 10,302)"
    ]
    assert not worse and compare.sweeps(stored(folder), "second", "first", 0.02)[1]
    (line,), worse = compare.sweeps(stored(folder), "first", "small", 0.02)
    assert "nothing to compare with (model llama3_8b against llama3_1b)" in line and worse is None


@given(*[st.floats(1, 1e6)] * 2, *[st.floats(0, 0.5)] * 2)
def test_a_ratio_is_only_said_where_the_intervals_are_apart(a: float, b: float, wide: float, wider: float) -> None:
    one, other = Figure(a, a * (1 - wide), a * (1 + wide)), Figure(b, b * (1 - wider), b * (1 + wider))
    words = compared(one, other, "A", "B")
    apart = one.high < other.low or other.high < one.low
    assert ("times as fast" in words) == apart and ("no difference" in words) == (not apart)
    assert one.below(other) == (one.high < other.low)
    assert "no more can be said" in compared(Figure(a), other, "A", "B")


def test_work_that_differs_is_named() -> None:
    one = {"workload": "offload", "model": "llama3_8b", "sequence length": "8192"}
    assert differences(one, {**one, "sequence length": "2048"}) == ["sequence length 8192 against 2048"]
    assert differences(one, {"workload": "offload"}) == [
        "model llama3_8b against unknown",
        "sequence length 8192 against unknown",
    ]
    assert not differences(one, dict(one))


def test_the_page_is_one_file_in_which_nothing_that_was_measured_is_code(folder: Path) -> None:
    assert report(folder).out == "report.html\n"
    text = (folder / "report.html").read_text()
    assert "<script>alert(1)</script>" not in text.split("<h2>What ran where")[1].split("</table>")[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "A &amp; B" in text
    assert "<script>alert" not in text
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=.?https?:[^>]*>", text)
    assert "11,400 tokens/s" in text and "infeasible" in text and "prefers-color-scheme: dark" in text


def test_pictures_need_something_to_draw(folder: Path) -> None:
    names = [picture.title for picture in charts.figures(stored(folder))]
    assert any("Nine views of offload llama3_8b" in name for name in names)
    assert names[-1] == "Which device did what when" and "plotly" not in page.page("t", [], [])


def test_nine_panels_show_each_platform_by_the_same_measure() -> None:
    two = best_results(pd.concat([trials({"H200": [8000.0, 10000.0]}), trials({"H200": [19000.0]}, devices=2)]))
    shown = {panel.title: panel for panel in panels.panels(sorted(two, key=lambda peak: peak.devices))}
    assert len(shown) == 9 and len({panel.unit for panel in shown.values()}) > 5
    assert [f.value for f in shown["Tokens"].series[""]] == [10000, 19000]
    assert [str(f) for f in shown["Tokens per GPU"].series[""]] == [
        "10,000 (9,000 to 11,000)",
        "9,500 (8,550 to 10,450)",
    ]
    assert [f.value for f in shown["Achieved and possible"].series["peak"]] == pytest.approx([1000, 1000])
    assert shown["All configurations"].spread == [[8000, 10000], [9500]]
    gains = [f.value for f in shown["Best over median configuration"].series[""]]
    assert gains[0] == pytest.approx(10 / 9) and math.isnan(gains[1])  # of one configuration there is no median to beat
    assert panels.Panel("HFU", "%", {"": [panels.UNKNOWN]}).empty and not shown["Tokens"].empty


def test_pictures_of_a_sweep_never_mix_two_kinds_of_work() -> None:
    speeds = {"H200": [float(n) for n in range(1, 13)]}
    table = trials(speeds, host=[1, 1, 2, 2, 1, 2] * 2, device=[1, 2, 1, 2, 2, 1] * 2)
    table["tag.dtype"] = ["bf16"] * 6 + ["fp8"] * 6
    failed = table.head(1).assign(**{"tag.outcome": "infeasible", "tag.dtype": None, "param.device": "3"})
    table = pd.concat([table, failed], ignore_index=True)
    table.loc[table["tag.outcome"] == "infeasible", "metric.tokens_per_s"] = math.nan
    assert {work: len(own) for work, own in kinds(table)} == {"bf16": 7, "fp8": 7}  # the one that failed is with both
    shown = {re.sub("/s, .* over", "/s over", each.title): each.figures[0] for each in drawn(table)}
    cells = shown["s, bf16: best tokens/s over host and device"].data[0]
    assert np.nanmax(cells.z) == 6 and "s, fp8: best tokens/s over host and device" in shown
    assert list(shown["s, fp8: trials"].data[0].y) == [7, 8, 9, 10, 11, 12]


def test_maps_over_two_budgets_are_drawn_of_speed_and_utilisation_and_mark_what_cannot_work() -> None:
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
    (picture,) = charts._heat("sweep", pd.DataFrame(rows))
    assert picture.title == "sweep: best tokens/s, TFLOP/s, MFU %, HFU % over host_gib and device_gib"
    assert [each.data[0].colorbar.title.text for each in picture.figures] == ["tokens/s", "TFLOP/s", "MFU %", "HFU %"]
    assert np.nanmax(picture.figures[2].data[0].z) == 50
    assert list(picture.figures[0].data[1].text) == ["3 GiB too little"]
    # Where something else worked in the same cell its figure stands there alone; of what is not known there is no map.
    rows.append({**rows[1], "param.host_gib": "40", "param.device_gib": "24"})
    unknown = pd.DataFrame(rows).assign(**{"metric.mfu": math.nan, "metric.hfu": math.nan})
    (picture,) = charts._heat("sweep", unknown)
    assert len(picture.figures) == 2 and not picture.figures[0].data[1].x


def test_scattered_shapes_are_drawn_each_in_its_place() -> None:
    random = np.random.default_rng(0)
    rows = trials({"H200": list(range(1, 41))}, m=random.integers(1, 9999, 40), n=random.integers(1, 9999, 40))
    picture = next(each for each in drawn(rows.drop(columns="metric.tokens_per_s")) if "over m and n" in each.title)
    assert picture.title == "s: TFLOP/s over m and n"
    (places,) = picture.figures[0].data
    fastest = rows.iloc[-1]
    assert len(places.x) == 40 and max(places.marker.color) == places.marker.color[-1] == 2  # on top of the others
    assert (places.x[-1], places.y[-1]) == (float(fastest["param.m"]), float(fastest["param.n"]))


def test_images_are_of_one_kind_of_work_each(folder: Path) -> None:
    said = report(folder, "--format", "png").out.splitlines()
    assert said == ["report_offload_llama3_1b_8192_bf16.png", "report_offload_llama3_8b_8192_bf16.png"]
    assert all((folder / name).read_bytes()[:4] == b"\x89PNG" for name in said)


def test_scaling_is_held_against_the_smallest_number_of_the_same_device() -> None:
    counted = [trials({"H200": [1000.0 * n * 0.9 ** (n > 1)], "MI300X": [900.0 * n]}, devices=n) for n in (1, 4)]
    (picture,) = [each for each in drawn(pd.concat(counted)) if each.title.startswith("Scaling")]
    own = {line.name: line for line in picture.figures[0].data[:4]}
    assert list(own["H200"].x) == list(own["ideal"].x) == [1, 4] and list(own["H200"].text) == ["", "90%"]
    assert list(own["H200"].y) == [1000, 3600] and list(own["ideal"].y) == [1000, 4000]
    assert (list(own["85%"].y), list(own["95%"].y)) == ([850, 3400], [950, 3800])
    assert own["H200"].error_y.array[1] == pytest.approx(360)
    assert not [each for each in drawn(counted[0]) if each.title.startswith("Scaling")]


def test_what_was_foreseen_is_drawn_beside_what_was_measured() -> None:
    said = {"tag.projected_tokens_per_s": ['{"1": 1100.0, "2": 2150.0, "8": 8000.0}'], "tag.projection_assumes": ["so"]}
    (picture,) = [each for each in drawn(trials({"H200": [1000.0]}), **said) if each.title.startswith("Scaling")]
    lines = {line.name: line for line in picture.figures[0].data}
    assert (list(lines["H200"].y), list(lines["H200, foreseen"].y)) == ([1000], [1100, 2150, 8000])
    assert list(lines["ideal"].y) == [1000, 2000, 8000] and picture.note.endswith("Assumed: H200: so")
    two = pd.concat([trials({"H200": [1000.0]}), trials({"H200": [1900.0]}, devices=2)])
    (picture,) = [each for each in drawn(two, **said) if each.title.startswith("Scaling")]
    lines = {line.name: line for line in picture.figures[0].data}
    assert list(lines["H200"].text) == ["", "95%"] and list(lines["ideal"].x) == [1, 2, 8]


def test_a_parameter_matters_as_much_as_it_explains_of_the_ranks() -> None:
    random = np.random.default_rng(0)
    layout, noise, name = random.choice(["a", "b", "c"], 200), random.normal(size=200), np.arange(200)
    values = 1000 + 100 * (layout == "b") + 200 * (layout == "c") + noise
    own = trials(
        {"H200": list(values)}, layout=layout, batch=random.integers(1, 500, 200), name=[f"n{n}" for n in name]
    )
    # A platform that is ten times as fast, and on which the same matters: ranks are of each platform by itself.
    both = pd.concat([own, own.assign(**{"tag.device": "B200", "metric.tokens_per_s": 10 * values})], ignore_index=True)
    known = importance.importances(importance.trials_of(best_results(both)))
    assert list(known) == ["layout", "batch"] and known["layout"] > 0.8 and known["batch"] < 0.1
    titles = [each.title for each in drawn(both)]
    assert {"Parallel coordinates: parallel bf16", "What mattered: parallel bf16"} <= set(titles)
    few = importance.trials_of(best_results(both.head(10)))
    assert not importance.importances(few)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), min_size=20, max_size=40))
def test_what_a_parameter_explains_is_a_share(points: list[tuple[str, int]]) -> None:
    letters, speeds = zip(*points, strict=True)
    table = trials({"H200": [1.0 + speed for speed in speeds]}, letter=letters, digit=speeds)
    known = importance.importances(importance.trials_of(best_results(table)))
    assert all(0 <= share <= 1 for share in known.values())
    if len(set(speeds)) > 1:
        assert known["digit"] == pytest.approx(1)


def drawn(table: pd.DataFrame, **sweep: list[str]) -> list[charts.Picture]:
    plain = {
        "tag.sweep": "s",
        "tag.sweeper.study": "s",
        "end": pd.NaT,
        "run": "r",
        "start": 0,
        "tag.sweeper.trial": "0",
    }
    sweeps = pd.DataFrame({"tag.sweeper.study": ["s"], **sweep})
    return list(charts.figures(store.Stored(sweeps, table.assign(**plain))))


def test_others_figures_stand_apart_and_are_never_ranked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where artifacts go
    shutil.copy(folder / "mlflow.db", tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for speed in (4e6, 8e6):  # faster than whatever was measured; of each file the fastest is shown
        line = f"75,78,8192,8,16384,0,0,0,0,0,1,68,0.1,0.3,{68 * 8192 / speed},{speed},500,0.5,0.6\n"
        with (tmp_path / "h100_8b.csv").open("a") as file:
            file.write(line)
    (tmp_path / "other_8b.csv").write_text(line)
    for name in ("h100_8b.csv", "other_8b.csv"):
        assert "imported into" in take(tmp_path / name, uri, "imported")
    before, after = stored(folder), stored(tmp_path)
    assert [p.figure for p in before.best_results] == [p.figure for p in after.best_results]
    assert export.csv(before) == export.csv(after)
    (apart,) = [table for table in summary.tables(after, None) if table.aside]
    rows = [dict(zip(apart.heading, row, strict=True)) for row in apart.rows]
    of_files = [
        (row["source"], row["tokens/s per device"]) for row in rows if not row["source"].startswith("published")
    ]
    assert of_files == [("imported: h100_8b line 2", "8,000,000"), ("imported: other_8b line 1", "8,000,000")]
    published = [row for row in rows if row["source"].startswith("published: ")]
    assert {row["model"] for row in published} == {"llama3_8b"} and all(row["claimed"] for row in published)
    assert "10,253" in {row["claimed"] for row in published if row["source"].endswith("dgxc-benchmarking v25.02")}
    assert "<section class=aside><h2>Others&#x27; figures</h2>" in page.page("t", summary.tables(after, None), [])
    assert not store.read(uri, sweep="first").imported.size  # a report on one sweep is on that alone


def test_a_store_of_imported_results_alone_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = f"75,78,8192,8,16384,0,0,0,0,0,1,68,0.1,0.3,{68 * 8192 / 1e4},10000,500,0.5,0.6\n"
    (tmp_path / "h100_8b.csv").write_text(line)
    take(tmp_path / "h100_8b.csv", f"sqlite:///{tmp_path}/mlflow.db", "imported")
    told = report(tmp_path, "--format", "markdown").out
    assert "imported: h100_8b line 1" in told and "Peaks" not in told
    assert "there is no complete trial" in report(tmp_path, "--format", "csv").err
    assert report(tmp_path).code == 0 and "there is no complete trial" in report(tmp_path, "--format", "png").err
    assert "there is no such sweep" in report(tmp_path, "--compare", "a", "b").err


def test_other_formats_and_exit_codes_are_for_programs(folder: Path) -> None:
    told = json.loads(report(folder, "--format", "json").out)
    first = next(row for row in told["What ran where"] if row["sweep"] == "first")
    assert first["trials"] == "2 complete, 1 infeasible, 1 tainted" and first["versions"] == "torch 2.11"
    assert first["power limit W"] == "700" and first["ended"].endswith("UTC") and first["device"] == "NVIDIA H200"
    peak = next(row for row in told["Peaks"] if row["value"] == 11400.0)
    assert peak["tflops"] == 570.0 and peak["param.budget"] == "40" and peak["rounds"] == 0 and peak["hfu"] is None
    rows = pd.read_csv(io.StringIO(report(folder, "--format", "csv").out))
    assert {"value", "ci_low", "ci_high", "mfu"} <= set(rows.select_dtypes("number").columns)
    assert len(rows) == len(told["Peaks"]) and "sequence_length" in rows and "hfu" not in rows
    assert "| offload | llama3_8b |" in report(folder, "--format", "markdown", "--sweep", "first").out
    slower = report(folder, "--baseline", "second", "--sweep", "first")
    assert slower.code == 1 and "1.12 times as fast" in slower.out
    assert report(folder, "--baseline", "first", "--sweep", "second").code == 0
    assert report(folder, "--baseline", "second", "--sweep", "first", "--threshold", "0.2").code == 0
    nothing = report(folder, "--baseline", "first", "--sweep", "small")
    assert nothing.code == 2 and "nothing of small compares with it" in nothing.err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--sweep", "fist"], "did you mean first?"),
        (["--format", "pdf"], "it may be csv, html, json, markdown, png"),
        (["--dir", "/nowhere"], "there is no such store"),
        (["--compare", "first", "secund"], "did you mean second?"),
        (["ledderboard"], "did you mean leaderboard?"),
        (["--store", "http://127.0.0.1:9"], "--store http://127.0.0.1:9: nothing answers there"),
        (["--fromat", "csv"], "unrecognized arguments: --fromat"),
    ],
)
def test_what_is_said_wrongly_is_said_in_a_line(folder: Path, words: list[str], wanted: str) -> None:
    done = report(folder, *words)
    assert done.code == 2 and wanted in done.err and len(done.err.splitlines()) == 1


def test_where_there_were_finals_their_winner_is_the_peak(tmp_path: Path) -> None:
    """The highest of the single trials was chosen for its luck; all rates are the winner's in the finals."""
    write(tmp_path, "first", {"24": 9500.0, "40": 11000.0})
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = (each.experiment_id for each in client.search_experiments() if each.name == "offload")
    (parent,) = client.search_runs([experiment], "tags.`sweeper.kind` = 'sweep'")
    finals = {"final_tokens_per_s": 9000.0, "final_tokens_per_s_ci_low": 8900.0, "final_tokens_per_s_ci_high": 9100.0}
    for name, value in (finals | {"final_trial": 0.0, "final_rounds": 5.0}).items():
        client.log_metric(parent.info.run_id, name, value)
    (peak,) = store.read(f"sqlite:///{tmp_path}/mlflow.db").best_results
    assert (peak.trial["param.budget"], peak.rounds, peak.figure) == ("24", 5, Figure(9000.0, 8900.0, 9100.0))
    assert peak.metric("mfu") == pytest.approx(9000 / 2e4) and peak.metric("tflops") == pytest.approx(450)
