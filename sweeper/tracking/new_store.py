"""Create the tables of a new SQLite store.

MLflow makes its tables by about sixty migrations. Interrupted between two of them, by a kill or a full disk, they leave
a file that MLflow neither completes nor opens. They run in memory instead, and the file appears whole under its name.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from mlflow import MlflowClient

PREFIX = "sqlite:///"


def create_if_missing(uri: str) -> None:
    """Create the store at a SQLite address unless its file exists. Does nothing for other addresses.

    Raises:
        sqlite3.OperationalError: the file cannot be written; nothing is left under its name.
    """
    path = Path(uri.removeprefix(PREFIX).partition("?")[0])
    if not uri.startswith(PREFIX) or _has_content(path):
        return
    with _locked(path.parent) as is_locked:
        if is_locked:  # nobody else writes one now: killed processes have left these
            for leftover in path.parent.glob(f".{path.name}.new-*"):
                leftover.unlink(missing_ok=True)
        if not _has_content(path):
            _create(path)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _create(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        _write_tables(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        _publish(temporary, path)
    except sqlite3.OperationalError as error:
        raise sqlite3.OperationalError(f"{error}: {path}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_tables(path: Path) -> None:
    """Write a database that has MLflow's tables. MLflow opens it by SQLite's name of a shared database in memory."""
    name = f"file:{zlib.crc32(bytes(path.parent))}?mode=memory&cache=shared"
    with closing(sqlite3.connect(name, uri=True)) as memory:
        MlflowClient(tracking_uri=f"{PREFIX}{name}&uri=true").search_experiments(max_results=1)
        with closing(sqlite3.connect(path)) as database:
            database.execute("pragma synchronous = off")  # the whole file is synced once
            memory.backup(database)


def _publish(temporary: Path, path: Path) -> None:
    """Give the file its name, unless another process that could not be locked out was first."""
    if path.exists():  # an empty file
        temporary.replace(path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        temporary.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Let one process at a time create a store in this folder. Yields whether the folder can be locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    is_locked = False
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_locked = True
        yield is_locked
    finally:
        os.close(descriptor)
