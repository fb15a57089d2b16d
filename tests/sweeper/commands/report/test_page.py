"""Tests of the report in a real browser: on a phone in dark mode and on a wide screen, without a network."""

import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from sweeper.commands.report import charts, report_tables
from sweeper.pages import html_page
from sweeper.results.mlflow_results import Stored
from tests.support import browser
from tests.support.factories import complete_trials

PRINTED_PX = 690 + 1  # the width of A4 and of Letter between the margins
# For each figure the number of its paths, by how many pixels its drawing is wider than its frame, and its background.
FIGURES = """[...document.querySelectorAll('.figure')].map(figure => {
  const drawing = figure.querySelector('.main-svg'), width = element => element.getBoundingClientRect().width
  return [figure.querySelectorAll('.main-svg path').length, width(drawing) - width(figure),
    getComputedStyle(drawing).backgroundColor] })"""
WIDEST_CELL = "Math.max(...[...document.querySelectorAll('th, td')].map(cell => cell.getBoundingClientRect().right))"
WIDEST_PLOT = "Math.max(...[...document.querySelectorAll('.main-svg')].map(plot => plot.getBoundingClientRect().width))"
# The speed column of the visible rows of the first table, the best results.
TABLE = "const table = document.querySelector('table'), headings = [...table.tHead.rows[0].cells],"
TABLE += " column = headings.findIndex(heading => heading.textContent == 'speed');"
SPEEDS = f"(() => {{ {TABLE} return [...table.tBodies[0].rows].filter(row => !row.hidden)"
SPEEDS += ".map(row => row.cells[column].textContent) })()"
SORT = f"(() => {{ {TABLE} headings[column].click() }})()"
FILTER = """(() => { const field = document.querySelector('section').querySelector('input')
  field.value = '8 X h200'; field.dispatchEvent(new Event('input')) })()"""


@pytest.fixture
def report_path(tmp_path: Path) -> Path:
    """Return the report on three sweeps of the same work, with nearly every kind of chart."""
    start = pd.Timestamp("2026-11-21", tz="UTC")
    parts = []
    for count in (1, 2, 8):
        trials = complete_trials({"H200": [1000.0 * count] * 12}, devices=count, m=range(12), n=[1, 2] * 6)
        parts.append(trials.assign(**{"tag.sweep": f"on {count}", "tag.sweeper.study": str(count)}))
    rows = pd.concat(parts, ignore_index=True)
    rows = rows.assign(**{"tag.sweeper.trial": "0", "tag.node": "n", "run": "r", "start": start, "end": start})
    sweeps = rows.drop_duplicates("tag.sweep").assign(status="FINISHED")
    stored = Stored(sweeps, rows)
    path = tmp_path / "report.html"
    tables = report_tables.build_tables(stored, None)
    path.write_text(html_page.build_page("sweeper: results", [*tables, *charts.build_charts(stored)]))
    return path


@pytest.mark.soak
@browser.needs_chromium
def test_the_report_fits_any_screen_and_any_paper_and_needs_no_network(report_path: Path, tmp_path: Path) -> None:
    with browser.open_page() as tab:
        for width, dark in ((1400, False), (1024, True), (390, True)):
            tab.open(report_path.as_uri(), width=width, dark=dark)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate(WIDEST_CELL) <= width  # no cell has to be scrolled into view
            # Charts with many axes scroll on a phone, and say so.
            assert (tab.evaluate("document.querySelectorAll('.wider > .figure').length") > 0) == (width == 390)
            background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
            figures = tab.evaluate(FIGURES)
            assert len(figures) > 10 and all(paths > 3 and excess <= 0 for paths, excess, _ in figures), figures
            assert {color for _, _, color in figures} == {background}
        check_printing(tab, tmp_path)
        ascending = ["1,000 tokens/s", "2,000 tokens/s", "8,000 tokens/s"]
        for speeds in (ascending[::-1], ascending):
            tab.evaluate(SORT)
            assert tab.evaluate(SPEEDS) == speeds
        tab.evaluate(FILTER)
        assert tab.evaluate(SPEEDS) == ["8,000 tokens/s"]
        assert not tab.errors
        assert all(url.startswith(("file:", "data:", "blob:")) for url in tab.requests), tab.requests


def check_printing(tab: browser.Page, folder: Path) -> None:
    """Check what a page on a dark screen prints: all of it, in black on white, and the screen is as before."""
    before = tab.evaluate(FIGURES)
    tab.evaluate("setPrinting(true)")
    assert tab.evaluate(WIDEST_CELL) <= PRINTED_PX and tab.evaluate(WIDEST_PLOT) <= PRINTED_PX
    assert {color for _, _, color in tab.evaluate(FIGURES)} == {"rgb(255, 255, 255)"}
    tab.evaluate("setPrinting(false)")
    assert tab.evaluate(FIGURES) == before
    for name, (width_in, height_in) in {"letter": (8.5, 11), "a4": (8.27, 11.69)}.items():
        path = folder / f"{name}.pdf"
        tab.print_pdf(path, width_in=width_in, height_in=height_in)
        if shutil.which("pdftotext"):
            text = subprocess.run(["pdftotext", "-raw", path, "-"], capture_output=True, text=True, check=True).stdout
            words = " ".join(text.split())
            assert "8,000 tokens/s" in words and "m=0 n=1" in words and "Timeline of the devices" in words


def test_a_table_without_a_browser_has_every_heading_and_cell() -> None:
    rows = [["1,000", "<long> text, of a cell"], ["9.5%", "3.12"], ["", "x"]]
    html = html_page.build_page("t", [html_page.Table("T", ["a", "b"], rows)], "Three.")
    assert '<p class="overview">Three.</p>' in html and '<th class=number title="sort">a</th>' in html
    assert "<td class=number>1,000</td>" in html and "<td class=number>9.5%</td><td>3.12</td>" in html
    assert "<td class=text>&lt;long&gt; text, of a cell</td>" in html and html.count("<th ") == 2
    assert "@media print" in html and "prefers-color-scheme: dark" in html
