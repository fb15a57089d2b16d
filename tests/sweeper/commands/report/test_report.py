"""Tests of the report on a real MLflow store: its tables, comparisons and refusals."""

import io
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow import MlflowClient

from sweeper.commands.ingest.main import import_file
from sweeper.commands.report import charts, compare, report_tables
from sweeper.common.trials import TrialStatus
from sweeper.metrics.derivation import Prices
from sweeper.pages import html_page
from sweeper.results import mlflow_results
from sweeper.results.comparison import describe_comparison
from sweeper.results.ranking import find_best_results
from sweeper.results.runs import Gate, Verdict
from sweeper.tracking.mlflow_view import RankedTrial, SweepView
from sweeper.tracking.process import Store
from tests.support.factories import run_report, trial_record

pytestmark = pytest.mark.xdist_group("report")
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
    work = {"workload": "offload", "model": model, "sequence_length": "8192", "type": "bf16"}
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
            metrics |= {"joules_per_token": 700 / speed} if "H200" in device else {}
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
            work=work,
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


def best_of(folder: Path, *arguments: str) -> dict[str, str]:
    """Return the row of the best result of the second sweep, from the report as Markdown."""
    text = run_report(folder, "sweep=second", "format=markdown", *arguments).out
    table = text.split("## Best results")[1].strip().splitlines()
    heading, row = (re.split(r" ?\| ?", table[number]) for number in (0, 2))
    return dict(zip(heading, row, strict=True))


def test_the_cost_of_the_best_result_follows_the_prices_of_the_report(folder: Path) -> None:
    best = best_of(folder, "price_per_hour=3.6", "price_per_kwh=0.5")
    assert (best["speed"], best["of trials"], best["J/token"]) == ("11,400 tokens/s", "2", "0.0614")
    # 0.0614 J a token are 0.01706 kWh for a million
    assert float(best["cost of 10^6 tokens"]) == pytest.approx(0.08772 + 0.01706 * 0.5, rel=1e-2)


OBJECTIVES = {"tokens_per_s": "maximize", "peak_device_gib": "minimize"}


def write_front(folder: Path, *, limits: Mapping[str, Any] | None = None, certified: bool = False) -> None:
    """Write a sweep of four trials of a second each, all but the third on the front of speed and memory."""
    tags = {**PARENT, "objectives": json.dumps(OBJECTIVES)}
    parent = {"params": {"sweep.gpus": 1}, "started_at": "now", "artifacts": {}, "tags": tags}
    written = Store(f"sqlite:///{folder}/mlflow.db", "offload", "study of a front", "trade", parent)
    for number, (speed, gib) in enumerate([(100.0, 20.0), (90.0, 10.0), (95.0, 25.0), (120.0, 30.0)]):
        metrics = {"tokens_per_s": speed, "peak_device_gib": gib}
        times = {"started_at_s": 1.0e9 + number, "ended_at_s": 1.0e9 + number + 1}
        written.write_trial(
            trial_record(number, {"budget": str(number)}, metrics=metrics, work={"workload": "offload"}, **times)
        )
    written.write_front([1, 3] if certified else [0, 1, 3])
    tags = {"limits": json.dumps(dict(limits or {}))}
    written.close("FINISHED", {"front_rounds": 3.0} if certified else {}, tags, {}, [])
    if certified:
        final = {f"final_{name}": 25.0 for name in OBJECTIVES} | {"front_share": 0.02}
        ranked = RankedTrial(0, final, "", {"front_verdict": "dominated", "same_as": "1, 3"})
        written.write_view(SweepView("tokens_per_s", ["tokens_per_s"], [], [ranked]))


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Results with a front, and with one that is certified."""
    paths = [tmp_path_factory.mktemp(name) for name in ("front", "certified")]
    write_front(paths[0])
    write_front(paths[1], certified=True)
    return paths


def front_of(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """Return the trials in the table of the front with their verdicts, and the text of the report."""
    text = run_report(folder, "format=markdown", *arguments).out
    rows = text.split("## Pareto front of trade")[1].split("##")[0].strip().splitlines()[2:]
    cells = [re.split(r" ?\| ?", row) for row in rows if row.startswith("|")]
    return [f"{row[1]} {row[6]}" for row in cells], text


def test_the_front_of_several_objectives_has_a_table_and_a_chart(fronts: list[Path]) -> None:
    rows, text = front_of(fronts[0])
    assert rows == ["3 measured once", "0 measured once", "1 measured once"]
    assert "3 of 4 ranked trials are on the front" in text and "Not certified" in text
    page = Path(run_report(fronts[0], f"out={fronts[0] / 'r.html'}").out.strip()).read_text()
    assert page.count("<h2>Pareto front of trade") == 2  # the table and the chart


def overview_of(folder: Path) -> str:
    page = Path(run_report(folder, f"out={folder / 'r.html'}").out.strip()).read_text()
    return page.split('<p class="overview">')[1].split("</p>")[0]


def test_the_headline_of_several_objectives_counts_the_front_and_names_no_fastest(fronts: list[Path]) -> None:
    text = overview_of(fronts[0])
    front = "3 of 4 ranked trials of trade are on the front of tokens_per_s and peak_device_gib. Each was measured once"
    assert "the fastest" not in text and front in text


def test_the_headline_says_how_sure_the_front_is(fronts: list[Path], tmp_path: Path) -> None:
    assert "Of 1 trial measured again in 3 rounds: 1 dominated." in overview_of(fronts[1])
    write_front(tmp_path, limits={"peak_device_gib": [15.0, "minimize"]})
    assert "1 of 1 ranked trial of trade is on the front of tokens_per_s" in overview_of(tmp_path)


def test_what_the_finals_say_of_a_front_is_shown(fronts: list[Path]) -> None:
    rows, text = front_of(fronts[1])
    assert rows == ["0 dominated", "3 measured once", "1 measured once"] and "measured again in 3 rounds" in text
    assert "| 0 | 0 | 25 | 25 | 2 | dominated | 1, 3 |" in text
    row = json.loads(run_report(fronts[1], "format=json").out)["Pareto front of trade"][0]
    assert [*row.values()] == [0, 0, 25, 25, 2, "dominated", "1, 3", None, None], row


def test_trials_beyond_a_limit_of_their_sweep_are_neither_best_nor_on_the_front(tmp_path: Path) -> None:
    write_front(tmp_path, limits={"peak_device_gib": 26.0})
    rows, text = front_of(tmp_path)
    assert rows == ["0 measured once", "1 measured once"] and "limit peak_device_gib ≤ 26" in text
    assert [result.estimate.value for result in read_store(tmp_path).best_results] == [100.0]


def read_store(folder: Path) -> mlflow_results.Stored:
    return mlflow_results.read(f"sqlite:///{folder}/mlflow.db")


def test_the_best_result_of_each_device_and_kind_of_work_is_one_row(folder: Path) -> None:
    results = find_best_results(read_store(folder).trials)
    assert {(r.work["model"], r.device): (r.estimate.value, len(r.trials)) for r in results} == {
        ("llama3_8b", "NVIDIA H200"): (11400.0, 4),
        ("llama3_8b", "A & B"): (5000.0, 1),
        ("llama3_1b", "NVIDIA H200"): (56000.0, 1),
    }
    (table,) = [
        table for table in report_tables.build_tables(read_store(folder), Prices(2.0)) if table.title == "Best results"
    ]
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
    text, verdict = describe_comparison(
        compare.compare_sweeps(read_store(folder), "first", "second", Gate())[1], Gate()
    )
    assert text == (
        "offload llama3_8b 8192 bf16 tokens_per_s on NVIDIA H200: faster, +11.8% (95% +5.5% to +18.3%)\n"
        "  11,400 (11,286 to 11,514) tokens/s of second against 10,200 (10,098 to 10,302) of first; from the steps of "
        "one trial each; 2.0% between runs (assumed)\n"
        "verdict: faster, at a threshold of 0.02"
    )
    assert verdict is Verdict.FASTER
    (work,) = compare.compare_sweeps(read_store(folder), "second", "first", Gate())[1]
    assert work.outcome == "slower"
    (work,) = compare.compare_sweeps(read_store(folder), "first", "small", Gate())[1]
    assert str(work).endswith("not compared: small has no comparable result (model llama3_8b against llama3_1b)")


def test_the_best_of_spaces_that_differ_are_compared_at_common_points_alone(folder: Path) -> None:
    stored = read_store(folder)
    stored.trials["tag.work"] = '{"workload": "matmul", "budget": "searched"}'
    stored.sweeps["tag.space.budget"] = [f"choice({number})" for number in range(len(stored.sweeps))]
    is_fastest = (stored.trials["tag.sweep"] == "second") & (stored.trials["param.budget"] == "40")
    stored.trials.loc[is_fastest, "param.budget"] = "48"
    difference, (work, *_) = compare.compare_sweeps(stored, "first", "second", Gate())
    assert difference.startswith("the spaces differ (budget choice(") and difference.endswith("that both measured")
    assert work.outcome == "inconclusive" and "9,450" in str(work) and "11,400" not in str(work)
    stored.trials.loc[stored.trials["tag.sweep"] == "second", "param.budget"] = "48"
    difference, works = compare.compare_sweeps(stored, "first", "second", Gate())
    assert "no point was measured by both" in difference and not works


def test_the_page_is_one_file_without_external_resources_and_escapes_every_value(folder: Path) -> None:
    assert run_report(folder).out == "sweeps/report.html\n"
    text = (folder / "sweeps" / "report.html").read_text()
    assert "<script>alert(1)</script>" not in text.split("<h2>Sweeps")[1].split("</table>")[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "A &amp; B" in text
    assert "<script>alert" not in text
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=.?https?:[^>]*>", text)
    assert "11,400 tokens/s" in text and "infeasible" in text and "prefers-color-scheme: dark" in text


def test_a_report_has_the_charts_that_its_trials_suffice_for(folder: Path) -> None:
    titles = [chart.title for chart in charts.build_charts(read_store(folder))]
    assert any("Nine views of offload llama3_8b" in title for title in titles)
    assert titles[-1] == "Timeline of the devices" and "plotly.js" not in html_page.build_page("t", [])


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
    assert [result.estimate for result in before.best_results] == [result.estimate for result in after.best_results]
    assert report_tables.build_text(before, [], "csv") == report_tables.build_text(after, [], "csv")
    tables = report_tables.build_tables(after, None)
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
    html = html_page.build_page("t", tables)
    for name in ("Published", "Imported"):
        assert re.search(rf'<section id="s\d" class="unranked"><h2>{name} results</h2>', html)
    assert not mlflow_results.read(uri, sweep="first").imported.size  # the report on one sweep has no imported results


def test_a_store_with_only_imported_results_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = f"75,78,8192,8,16384,0,0,0,0,0,1,68,0.1,0.3,{68 * 8192 / 1e4},10000,500,0.5,0.6\n"
    (tmp_path / "h100_8b.csv").write_text(line)
    import_file(tmp_path / "h100_8b.csv", f"sqlite:///{tmp_path}/mlflow.db", "imported")
    markdown = run_report(tmp_path, "format=markdown").out
    assert "| h100_8b line 1 |" in markdown and "Best results" not in markdown
    assert "there is no complete trial" in run_report(tmp_path, "format=csv").err
    assert run_report(tmp_path).code == 0
    assert "unknown sweep" in run_report(tmp_path, "compare", "a", "b").err


def test_json_and_csv_are_unrounded_and_a_regression_has_an_exit_code(folder: Path) -> None:
    content = json.loads(run_report(folder, "format=json").out)
    first = next(row for row in content["Sweeps"] if row["sweep"] == "first")
    assert first["trials"] == {"complete": 2, "infeasible": 1, "tainted": 1} and first["versions"] == "torch 2.11"
    assert first["power limit W"] == 700 and first["ended"].endswith("UTC") and first["device"] == "NVIDIA H200"
    best = next(row for row in content["Best results"] if row["value"] == 11400.0)
    assert best["tflops"] == 570.0 and best["param.budget"] == 40 and best["rounds"] == 0 and best["hfu"] is None
    assert (best["unit"], best["sequence_length"], best["trial"]) == ("tokens/s", 8192, 1)
    rows = pd.read_csv(io.StringIO(run_report(folder, "format=csv").out))
    assert {"value", "ci_low", "ci_high", "mfu"} <= set(rows.select_dtypes("number").columns)
    assert len(rows) == len(content["Best results"]) and "sequence_length" in rows and "hfu" not in rows
    assert "| offload | llama3_8b |" in run_report(folder, "format=markdown", "sweep=first").out
    slower = run_report(folder, "compare", "second", "first")
    assert slower.code == 1 and "tokens_per_s on NVIDIA H200: slower, -10.5% (95% -15." in slower.out
    assert run_report(folder, "compare", "first", "second").code == 0
    assert run_report(folder, "compare", "second", "first", "threshold=0.2").code == 0
    unclear = run_report(folder, "compare", "second", "first", "between_runs=10%")
    assert unclear.code == 3 and "verdict: inconclusive, at a threshold of 0.02; `python -m sweeper h" in unclear.out
    assert "10.0% between runs (assumed); 5 more runs and 5 more of the earlier work needed" in unclear.out
    assert run_report(folder, "compare", "first", "threshold=0").err.startswith("sweeper report: threshold=0")
    different_work = run_report(folder, "compare", "first", "small")
    assert different_work.code == 2 and "small has no comparable result" in different_work.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep=fist"], "Did you mean first?"),
        (["format=pdf"], "must be one of html, markdown, csv, json"),
        (["dir=/nowhere"], "the store does not exist"),
        (["compare", "first", "secund"], "Did you mean second?"),
        (["comparre"], "Did you mean compare?"),
        (["tracking.uri=http://127.0.0.1:9"], "tracking.uri=http://127.0.0.1:9: nothing responds there"),
        (["price_per_kwh=-1"], "at least 0"),
        (["fromat=csv"], "fromat: unknown key. Did you mean format? Available: dir, format, out, price_per_hour"),
        (["out=/nowhere/report.html"], "out=/nowhere/report.html: /nowhere: no such directory"),
        (["format=json", "out=/tmp"], "out=/tmp: is a directory. Give the name of a file in it"),
        (["format=csv", "out=/proc/report.csv"], "out=/proc/report.csv: cannot be written:"),
        (["threshold=2%"], "threshold=2%: `sweeper report` does not take it; `sweeper report compare A [B]` does"),
    ],
)
def test_an_invalid_argument_is_refused_in_one_line(folder: Path, arguments: list[str], message: str) -> None:
    done = run_report(folder, *arguments)
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1


@pytest.mark.parametrize(("rounds", "low", "high"), [(5, 8900.0, 9100.0), (2, math.nan, math.nan)])
def test_the_best_result_of_a_sweep_with_finals_is_their_winner(
    tmp_path: Path, rounds: int, low: float, high: float
) -> None:
    """The highest of the single trials was chosen for its luck; all rates are the winner's in the finals."""
    write_sweep(tmp_path, "first", {"24": 9500.0, "40": 11000.0})
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("offload")
    assert experiment is not None
    (parent,) = client.search_runs([experiment.experiment_id], "tags.`sweeper.kind` = 'sweep'")
    finals = {"final_tokens_per_s": 9000.0, "final_tokens_per_s_ci_low": low, "final_tokens_per_s_ci_high": high}
    for name, value in (finals | {"final_trial": 0.0, "final_rounds": float(rounds)}).items():
        client.log_metric(parent.info.run_id, name, value)
    (result,) = read_store(tmp_path).best_results
    assert (result.trial["param.budget"], result.rounds) == ("24", rounds)
    assert result.estimate.bounds == pytest.approx((9000.0, low, high), nan_ok=True)
    assert ("| — (too few rounds) |" in run_report(tmp_path, "format=markdown").out) == (rounds == 2)
    assert result.get_metric("mfu") == pytest.approx(9000 / 2e4) and result.get_metric("tflops") == pytest.approx(450)
