"""The store of a test."""

from pathlib import Path

import pytest

from tests.conftest import Workspace


@pytest.fixture
def uri(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"
