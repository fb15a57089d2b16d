"""Create the tables of a new SQLite store.

MLflow makes its tables by about sixty migrations. Interrupted between two of them, by a kill or a full disk, they leave
a file that MLflow neither completes nor opens. They run in memory instead, and the file appears whole under its name.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import zlib
from contextlib import closing, suppress
from pathlib import Path

from mlflow import MlflowClient

from workloads.api.errors import UserInputError

PREFIX = "sqlite:///"


def create_if_missing(uri: str) -> None:
    """Create the store at a SQLite address unless its file exists. Does nothing for other addresses.

    Raises:
        UserInputError: its folder cannot be made or opened.
        sqlite3.OperationalError: the file cannot be written; nothing is left under its name.
    """
    path = Path(uri.removeprefix(PREFIX).partition("?")[0])
    if not uri.startswith(PREFIX) or _has_content(path):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise UserInputError(f"{path.parent}: the folder of the store cannot be made: {error.strerror}") from error
    try:
        with suppress(OSError):  # a folder that cannot be locked
            fcntl.flock(folder, fcntl.LOCK_EX)
            # Nobody else writes one now: killed processes have left these.
            for leftover in path.parent.glob(f".{path.name}.new-*"):
                leftover.unlink(missing_ok=True)
        if not _has_content(path):
            _create(path)
    finally:
        os.close(folder)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _create(path: Path) -> None:
    """Write a database with MLflow's tables, which MLflow opens by SQLite's name of a shared database in memory."""
    temporary = path.with_name(f".{path.name}.new-{os.getpid()}")
    name = f"file:{zlib.crc32(bytes(path.parent))}?mode=memory&cache=shared"
    try:
        with closing(sqlite3.connect(name, uri=True)) as memory:
            MlflowClient(tracking_uri=f"{PREFIX}{name}&uri=true").search_experiments(max_results=1)
            with closing(sqlite3.connect(temporary)) as database:
                database.execute("pragma synchronous = off")  # the whole file is synced once
                memory.backup(database)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        try:
            if not path.exists():  # an empty file is replaced
                os.link(temporary, path)
                return
        except FileExistsError:  # another process that could not be locked out was first
            return
        except OSError:  # a file system without hard links
            pass
        temporary.replace(path)
    except sqlite3.OperationalError as error:
        raise sqlite3.OperationalError(f"{error}: {path}") from error
    finally:
        temporary.unlink(missing_ok=True)
