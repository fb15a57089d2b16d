"""The documentation builds into a site that opens offline, without a dead link or anchor."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment
from tests.support.browser import needs_chromium, open_page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment() | quiet, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_has_no_dead_link_or_anchor_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    loaded = ('src="http', 'rel="stylesheet" href="http', 'rel="preconnect"')
    assert not [page for page in pages if any(text in page.read_text() for text in loaded)]


def test_results_that_pages_refer_to_are_part_of_the_site(site: Path) -> None:
    assert "benchmarks/results/coverage.html" in (site / "concepts/intervals.html").read_text()
    assert (site / "benchmarks/results/coverage.html").exists()


@needs_chromium
def test_the_search_finds_a_page_that_is_opened_from_disk(site: Path) -> None:
    count = "document.querySelectorAll('.md-search-result__item').length"
    wait = f"new Promise(done => {{ const wait = () => {count} ? done({count}) : setTimeout(wait, 50); wait() }})"
    with open_page() as page:
        page.open(f"{(site / 'index.html').as_uri()}?q=calibrate", width=1400, dark=False)
        assert page.evaluate(wait) > 1
        assert not page.errors and {request.partition(":")[0] for request in page.requests} <= {"file", "data"}
