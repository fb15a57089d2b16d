"""Addresses, filters and paging of the MLflow store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeper.common.errors import UserInputError
from sweeper.tracking import mlflow_store
from tests.conftest import environment


class Page(list[int]):
    """A page of runs, with the token of the next page; an empty one after the last."""

    token = ""


class PagedClient:
    """In the place of an `MlflowClient`: ten runs, numbered from 0."""

    def __init__(self) -> None:
        self.filters: set[str] = set()

    def search_runs(self, experiment_ids: list[str], filter_string: str, max_results: int, page_token: Any) -> Page:
        self.filters.add(filter_string)
        first = int(page_token or 0)
        page = Page(range(10)[first : first + max_results])
        page.token = str(first + max_results) if first + max_results < 10 else ""
        return page


@pytest.mark.parametrize("page_size", [1, 3, 5, 10, 11])
def test_all_pages_of_a_search_are_read(page_size: int) -> None:
    client = PagedClient()
    tags = {mlflow_store.KIND: mlflow_store.TRIAL_KIND, mlflow_store.STUDY: "abc"}
    assert list(mlflow_store.search_runs(client, ["1"], tags, page_size)) == list(range(10))
    assert client.filters == {"tags.`sweeper.kind` = 'trial' and tags.`sweeper.study` = 'abc'"}


def test_the_default_store_is_a_file_in_the_results_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert mlflow_store.default_uri(Path("results")) == f"sqlite:///{tmp_path}/results/mlflow.db"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            "mlflow.db",
            "--store mlflow.db: not the address of an MLflow store. Allowed: http://host:port, or a database",
        ),
        ("http://user:pass@host:port", r"--store http://user:\*\*\*@host:port: not a valid address$"),
        ("sqlite:////no/such/folder/x.db", "--store sqlite:////no/such/folder/x.db: /no/such/folder cannot be written"),
        ("http://127.0.0.1:9", "--store http://127.0.0.1:9: nothing answers there"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_reason(uri: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        mlflow_store.check_uri(uri, "--store ")


def test_addresses_are_known_without_importing_mlflow() -> None:
    code = "import sys, sweeper.tracking.mlflow_view, sweeper.tracking.client; print('mlflow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert result.stdout == "False\n"
