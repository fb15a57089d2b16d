"""A walk through MLflow's own pages in a real browser, as someone would who has a sweep to review."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
from html import unescape

import pytest

from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.tracking.process import Store
from tests.conftest import Server, wait_for

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.soak, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]
SCORES = {"m=64": 5.0, "m=128": 20.0, "m=256": 10.0}


def page(address: str) -> str:
    """The page once its scripts have run and its requests were answered."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1200", "--virtual-time-budget=20000"]
    command = [str(BROWSER), *words, "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def text(address: str, *wanted: str) -> str:
    """What a reader sees there, as soon as that has all the words that are wanted."""

    def seen() -> str:
        visible = re.sub(r"<(style|script).*?</\1>", "", page(address), flags=re.DOTALL)
        plain = " ".join(unescape(re.sub(r"<[^>]+>", " ", visible)).split())
        return plain if all(word in plain for word in wanted) else ""

    return str(wait_for(seen, timeout_s=120))


@pytest.fixture
def swept(server: Server) -> Store:
    """A sweep of three trials on that server, with its report."""
    tags = {"workload": "matmul", "device": "cpu"}
    parent = {"began": "now", "params": {"sweep.gpus": 1}, "tags": tags, "artifacts": {}}
    store = Store(server.uri, "matmul", "study", "a sweep", parent)
    for number, (name, rate) in enumerate(SCORES.items()):
        params, metrics = {"m": int(name.removeprefix("m="))}, {"tflops": rate, "step_time_ms": 1 / rate}
        store.write(
            TrialRecord(number, params, TrialStatus.COMPLETE, "", "", metrics, [], {"node": "n"}, 1e9, 1e9 + 1, 1.0)
        )
    note = "**matmul on cpu**: 3 complete\n\n| trial | m | rate TFLOP/s |\n|---|---|---|\n| 1 | 128 | 20 |"
    store.close("FINISHED", {"best_tflops": 20.0}, {"mlflow.note.content": note}, {"trials.csv": "trial\n1\n"}, [])
    store.report()
    return store


def test_a_sweep_is_reviewed_in_mlflows_own_pages(server: Server, swept: Store) -> None:
    experiment = f"{server.uri}/#/experiments/{swept.experiment_id}"
    # The address that a sweep prints when it ends: its runs by the objective, the best first.
    for ascending in (False, True):
        by_rate = f"{experiment}/runs?orderByKey=metrics.%60tflops%60&orderByAsc={str(ascending).lower()}"
        shown = text(by_rate, *SCORES, "a sweep", "Sort: tflops", "4 matching runs")
        in_order = sorted(SCORES, key=lambda name: SCORES[name], reverse=not ascending)
        assert sorted(SCORES, key=shown.index) == in_order
    # The parent: its description in Markdown, with the table, and a link to the report.
    run = f"{experiment}/runs/{swept.parent_id}"
    shown = text(run, "matmul on cpu : 3 complete", "trial m rate TFLOP/s 1 128 20", "best_tflops", "Finished")
    assert "Report: report.html , among the artifacts" in shown
    link = wait_for(lambda: re.findall(r'<a [^>]*href="([^"]*report\.html)"', page(run)))[0]
    # Where it leads: the artifacts, and the report shown in the page.
    text(f"{server.uri}/{link}", "trials.csv", "report.html", "MB")
    wait_for(lambda: "mlflow-html-iframe" in page(f"{server.uri}/{link}"))
    # Two trials side by side.
    best = [child.info.run_id for child in swept._runs("trial") if child.data.metrics["tflops"] > 5]
    query = urllib.parse.urlencode({"runs": json.dumps(best), "experiments": json.dumps([swept.experiment_id])})
    assert "m=64" not in text(
        f"{server.uri}/#/compare-runs?{query}", "m=128", "m=256", "tflops", "Parallel Coordinates"
    )
