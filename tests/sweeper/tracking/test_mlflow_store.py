"""Addresses, filters and paging of the MLflow store."""

import base64
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sweeper.tracking import mlflow_store
from tests.conftest import environment
from workloads.api.errors import UserInputError


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
            "tracking.uri=mlflow.db: not the address of an MLflow store. Allowed: http://host:port, or a database",
        ),
        ("http://user:pass@host:port", r"tracking.uri=http://user:\*\*\*@host:port: not a valid address$"),
        ("sqlite:////no/such/folder/x.db", "tracking.uri=sqlite:.*/x.db: /no/such/folder cannot be written"),
        ("http://127.0.0.1:9", "tracking.uri=http://127.0.0.1:9: nothing responds there"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_reason(uri: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        mlflow_store.check_uri(uri)


class AuthenticatedServer(BaseHTTPRequestHandler):
    """As MLflow's server with its basic authentication: /health is open, other pages are for alice and a token."""

    allowed = ("Basic " + base64.b64encode(b"alice:wonder").decode(), "Bearer of-alice")

    def do_GET(self) -> None:
        is_allowed = self.path == "/health" or self.headers.get("Authorization") in self.allowed
        self.send_response(200 if is_allowed else 401)
        self.end_headers()
        self.wfile.write(b"3.17.2" if is_allowed else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def authenticated_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that asks for a password, and no credentials in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (mlflow_store.USERNAME, mlflow_store.PASSWORD, mlflow_store.TOKEN):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), AuthenticatedServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "the server requires a user and a password. Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ({mlflow_store.USERNAME: "bob", mlflow_store.PASSWORD: "builder"}, "the server refuses user bob with this"),
        ({mlflow_store.TOKEN: "of-bob"}, "the server refuses the token in MLFLOW_TRACKING_TOKEN"),
    ],
)
def test_a_server_that_refuses_the_user_is_named_before_anything_starts(
    authenticated_uri: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserInputError, match=message) as refusal:
        mlflow_store.check_uri(authenticated_uri)
    assert "builder" not in str(refusal.value) and "of-bob" not in str(refusal.value)


@pytest.mark.parametrize("source", ["address", "environment", "file", "token"])
def test_credentials_are_those_of_mlflows_client(
    authenticated_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    uri = authenticated_uri.replace("//", "//alice:wonder@") if source == "address" else authenticated_uri
    if source == "environment":
        monkeypatch.setenv(mlflow_store.USERNAME, "alice")
        monkeypatch.setenv(mlflow_store.PASSWORD, "wonder")
    if source == "file":
        (tmp_path / ".mlflow").mkdir()
        text = "[mlflow]\nmlflow_tracking_username = alice\nmlflow_tracking_password = wonder\n"
        (tmp_path / ".mlflow" / "credentials").write_text(text)
    if source == "token":
        monkeypatch.setenv(mlflow_store.TOKEN, "of-alice")
    mlflow_store.check_uri(uri)
    assert mlflow_store.read_version(uri) == "3.17.2"


def test_addresses_are_known_without_importing_mlflow() -> None:
    code = "import sys, sweeper.tracking.mlflow_view, sweeper.tracking.client; print('mlflow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert result.stdout == "False\n"


def test_a_file_that_is_no_database_is_refused_before_a_sweep_starts(tmp_path: Path) -> None:
    mlflow_store.check_default_store(tmp_path)  # there is none yet
    (tmp_path / "mlflow.db").write_text("junk")
    with pytest.raises(UserInputError, match=r"^dir=.*: mlflow.db: is not a SQLite database; move it away, or set"):
        mlflow_store.check_default_store(tmp_path)
    with pytest.raises(UserInputError, match=r"mlflow.db: is not a SQLite database"):
        mlflow_store.check_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (tmp_path / "mlflow.db").unlink()
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(UserInputError, match="is a directory, and no SQLite database"):
        mlflow_store.check_default_store(tmp_path)


@pytest.mark.parametrize(("revision", "reason"), [("fffffffffff0", "a newer"), ("451aebb31d03", "an older")])
def test_a_store_of_another_mlflow_is_refused_and_a_variable_that_is_not_used_is_named(
    revision: str,
    reason: str,
    tmp_path: Path,
    empty_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = Path(shutil.copy(empty_store, tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:word@host:5000")
    mlflow_store.check_default_store(tmp_path)
    assert "MLFLOW_TRACKING_URI=http://user:***@host:5000: is not used" in capsys.readouterr().err
    with closing(sqlite3.connect(file)) as database:
        database.execute("UPDATE alembic_version SET version_num = ?", [revision])
        database.commit()
    with pytest.raises(UserInputError, match=rf"mlflow\.db: was written by {reason} MLflow than .* \({revision}\)"):
        mlflow_store.check_default_store(tmp_path)


def test_what_is_not_text_or_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserInputError, match=r"is not text in this locale; set PYTHONUTF8=1"):
        mlflow_store.check_default_store(tmp_path / os.fsdecode(b"\xe9"))
    (tmp_path / "mlruns").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "mlruns")  # root may write everything
    with pytest.raises(UserInputError, match="mlruns: cannot be written; set dir"):
        mlflow_store.check_default_store(tmp_path)


def test_a_proxy_on_the_way_to_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:word@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    remedy = r"through http_proxy=http://user:\*\*\*@127.0.0.1:9; set no_proxy=127.0.0.2 to go around it$"
    with pytest.raises(UserInputError, match=remedy):
        mlflow_store.check_uri("http://127.0.0.2:5000")
    monkeypatch.setenv("no_proxy", "127.0.0.2")
    with pytest.raises(UserInputError, match=r"nothing responds there \(.*refused\)$"):
        mlflow_store.check_uri("http://127.0.0.2:9")


def test_a_web_server_without_mlflow_is_refused(tmp_path: Path) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(UserInputError, match=r"no MLflow server responds there \(status 404\)"):
                mlflow_store.check_uri(f"http://127.0.0.1:{server.server_port}")
        finally:  # otherwise the thread would take a core until the end of all tests
            server.shutdown()
