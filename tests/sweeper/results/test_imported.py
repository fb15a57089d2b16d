"""Tests of the report on imported results: the fastest of each kind of work, contradictions, and pictures."""

import itertools
from typing import Any

import pandas as pd

from sweeper.commands.report.charts import build_imported_charts
from sweeper.commands.report.report_tables import CONTRADICTIONS, IMPORTED, build_tables
from sweeper.results import imported
from sweeper.results.mlflow_results import Stored


def imported_run(name: str, rate: float | None = None, **changes: Any) -> dict[str, Any]:
    """Return the row of an imported result: Llama 3 8B on 8 H100s, with a rate of one of them."""
    run = {
        "run": name,
        "run_id": name,
        "parent": "file",
        "param.model": "llama3_8b",
        "param.sequence_length": "8192",
        "tag.outcome": "complete",
        "tag.device": "NVIDIA H100",
        "tag.devices": "8",
        "metric.step_time_ms": 100.0,
    }
    rates = {"metric.tokens_per_s": 8 * rate, "metric.tokens_per_s_per_gpu": rate} if rate else {}
    return run | rates | changes


def read_rows(*runs: dict[str, Any], title: str = IMPORTED) -> list[dict[str, str]]:
    stored = Stored(pd.DataFrame(columns=["run", "start"]), pd.DataFrame(), pd.DataFrame(runs))
    tables = {table.title: table for table in build_tables(stored, None)}
    assert all(table.unranked for table in tables.values())
    table = tables.get(title)
    return [dict(zip(table.heading, row, strict=True)) for row in table.rows] if table else []


def test_the_fastest_of_each_kind_of_work_of_a_file_is_shown() -> None:
    rows = read_rows(
        imported_run("slow", 1000.0),
        imported_run("fast", 2000.0),
        imported_run("longer", 500.0, **{"param.sequence_length": "16384"}),
        imported_run("larger batch", 3000.0, **{"param.global_batch": "64"}),
        imported_run("other file", 900.0, parent="other"),
        imported_run("out of memory", **{"tag.outcome": "infeasible"}),
    )
    assert [row["result"] for row in rows] == ["larger batch", "fast", "other file", "longer"]
    assert rows[1]["tokens/s"] == "16,000" and rows[1]["tokens/s per device"] == "2,000"


def test_results_without_tokens_are_shown_with_their_steps_and_claims() -> None:
    claims = {"metric.claimed_tokens_per_s_per_gpu": 5856.0, "metric.claimed_tflops_per_gpu": 339.2}
    rows = read_rows(imported_run("first", **claims), imported_run("second", **claims))
    assert [row["result"] for row in rows] == ["first", "second"]
    assert rows[0]["ms a step"] == "100" and rows[0]["claimed per device"] == "5,856"
    assert rows[0]["claimed TFLOP/s per device"] == "339.2" and "tokens/s" not in rows[0]


def test_a_contradiction_stands_beside_its_figure_and_keeps_it_out_of_the_fastest() -> None:
    wrong = {"tag.contradictions": "first; second", "metric.claimed_tokens_per_s": 32000.0}
    runs = [
        imported_run("wrong", 4000.0, **wrong),
        imported_run("right", 1000.0),
        imported_run("wrong alone", 3000.0, **wrong, **{"param.sequence_length": "2048"}),
    ]
    rows = {row["result"]: row for row in read_rows(*runs)}
    assert rows.keys() == {"right", "wrong alone"}
    assert rows["wrong alone"]["contradictions"] == "first; second"
    assert rows["wrong alone"]["claimed per device"] == "4,000"
    contradictions = read_rows(*runs, title=CONTRADICTIONS)
    assert [(row["result"], row["contradiction"]) for row in contradictions] == [
        (name, text) for name in ("wrong", "wrong alone") for text in ("first", "second")
    ]
    (chart,) = build_imported_charts(pd.DataFrame(runs))
    (figure,) = chart.figures
    assert list(figure.data[0].x) == [1000] and list(figure.data[0].y) == ["8 x H100, right"]


def test_memory_and_notes_are_shown() -> None:
    notes = {
        "metric.peak_memory_gib": 33.69,
        "tag.notes": "one timed step",
        "metric.mfu": 0.305,
        "tag.claims_flops": "x",
    }
    (row,) = read_rows(imported_run("a", 1.0, **notes))
    assert (row["GiB"], row["notes"], row["MFU %"], row["FLOPs"]) == ("33.69", "one timed step", "30.5", "x")


def test_each_kind_of_work_has_a_figure_with_the_claims() -> None:
    runs = [
        imported_run("a", 1000.0, **{"metric.claimed_tokens_per_s_per_gpu": 1010.0}),
        imported_run("b", 2000.0, parent="other", **{"tag.device": "AMD Instinct MI300X"}),
        imported_run("c", 3000.0, parent="c", **{"param.model": None}),
        imported_run("d", 4000.0, parent="d", **{"param.model": None}),
    ]
    (chart,) = build_imported_charts(pd.DataFrame(runs))
    titles = [figure.layout.title.text for figure in chart.figures]
    # Two files that name no model may be of different ones: they share no axis.
    assert titles == [f"{work} 8192 tokens a sequence" for work in ("llama3_8b", "d", "c")]
    first = chart.figures[0]
    assert list(first.data[0].y) == ["8 x MI300X, b", "8 x H100, a"]
    assert list(first.data[1].x) == [1010.0] and list(first.data[1].y) == ["8 x H100, a"]


def test_a_table_of_budgets_is_drawn_for_each_sequence_length() -> None:
    runs = []
    for n, (length, host, device) in enumerate(itertools.product(("512", "1024"), (60, 70), (24, 40, 78))):
        budgets = {"param.sequence_length": length, "param.host_gib": str(host), "param.device_gib": str(device)}
        is_feasible = (host, device) != (60, 24)
        chosen = {"param.chunk_tokens": str(n), "tag.outcome": "complete" if is_feasible else "infeasible"}
        runs.append(imported_run(f"h100 line {n}", 100.0 * n if is_feasible else None, **budgets, **chosen))
    bars, heatmaps = build_imported_charts(pd.DataFrame(runs))
    assert len(bars.figures) == 2 and heatmaps.title == "h100, imported: tokens/s"
    assert [figure.layout.title.text for figure in heatmaps.figures] == [
        "512 tokens a sequence",
        "1024 tokens a sequence",
    ]
    heatmap, crosses = heatmaps.figures[0].data
    assert heatmap.type == "heatmap" and len(heatmap.x) * len(heatmap.y) == 6
    assert (list(crosses.x), list(crosses.y)) == (["60"], ["24"])


def test_a_store_without_imports_has_neither_tables_nor_charts_of_them() -> None:
    assert imported.list_rows(pd.DataFrame()) == [] and list(imported.list_contradictions(pd.DataFrame())) == []
    assert list(build_imported_charts(pd.DataFrame())) == []
