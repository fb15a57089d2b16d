"""`python -m sweeper history` on a real MLflow store and as a user has it: append, compare, list and plot."""

import re
from pathlib import Path

import pytest

from sweeper.commands.history import picture, reference_file
from sweeper.tracking.process import Store
from tests.support import browser
from tests.support.factories import run_report, trial_record
from tests.support.histories import build_history, new_run, run_track

VALUES = [659.0, 661.0, 658.0, 660.0, 659.5, 648.0, 660.5]
MEASURED = {"machine_info": {}, "matrix_dtype": "bf16"}
FIGURE = "document.querySelectorAll('.figure .main-svg .point').length"


def write_sweep(folder: Path, name: str, speed: float, status: str = "FINISHED", space: str = "choice(…)") -> None:
    """Write a sweep of one trial with an interval of 0.2% to each side."""
    tags = {"workload": "matmul", "device": "NVIDIA H200", "driver": "570.124", "version.torch": "2.11\n2.12"}
    tags["space.m"] = space
    parent = {"params": {"sweep.gpus": 1}, "started_at": name, "tags": tags, "artifacts": {}}
    store = Store(f"sqlite:///{folder}/mlflow.db", "matmul", f"study of {name}", name, parent)
    metrics = {"tflops": speed, "tflops_ci_low": 0.998 * speed, "tflops_ci_high": 1.002 * speed}
    work = {"workload": "matmul", "type": "bf16", "m": "searched"}
    store.write_trial(trial_record(0, {"m": 4096}, metrics=metrics, measurements=[MEASURED], work=work))
    store.close(status, {}, {}, {}, [])


def test_sweeps_are_appended_and_later_ones_are_compared(tmp_path: Path) -> None:
    for name, speed in {"monday": 660.0, "tuesday": 658.0, "slow": 560.0}.items():
        write_sweep(tmp_path, name, speed)
    appended = run_track(tmp_path, "append", "monday")
    assert (
        appended.code == 0
        and appended.out == "monday: 660 TFLOP/s on NVIDIA H200, 1 run at its level\nperformance.json\n"
    )
    (run,) = reference_file.read(tmp_path / "performance.json").series[0].runs
    assert run.versions == {"driver": "570.124", "torch": "2.11, 2.12"} and (run.low, run.high) == (658.68, 661.32)
    slower = run_track(tmp_path, "junit=junit.xml", "markdown=summary.md")  # the last sweep
    assert slower.code == 1 and "matmul bf16 tflops on NVIDIA H200: slower, -15.2%" in slower.out
    assert "<failure" in (tmp_path / "junit.xml").read_text() and "**slower**" in (tmp_path / "summary.md").read_text()
    unclear = run_track(tmp_path, "compare", "tuesday")
    assert unclear.code == 3 and "5 more runs and 5 more of the earlier work needed" in unclear.out
    assert run_track(tmp_path, "tuesday", "between_runs=0.5%").code == 0
    unknown = run_track(tmp_path, "tusday")
    assert unknown.code == 2 and "tusday: unknown sweep" in unknown.err and "Did you mean tuesday?" in unknown.err
    assert "Did you mean append?" in run_track(tmp_path, "apend").err


def test_sweeps_of_unlike_spaces_are_not_compared(tmp_path: Path) -> None:
    for name, space in {"small": "range(64, 512)", "same": "range(64, 512)", "large": "range(64, 8192)"}.items():
        write_sweep(tmp_path, name, 660.0, space=space)
    assert run_track(tmp_path, "append", "small").code == 0
    both = run_track(tmp_path, "compare", "same", "large", "between_runs=0.1%")
    assert both.code == 0 and "not compared: not in the history: m range(64, 8192) against range(64, 512)" in both.out
    alone = run_track(tmp_path, "compare", "large")
    assert alone.code == 2 and "m range(64, 8192) against range(64, 512)" in alone.err


def write_losses(folder: Path, name: str, losses: list[float]) -> None:
    """Write a sweep that minimizes the loss: the last learning rate is the fastest."""
    tags = {"workload": "command", "device": "NVIDIA H200", "objectives": '{"loss": "minimize"}'}
    parent = {"params": {"sweep.gpus": 1}, "started_at": name, "tags": tags, "artifacts": {}}
    store = Store(f"sqlite:///{folder}/mlflow.db", "command", f"study of {name}", name, parent)
    for number, loss in enumerate(losses):
        bounds = {"loss_ci_low": 0.999 * loss, "loss_ci_high": 1.001 * loss} if loss > 0 else {}
        metrics = {"tokens_per_s": 1000.0 + number, "loss": loss, **bounds}
        work = {"workload": "command"}
        store.write_trial(trial_record(number, {"lr": number}, metrics=metrics, measurements=[MEASURED], work=work))
    store.close("FINISHED", {}, {}, {}, [])


def test_sweeps_of_a_loss_are_compared_by_their_lowest_losses(tmp_path: Path) -> None:
    for name, losses in {"monday": [2.0, 2.5], "worse": [2.2, 2.6], "negative": [-1.0]}.items():
        write_losses(tmp_path, name, losses)
    appended = run_track(tmp_path, "append", "monday")
    assert appended.out.startswith("monday: 2 loss on NVIDIA H200, 1 run at its level")
    (series,) = reference_file.read(tmp_path / "performance.json").series
    assert (series.identity.metric, series.identity.direction, series.runs[0].point) == (
        "loss",
        "minimize",
        {"lr": "0"},
    )
    worse = run_track(tmp_path, "worse")
    assert worse.code == 1 and "command loss on NVIDIA H200: worse, +10.0%" in worse.out
    assert worse.out.rstrip().endswith("verdict: worse, at a threshold of 0.02")
    assert "worse: worse than the runs before (+10.0%)" in run_track(tmp_path, "append", "worse").err
    refused = run_track(tmp_path, "append", "negative")
    assert refused.code == 2 and "negative: loss is -1. A history compares only values above 0" in refused.err
    compared = run_report(tmp_path, "compare", "monday", "negative")
    assert compared.code == 2 and "not compared: 2 (1.998 to 2.002) and -1: only values above 0 have" in compared.out
    compared = run_report(tmp_path, "compare", "worse", "monday")
    assert "command loss on NVIDIA H200: better, -9.1%" in compared.out and "from one trial each" in compared.out


def test_a_narrow_terminal_keeps_the_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_file.write(tmp_path / "performance.json", build_history(VALUES))
    assert re.search(r"matmul bf16 tflops +NVIDIA H200 +658 +TFLOP/s +7 +0.69", run_track(tmp_path, "list").out)
    monkeypatch.setattr("sweeper.pages.terminal.terminal_width", lambda: 40)
    narrow = run_track(tmp_path, "list").out
    table, hidden, _ = narrow.partition("hidden, too narrow: ")
    assert hidden and "658" in table and all(len(line) <= 40 for line in table.splitlines())


def test_a_page_is_written_to_the_given_file(tmp_path: Path) -> None:
    reference_file.write(tmp_path / "performance.json", build_history(VALUES))
    assert run_track(tmp_path, "plot", "out=h.html").out == "h.html\n"
    written = (tmp_path / "h.html").read_text()
    assert written.startswith("<!doctype html>") and "1: torch 2.11.0 to 2.12.0 (2026-01-03)" in written


@browser.needs_chromium
def test_the_page_fits_any_screen_and_needs_no_network(tmp_path: Path) -> None:
    longer = build_history(VALUES).append(new_run(1.0).identity, new_run(1.0).run)
    path = tmp_path / "performance.html"
    path.write_text(picture.build_page(longer, "performance.json"))
    with browser.open_page() as tab:
        for width, dark in ((1400, False), (390, True)):
            tab.open(path.as_uri(), width=width, dark=dark)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate(FIGURE) >= len(VALUES)
        assert not tab.errors and all(url.startswith(("file:", "data:", "blob:")) for url in tab.requests)
