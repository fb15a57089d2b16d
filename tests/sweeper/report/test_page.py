"""The report in a real browser: on a phone by night and on a wide screen by day, without a network."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from sweeper.report import charts, page, summary
from sweeper.report.store import Stored
from tests.support import browser
from tests.support.factories import complete_trials as trials

# Of each figure: how much is drawn in it, and how much wider it is than its frame.
FIGURES = """[...document.querySelectorAll('.figure')].map(figure => {
  const drawn = figure.querySelector('.main-svg'), width = each => each.getBoundingClientRect().width
  return [figure.querySelectorAll('.main-svg path').length, width(drawn) - width(figure)] })"""
# The column of speeds in the rows of the second table, the peaks, that are to be seen.
PEAKS = "const table = document.querySelectorAll('table')[1], heads = [...table.tHead.rows[0].cells],"
PEAKS += " column = heads.findIndex(head => head.textContent == 'speed');"
SPEEDS = f"(() => {{ {PEAKS} return [...table.tBodies[0].rows].filter(row => !row.hidden)"
SPEEDS += ".map(row => row.cells[column].textContent) })()"
SORT = f"(() => {{ {PEAKS} heads[column].click() }})()"
FILTER = """(() => { const field = document.querySelectorAll('section')[1].querySelector('input')
  field.value = '8 X h200'; field.dispatchEvent(new Event('input')) })()"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The report on three sweeps of the same work, with a picture of nearly every kind."""
    start, parts = pd.Timestamp("2026-11-21", tz="UTC"), []
    for count in (1, 2, 8):
        own = trials({"H200": [1000.0 * count] * 12}, devices=count, m=range(12), n=[1, 2] * 6)
        parts.append(own.assign(**{"tag.sweep": f"on {count}", "tag.sweeper.study": str(count)}))
    rows = pd.concat(parts, ignore_index=True)
    rows = rows.assign(**{"tag.sweeper.trial": "0", "tag.node": "n", "run": "r", "start": start, "end": start})
    sweeps = rows.drop_duplicates("tag.sweep").assign(status="FINISHED")
    stored = Stored(sweeps, rows)
    path = tmp_path / "report.html"
    path.write_text(page.page("sweeper: results", summary.tables(stored, None), list(charts.figures(stored))))
    return path


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium")
def test_a_report_is_read_on_any_screen_without_a_network(written: Path) -> None:
    with browser.opened() as seen:
        for width, dark in ((1600, False), (390, True)):
            seen.open(written.as_uri(), width=width, dark=dark)
            assert seen.ask("document.documentElement.scrollWidth") <= width  # tables scroll in themselves
            paper = seen.ask("getComputedStyle(document.body).backgroundColor")
            assert paper == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
            drawn = seen.ask(FIGURES)
            assert len(drawn) > 10 and all(paths > 3 and wider <= 0 for paths, wider in drawn), drawn
        upwards = ["1,000 tokens/s", "2,000 tokens/s", "8,000 tokens/s"]
        for wanted in (upwards[::-1], upwards):
            seen.ask(SORT)
            assert seen.ask(SPEEDS) == wanted
        seen.ask(FILTER)
        assert seen.ask(SPEEDS) == ["8,000 tokens/s"]
        assert not seen.errors
        assert all(asked.startswith(("file:", "data:", "blob:")) for asked in seen.requests), seen.requests
