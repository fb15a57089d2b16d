"""A new store appears whole or not at all."""

import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient, __version__

from sweeper.tracking import new_store
from sweeper.tracking.new_store import create_if_missing, keep_artifacts_beside

KILLS = 3


def is_whole(database: Path) -> bool:
    """Return whether MLflow opens the store without changing it."""
    before = database.read_bytes()
    MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()
    return database.read_bytes() == before


def create_in_a_process(uri: str, cache: Path, kill_after_s: float | None = None) -> float:
    """Create the store in a process that has MLflow imported, and kill that. Returns the seconds that it ran."""
    started_s = time.monotonic()
    pid = os.fork()
    if not pid:
        os.environ["XDG_CACHE_HOME"] = str(cache)
        create_if_missing(uri)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return time.monotonic() - started_s


@pytest.mark.usefixtures("empty_store")  # it imports what a store needs
def test_a_kill_at_any_moment_leaves_no_part_of_a_store(tmp_path: Path) -> None:
    rng = random.Random(3)
    caches = [tmp_path / f"cache-{n}" for n in range(KILLS + 1)]  # whose tables are killed, too
    duration_s = create_in_a_process(f"sqlite:///{tmp_path}/whole.db", caches[KILLS])
    assert is_whole(tmp_path / "whole.db")
    for kill in range(KILLS):
        database = tmp_path / f"{kill}.db"
        create_in_a_process(f"sqlite:///{database}", caches[kill], rng.uniform(0.1, 0.9) * duration_s)
        assert not database.exists() or is_whole(database)
    create_in_a_process(f"sqlite:///{database}", caches[kill])
    (kept,) = caches[kill].glob("gpu-sweeper/*")
    assert is_whole(database) and is_whole(kept)
    assert not list(tmp_path.glob(f".{database.name}*"))


@pytest.mark.parametrize("damage", [b"", b"SQLite format 3", b"no database" * 1000])
def test_a_damaged_copy_of_the_tables_is_not_used(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(new_store, "_make_tables", lambda: sqlite3.connect(empty_store))
    kept = tmp_path / "gpu-sweeper" / f"mlflow-{__version__}.db"
    kept.parent.mkdir()
    kept.write_bytes(damage)
    create_if_missing(f"sqlite:///{tmp_path}/mlflow.db")
    assert is_whole(tmp_path / "mlflow.db")


def test_an_existing_store_is_not_touched_and_an_empty_file_is_replaced(tmp_path: Path, empty_store: Path) -> None:
    existing = tmp_path / "mlflow.db"
    existing.write_bytes(b"anything")
    create_if_missing(f"sqlite:///{existing}")
    assert existing.read_bytes() == b"anything"
    existing.write_bytes(b"")
    create_if_missing(f"sqlite:///{existing}?timeout=20")
    assert is_whole(existing)
    create_if_missing("http://127.0.0.1:1")  # of another kind: nothing is created


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KiB, a third of what a store without runs takes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_nothing_and_the_next_attempt_succeeds(small_disk: Path) -> None:
    uri = f"sqlite:///{small_disk}/mlflow.db"
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        create_if_missing(uri)
    assert not list(small_disk.iterdir())
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    create_if_missing(uri)
    assert is_whole(small_disk / "mlflow.db")


@pytest.mark.parametrize(
    ("location", "stays"),
    [
        ("s3://bucket/mlruns/1", True),
        ("dbfs:/mlruns/1", True),
        ("/absent/mlruns/1", False),
        ("file:///absent/mlruns/1", False),
    ],
)
def test_only_artifacts_of_a_project_that_was_moved_get_a_place_beside_the_store(
    tmp_path: Path, location: str, stays: bool
) -> None:
    path = tmp_path / "mlflow.db"
    create_if_missing(f"sqlite:///{path}")
    client = MlflowClient(tracking_uri=f"sqlite:///{path}")
    number = client.create_experiment("sweep", artifact_location=location)
    assert number == "1"
    client.create_run(number)
    (tmp_path / "mlruns").mkdir()
    keep_artifacts_beside(f"sqlite:///{path}")
    found = client.get_experiment(number).artifact_location
    assert found == (location if stays else (tmp_path / "mlruns/1").as_uri())
