"""Tests of the report in a real browser: on a phone in dark mode and on a wide screen, without a network."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from sweeper.report import charts, page, summary
from sweeper.report.store import Stored
from tests.support import browser
from tests.support.factories import complete_trials

# For each figure the number of its paths, and by how many pixels its drawing is wider than its frame.
FIGURES = """[...document.querySelectorAll('.figure')].map(figure => {
  const drawing = figure.querySelector('.main-svg'), width = element => element.getBoundingClientRect().width
  return [figure.querySelectorAll('.main-svg path').length, width(drawing) - width(figure)] })"""
# The speed column of the visible rows of the second table, the best results.
TABLE = "const table = document.querySelectorAll('table')[1], headings = [...table.tHead.rows[0].cells],"
TABLE += " column = headings.findIndex(heading => heading.textContent == 'speed');"
SPEEDS = f"(() => {{ {TABLE} return [...table.tBodies[0].rows].filter(row => !row.hidden)"
SPEEDS += ".map(row => row.cells[column].textContent) })()"
SORT = f"(() => {{ {TABLE} headings[column].click() }})()"
FILTER = """(() => { const field = document.querySelectorAll('section')[1].querySelector('input')
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
    tables = summary.build_tables(stored, None)
    path.write_text(page.build_page("sweeper: results", tables, list(charts.build_charts(stored))))
    return path


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium")
def test_the_report_fits_any_screen_and_needs_no_network(report_path: Path) -> None:
    with browser.open_page() as tab:
        for width, dark in ((1600, False), (390, True)):
            tab.open(report_path.as_uri(), width=width, dark=dark)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll in themselves
            background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
            figures = tab.evaluate(FIGURES)
            assert len(figures) > 10 and all(paths > 3 and excess <= 0 for paths, excess in figures), figures
        ascending = ["1,000 tokens/s", "2,000 tokens/s", "8,000 tokens/s"]
        for speeds in (ascending[::-1], ascending):
            tab.evaluate(SORT)
            assert tab.evaluate(SPEEDS) == speeds
        tab.evaluate(FILTER)
        assert tab.evaluate(SPEEDS) == ["8,000 tokens/s"]
        assert not tab.errors
        assert all(url.startswith(("file:", "data:", "blob:")) for url in tab.requests), tab.requests
