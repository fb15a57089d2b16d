"""Parameters, logs, devices and file names that hold scripts, formulas, escapes of terminals and long texts."""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from sweeper.common.format import printable, short_value, shorten, spreadsheet_cell
from sweeper.pages import trial_tables
from sweeper.pages.terminal import draw
from tests.conftest import CommandResult, Workspace, environment
from tests.support import browser
from tests.support.imports import tprimat_benchmark

HOSTILE = [
    "<script>window.run = 1</script>",
    "\"'><img src=x onerror='window.run = 1'>",
    "javascript:window.run=1",
    "<a href='http://evil.invalid/'>here</a>",
    "</script><script>window.run = 1</script>",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "@SUM(A1)",
    "-2+3",
    "\x1b[31mred\x1b]0;title\x07",
    "two\nlines\tand a tab",
    "\u202eoverride",
    "\u2028separator",
    "[red]markup[/red] [/] :smile:",
    "a | b | c",
    "$x_{$ \\frac",
    "%s %n {x} ${y}",
    "A" * 5000,
    "\u4e2d\u6587 \U0001f600",
]
PROGRAM = """
import sys
value = sys.argv[1]
print(value, flush=True)
for step in range(4):
    if step == 2 and value.startswith(("<script", "=", chr(27), "A")):
        raise RuntimeError(value)
    print("took 0.01", flush=True)
"""
# What is left of the page's structure, and what has run.
STATE = """[window.run === undefined,
  document.querySelectorAll('img[src=x], a[href*=evil], a[href^=javascript]').length,
  [...document.querySelectorAll('table')].every(table =>
    [...table.rows].every(row => row.cells.length == table.rows[0].cells.length))]"""


def test_a_terminal_gets_no_character_that_it_would_obey() -> None:
    for value in HOSTILE:
        shown = short_value(value)
        assert all(character.isprintable() for character in shown), shown
    assert printable("a\nb\x1b[2J\u202e") == "a\nb\\x1b[2J\\u202e" and shorten("abcdefghij", 7) == "abcd…ij"


def test_a_table_on_the_terminal_keeps_its_shape() -> None:
    heading, cells = (
        ["trial", "x", "step ms"],
        [[str(n), short_value(value), "12.5"] for n, value in enumerate(HOSTILE)],
    )
    text = io.StringIO()
    console = Console(file=text, width=100, markup=False, emoji=False)
    console.print(draw(heading, cells, 3, 100))
    lines = text.getvalue().splitlines()
    assert len(lines) == 3 + len(HOSTILE) + 1 and all(line.rstrip().endswith("12.5") for line in lines[3:-1]), lines
    assert "[red]markup[/red] [/] :smile:" in text.getvalue()


def test_a_spreadsheet_finds_no_formula_and_a_program_finds_numbers() -> None:
    rows = [{"n": value, "=name": -1.5} for value in (*HOSTILE, "-1", "+2.5e-3", "-inf", "-", "1,024")]
    read = list(csv.reader(io.StringIO(trial_tables.csv_of(rows))))
    assert len(read) == 1 + len(rows) and {len(row) for row in read} == {2}
    for row in read:
        for cell in row:
            assert not cell.startswith(("=", "@")) and spreadsheet_cell(cell) == cell
    assert [row[0] for row in read[-5:]] == ["-1", "+2.5e-3", "-inf", "'-", "1,024"] and read[1][1] == "-1.5"


def test_a_table_in_markdown_keeps_its_cells() -> None:
    text = trial_tables.markdown_of(["a", "b"], [[value, "1"] for value in HOSTILE])
    lines = text.splitlines()
    assert len(lines) == 2 + len(HOSTILE)
    for line in lines:
        assert line.replace("\\\\", "").replace("\\|", "").count("|") == 3, line
        assert "<" not in line.replace("\\<", "")


def test_numbers_are_on_the_right_of_a_column_in_markdown_and_texts_on_the_left() -> None:
    rows = [["bf16", "1,024", "-3.5%", "12", "600 TFLOP/s"], ["fp8", "—", "", "x", "7 s"]]
    assert trial_tables.markdown_of(list("abcde"), rows).splitlines()[1] == "| --- | ---: | ---: | --- | --- |"
    assert trial_tables.markdown_of(["a"], []).splitlines() == ["| a |", "| --- |"]


def test_a_plan_shows_values_as_they_are(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("workload=command", "command.run=[x,'{y}']", "space.y=\"'[/] [red] \x1b[31m'\"", "plan=true")
    assert result.code == 0 and "y=[/] [red] \\x1b[31m" in result.out, result.out + result.err
    assert "\x1b" not in result.out + result.err


def test_an_error_shows_no_escape(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("workload=\x1b]0;title\x07", "plan=true")
    assert result.code == 2 and "\\x1b]0;title\\x07" in result.err and "\x1b" not in result.err


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, CommandResult]:
    """A sweep over hostile values, and imports of files with hostile names and contents."""
    workspace = Workspace(tmp_path_factory.mktemp("hostile"))
    (workspace.path / "program.py").write_text(PROGRAM)
    folder = workspace.path / "conf" / "workload"
    folder.mkdir(parents=True)
    config = {
        "workload": {"name": "command", "objective": "step_time_ms", "direction": "minimize"},
        "command": {"run": ["{python}", "program.py", "{x}", "{y}"], "log": {"step_time_s": "took ([0-9.]+)"}},
        "space": {"x": [value.replace("${", "\\${") for value in HOSTILE], "y": ["=2", "<b onclick=alert(1)>"]},
        "budget": {"same_failures": None, "trials": 200},
    }
    config["command"] |= {"warmup": 1, "steps": 3}
    (folder / "own.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(config)}")
    arguments = ["--config-dir=conf", "workload=own", "search=grid", "hardware=cpu", "finals.top=0"]
    result = workspace.run(*arguments, "cluster.max_concurrent_trials=2", timeout_s=900)
    for number, value in enumerate(HOSTILE):
        content = tprimat_benchmark(gpu_info={"device_name": value, "pytorch_version": value, "device_count": 8})
        content["parallelism_config"] |= {"strategy_name": value}
        name = value.replace("/", "_")[:100].replace("\0", "")
        (workspace.path / f"{name}.json").write_text(json.dumps(content | {"n": number}))
    files = sorted(str(path) for path in workspace.path.glob("*.json"))
    command = [sys.executable, "-m", "sweeper", "ingest", *files]
    imported = subprocess.run(command, cwd=workspace.path, env=environment(), capture_output=True, text=True)
    assert imported.returncode == 0 and "\x1b" not in imported.stdout, imported.stdout + imported.stderr
    return workspace, result


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_sweep_over_hostile_values_keeps_its_records(swept: tuple[Workspace, CommandResult]) -> None:
    workspace, result = swept
    count = 2 * len(HOSTILE)
    assert result.code == 1 and f"{count - 8} complete, 8 failed" in result.out, result.out + result.err
    assert "\x1b" not in result.out + result.err
    assert "Warning" not in result.err and "Traceback" not in result.out + result.err
    (sweep,) = workspace.sweeps
    with (sweep / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == count and not [row for row in rows for cell in row.values() if spreadsheet_cell(cell) != cell]
    assert {row["param.x"].removeprefix("'") for row in rows} == set(HOSTILE)
    assert {run.data.params["x"] for run in workspace.runs("trial")} == {value[:500] for value in HOSTILE}


@pytest.mark.soak
@pytest.mark.timeout(1200)
@browser.needs_chromium
def test_no_page_runs_a_script_of_a_value(swept: tuple[Workspace, CommandResult]) -> None:
    workspace, _ = swept
    command = [sys.executable, "-m", "sweeper", "report", "out=all.html"]
    made = subprocess.run(command, cwd=workspace.path, env=environment(), capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    pages = [workspace.path / "all.html", *workspace.path.rglob("report.html"), *workspace.path.rglob("plots.html")]
    assert {page.name for page in pages} == {"all.html", "report.html", "plots.html"}
    with browser.open_page() as tab:
        for page in pages:
            tab.open(Path(page).as_uri(), width=1400, dark=False)
            assert tab.evaluate(STATE) == [True, 0, True], page
            assert tab.evaluate("document.querySelectorAll('.main-svg path').length") > 10, page
            assert not tab.errors, (page, tab.errors)
            assert all(url.startswith(("file:", "data:", "blob:")) for url in tab.requests), tab.requests
