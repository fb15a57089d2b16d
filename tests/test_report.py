"""The report, from a real MLflow store: what is shown, what is compared, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.outcome import Ending, Record
from sweeper.record import Store
from sweeper.report import compare, figures, page, store, summary
from sweeper.report.__main__ import main
from sweeper.report.peaks import Figure, compared, differences, peaks
from tests.conftest import Done

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
        {**parent, "tags": tags, "artifacts": {}},
    )
    for number, (budget, speed) in enumerate(speeds.items()):
        metrics = {"steps": 3.0, "peak_device_gib": 20.0 + number}
        if speed is not None:
            metrics |= {"tokens_per_s": speed, "mfu": speed / 2e4}
            metrics |= {"tokens_per_s_ci_low": speed * (1 - spread), "tokens_per_s_ci_high": speed * (1 + spread)}
        ending = Ending.COMPLETE if speed is not None else Ending.INFEASIBLE
        measurement = {"facts": {}, "matrix_dtype": "bf16"}
        found = Record(
            number=number,
            params={"budget": budget},
            ending=ending,
            reason="" if speed else "3 GiB too little at best",
            detail="",
            metrics=metrics if speed is not None else {},
            measurements=[measurement] if speed is not None else [],
            where={"node": "n1", "gpus": "0"},
            started_at_s=1.0e9 + number,
            ended_at_s=1.0e9 + number + 1,
            elapsed_s=float(number),
        )
        stored.write(found)
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
    found = peaks(stored(folder).trials)
    assert {(p.work["model"], p.device): (p.figure.value, len(p.trials)) for p in found} == {
        ("llama3_8b", "NVIDIA H200"): (11400.0, 4),
        ("llama3_8b", "A & B"): (5000.0, 1),
        ("llama3_1b", "NVIDIA H200"): (56000.0, 1),
    }
    (table,) = [t for t in summary.tables(stored(folder), 2.0) if t.title == "Peaks"]
    best = next(row for row in table.rows if "11,400 tokens/s" in row)
    row = dict(zip(table.heading, best, strict=True))
    assert row["as executed"] == "budget=40" and row["MFU %"] == "57.0" and row["95%"] == "11,286 to 11,514"
    assert row["10^9 tokens a day"] == "0.985" and row["cost of 10^6 tokens"] == "0.0487"


def test_two_sweeps_of_the_same_work_are_compared_by_their_intervals(folder: Path) -> None:
    lines, worse = compare.sweeps(stored(folder), "first", "second", 0.02)
    assert lines == [
        "offload llama3_8b 8192 bf16 tokens_per_s: second on NVIDIA H200 is 1.12 times as fast as first on NVIDIA "
        "H200: 11,400 (11,286 to 11,514) against 10,200 (10,098 to 10,302)"
    ]
    assert not worse and compare.sweeps(stored(folder), "second", "first", 0.02)[1]
    (line,), worse = compare.sweeps(stored(folder), "first", "small", 0.02)
    assert "nothing to compare with (model llama3_8b against llama3_1b)" in line and not worse


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
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=.?https?:[^>]*>", text)
    assert "11,400 tokens/s" in text and "infeasible" in text and "prefers-color-scheme: dark" in text


def test_pictures_need_something_to_draw(folder: Path) -> None:
    names = [picture.title for picture in figures.figures(stored(folder))]
    assert any("Nine views of offload llama3_8b" in name for name in names)
    assert names[-1] == "Which device did what when" and "plotly" not in page.page("t", [], [])


def test_other_formats_and_exit_codes_are_for_programs(folder: Path) -> None:
    plain = json.loads(report(folder, "--format", "json").out)
    assert {row["sweep"]: row["trials"] for row in plain["What ran where"]}["first"] == "2 complete, 1 infeasible"
    assert report(folder, "--format", "csv").out.startswith("workload,model,sequence length,type,device")
    assert "| offload | llama3_8b |" in report(folder, "--format", "markdown", "--sweep", "first").out
    slower = report(folder, "--baseline", "second", "--sweep", "first")
    assert slower.code == 1 and "1.12 times as fast" in slower.out
    assert report(folder, "--baseline", "first", "--sweep", "second").code == 0
    assert report(folder, "--baseline", "second", "--sweep", "first", "--threshold", "0.2").code == 0


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--sweep", "fist"], "did you mean first?"),
        (["--format", "pdf"], "it may be csv, html, json, markdown"),
        (["--dir", "/nowhere"], "there is no such store"),
        (["--compare", "first", "secund"], "did you mean second?"),
        (["ledderboard"], "did you mean leaderboard?"),
    ],
)
def test_what_is_said_wrongly_is_said_in_a_line(folder: Path, words: list[str], wanted: str) -> None:
    done = report(folder, *words)
    assert done.code == 2 and wanted in done.err and len(done.err.splitlines()) == 1
