"""MLflow's own pages in a real browser, as a user sees them who reviews a sweep."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
from html import unescape

import pytest
from mlflow import MlflowClient

from sweeper.report.artifact import log_report
from sweeper.tracking import mlflow_store
from sweeper.tracking.store import Store
from tests.conftest import Server, wait_for
from tests.support.factories import trial_record

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.soak, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]
RATES = {"m=64": 5.0, "m=128": 20.0, "m=256": 10.0}


def load_page(address: str) -> str:
    """Return the page's DOM once its scripts have run and its requests were answered."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1200", "--virtual-time-budget=20000"]
    command = [str(BROWSER), *options, "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def load_text(address: str, *expected: str) -> str:
    """Return the visible text of the page as soon as it has all that is expected."""

    def visible_text() -> str:
        visible = re.sub(r"<(style|script).*?</\1>", "", load_page(address), flags=re.DOTALL)
        plain = " ".join(unescape(re.sub(r"<[^>]+>", " ", visible)).split())
        return plain if all(text in plain for text in expected) else ""

    return str(wait_for(visible_text, timeout_s=120))


@pytest.fixture
def finished_sweep(server: Server) -> Store:
    """A sweep of three trials on that server, with its report."""
    tags = {"workload": "matmul", "device": "cpu"}
    parent = {"started_at": "now", "params": {"sweep.gpus": 1}, "tags": tags, "artifacts": {}}
    store = Store(server.uri, "matmul", "study", "a sweep", parent)
    for number, (name, rate) in enumerate(RATES.items()):
        metrics = {"tflops": rate, "step_time_ms": 1 / rate}
        params = {"m": int(name.removeprefix("m="))}
        times_s = {"started_at_s": 1e9, "ended_at_s": 1e9 + 1}
        store.write_trial(trial_record(number, params, metrics=metrics, where={"node": "n"}, **times_s))
    description = "**matmul on cpu**: 3 complete\n\n| trial | m | rate TFLOP/s |\n|---|---|---|\n| 1 | 128 | 20 |"
    tags = {mlflow_store.DESCRIPTION: description}
    store.close("FINISHED", {"best_tflops": 20.0}, tags, {"trials.csv": "trial\n1\n"}, [])
    log_report(MlflowClient(tracking_uri=server.uri), store.parent_id)
    return store


def test_a_sweep_can_be_reviewed_in_mlflows_own_pages(server: Server, finished_sweep: Store) -> None:
    experiment = f"{server.uri}/#/experiments/{finished_sweep.experiment_id}"
    # The address that a sweep prints when it ends: its runs by the objective, the best first.
    for ascending in (False, True):
        by_rate = f"{experiment}/runs?orderByKey=metrics.%60tflops%60&orderByAsc={str(ascending).lower()}"
        runs_text = load_text(by_rate, *RATES, "a sweep", "Sort: tflops", "4 matching runs")
        in_order = sorted(RATES, key=lambda name: RATES[name], reverse=not ascending)
        assert sorted(RATES, key=runs_text.index) == in_order
    # The parent: its description in Markdown, with the table, and a link to the report.
    run = f"{experiment}/runs/{finished_sweep.parent_id}"
    table = "trial m rate TFLOP/s 1 128 20"
    parent_text = load_text(run, "matmul on cpu : 3 complete", table, "best_tflops", "Finished")
    assert "Report: report.html , among the artifacts" in parent_text
    link = wait_for(lambda: re.findall(r'<a [^>]*href="([^"]*report\.html)"', load_page(run)))[0]
    # Behind the link: the artifacts, and the report shown in the page.
    load_text(f"{server.uri}/{link}", "trials.csv", "report.html", "MB")
    wait_for(lambda: "mlflow-html-iframe" in load_page(f"{server.uri}/{link}"))
    # Two trials side by side.
    trials = finished_sweep._search_runs(mlflow_store.TRIAL_KIND)
    best = [trial.info.run_id for trial in trials if trial.data.metrics["tflops"] > 5]
    query = urllib.parse.urlencode(
        {"runs": json.dumps(best), "experiments": json.dumps([finished_sweep.experiment_id])}
    )
    comparison = f"{server.uri}/#/compare-runs?{query}"
    assert "m=64" not in load_text(comparison, "m=128", "m=256", "tflops", "Parallel Coordinates")
