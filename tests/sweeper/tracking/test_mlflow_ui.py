"""MLflow's own pages in a real browser, as a user sees them who reviews a sweep."""

import json
import urllib.parse
from collections.abc import Iterator

import pytest
from mlflow import MlflowClient

from sweeper.commands.report.artifact import log_report
from sweeper.common.trials import Remeasurement
from sweeper.tracking import mlflow_store, mlflow_view
from sweeper.tracking.mlflow_view import RankedTrial
from sweeper.tracking.store import Store
from tests.conftest import Server, wait_for
from tests.support import browser
from tests.support.views import make_view, write_sweep

pytestmark = browser.needs_chromium
RATES = {64: 5.0, 128: 20.0, 256: 10.0}  # by m
VIEW = make_view(
    "tflops",
    "peak_memory_gib",
    ["m", "n"],
    [
        RankedTrial(2, {"final TFLOP per s": 12.5}, "12.1 to 12.9"),
        RankedTrial(1, {"final TFLOP per s": 11.5}, "11 to 12"),
        RankedTrial(0, {}, "4.5 to 5.5"),
    ],
)
ROWS = """[...document.querySelectorAll('.ag-pinned-left-cols-container [row-index]')]
  .sort((a, b) => a.getAttribute('row-index') - b.getAttribute('row-index'))
  .map(row => row.querySelector('a')?.innerText).filter(name => name)"""
# The right edge of a visible text of the table, in pixels of the window, or null.
RIGHT_EDGE = """(text => { const table = document.querySelector('.ag-root').getBoundingClientRect()
  const cell = [...document.querySelectorAll('.ag-cell')].find(cell => cell.innerText.trim() == text)
  return cell ? cell.getBoundingClientRect().right - table.right : null })"""


@pytest.fixture
def finished_sweep(server: Server) -> Store:
    """A sweep of three trials and a round of the finals on that server, with its view and its report."""
    trials = [
        (
            {"m": m, "n": 7},
            {"tflops": rate, "step_time_ms": 1 / rate, "mfu": rate / 100, "peak_memory_gib": float(number)},
        )
        for number, (m, rate) in enumerate(RATES.items())
    ]
    remeasured = Remeasurement(trial=2, round=0, group=(1, 2)), 99.0
    fields = {"started_at_s": 1e9, "ended_at_s": 1e9 + 1, "where": {"node": "n"}}
    store = write_sweep(server.uri, "matmul", "a sweep", VIEW, trials, remeasured, **fields)
    description = "**matmul on cpu**: 3 complete\n\n| trial | m | rate TFLOP/s |\n|---|---|---|\n| 1 | 128 | 20 |"
    tags = {mlflow_store.DESCRIPTION: description}
    store.close("FINISHED", {"best_tflops": 20.0}, tags, {"trials.csv": "trial\n1\n"}, [])
    store.write_view(VIEW)
    log_report(MlflowClient(tracking_uri=server.uri), store.parent_id)
    return store


@pytest.fixture
def tab() -> Iterator[browser.Page]:
    with browser.open_page() as page:
        yield page


def open_text(tab: browser.Page, address: str, *expected: str) -> str:
    """Open an address at 1400 px and return the visible text as soon as it has all that is expected."""
    tab.open(address, width=1400, dark=False)

    def visible_text() -> str:
        text = " ".join(str(tab.evaluate("document.body ? document.body.innerText : ''")).split())
        return text if all(part in text for part in expected) else ""

    return str(wait_for(visible_text, timeout_s=120))


def test_the_link_shows_the_winner_with_its_rate_and_parameters_without_a_scroll(
    server: Server, finished_sweep: Store, tab: browser.Page
) -> None:
    assert mlflow_view.is_known(mlflow_store.read_version(server.uri))
    key = mlflow_view.share_key("study")
    link = server.uri + mlflow_view.runs_page(finished_sweep.experiment_id, "a sweep", key)
    open_text(tab, link, "0002 m=256 n=7", "12.5", "4 matching runs")
    assert tab.evaluate(ROWS) == ["a sweep", "0002 m=256 n=7", "0001 m=128 n=7", "0000 m=64 n=7"]
    headings = tab.evaluate("[...document.querySelectorAll('.ag-header-cell')].map(cell => cell.innerText.trim())")
    assert {"final TFLOP per s", "interval", "m", "MFU percent"} <= set(headings) and "Dataset" not in headings
    for value in ("12.5", "12.1 to 12.9", "256", "7"):
        assert tab.evaluate(f"{RIGHT_EDGE}({json.dumps(value)})") <= 0, value


@pytest.mark.soak
def test_the_views_of_a_sweep_are_found_from_its_experiment(
    server: Server, finished_sweep: Store, tab: browser.Page
) -> None:
    key = mlflow_view.share_key("study")
    link = server.uri + mlflow_view.runs_page(finished_sweep.experiment_id, "a sweep", key)
    charts = open_text(tab, f"{link}{mlflow_view.AS_CHARTS}", "Sweep (5)", "trial vs. tflops", "n vs. tflops")
    assert "peak_memory_gib vs. tflops" in charts and "GenAI" in charts and "Judges" not in charts
    # From the experiment's own page: its description has the sweep's view.
    plain = f"{server.uri}/#/experiments/{finished_sweep.experiment_id}/runs?{mlflow_view.MACHINE_LEARNING}"
    open_text(tab, plain, "Sweeps: a sweep (charts)")
    href = tab.evaluate("[...document.querySelectorAll('a')].find(a => a.innerText == 'charts').getAttribute('href')")
    assert f"/{href}" == f"{mlflow_view.runs_page(finished_sweep.experiment_id, 'a sweep', key)}{mlflow_view.AS_CHARTS}"
    # Where MLflow is of another version: all runs, the winner first, and a round that was faster does not outrank it.
    open_text(tab, server.uri + mlflow_view.runs_page(finished_sweep.experiment_id, "a sweep", ""), "5 matching runs")
    assert tab.evaluate(ROWS)[:2] == ["a sweep", "0002 m=256 n=7"]


@pytest.mark.soak
def test_a_sweep_can_be_reviewed_in_mlflows_own_pages(server: Server, finished_sweep: Store, tab: browser.Page) -> None:
    # The parent: its description in Markdown, with the table, and a link to the report.
    experiment = f"{server.uri}/#/experiments/{finished_sweep.experiment_id}"
    run = f"{experiment}/runs/{finished_sweep.parent_id}"
    table = "trial m rate TFLOP/s 1 128 20"
    open_text(tab, run, "matmul on cpu: 3 complete", table, "best_tflops", "Finished", "Report: report.html")
    link = tab.evaluate("document.querySelector('a[href$=\"report.html\"]').getAttribute('href')")
    # Behind the link: the artifacts, and the report shown in the page.
    open_text(tab, f"{server.uri}/{link}", "trials.csv", "report.html", "MB")
    wait_for(lambda: tab.evaluate("document.querySelector('.mlflow-html-iframe') !== null"))
    # Two trials side by side.
    kind = {mlflow_store.KIND: mlflow_store.TRIAL_KIND}
    trials = mlflow_store.search_runs(finished_sweep._client, [finished_sweep.experiment_id], kind)
    best = [trial.info.run_id for trial in trials if trial.data.metrics["tflops"] in (10, 20)]
    query = urllib.parse.urlencode(
        {"runs": json.dumps(best), "experiments": json.dumps([finished_sweep.experiment_id])}
    )
    comparison = f"{server.uri}/#/compare-runs?{query}"
    assert "m=64" not in open_text(tab, comparison, "m=128", "m=256", "tflops", "Parallel Coordinates")
