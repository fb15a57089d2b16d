"""Create the tables of a new SQLite store, and keep artifacts next to the store.

MLflow creates its tables in about sixty migrations. If a kill or a full disk interrupts the migrations, they leave a
file that MLflow can neither complete nor open. This module runs them in memory, so the complete file appears at once.
The tables of each MLflow version are kept in the user's cache folder, and later stores are copies of these tables.
"""

import fcntl
import os
import sqlite3
import urllib.parse
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from mlflow import MlflowClient, __version__

from sweeper.tracking.mlflow_store import ARTIFACTS, REVISION, SQLITE_PREFIX, sqlite_path
from workloads.api.errors import UserInputError


def create_if_missing(uri: str) -> None:
    """Create the store at a SQLite address unless its file exists. Do nothing for other addresses.

    Raises UserInputError if the folder cannot be created or opened. Raises sqlite3.OperationalError if the file cannot
    be written, in which case no partial file is left.
    """
    if path := sqlite_path(uri):
        _write_if_missing(path, _open_kept_tables)


def _write_if_missing(path: Path, open_tables: Callable[[], sqlite3.Connection]) -> None:
    if _has_content(path):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise UserInputError(f"{path.parent}: the folder of the store cannot be made: {error.strerror}") from error
    try:
        with suppress(OSError):  # some folders cannot be locked
            fcntl.flock(folder, fcntl.LOCK_EX)
            # No other process is writing a temporary file now, so these are left over from killed processes.
            for leftover in path.parent.glob(f".{path.name}.new-*"):
                leftover.unlink(missing_ok=True)
        if not _has_content(path):
            with closing(open_tables()) as tables:
                _write(path, tables)
    finally:
        os.close(folder)


def keep_artifacts_beside(uri: str) -> None:
    """Make the experiments of a SQLite store keep their artifacts in `mlruns` next to the file.

    MLflow stores absolute paths below the working directory of the process that creates an experiment. MLflow decodes
    paths without having encoded them, and keeps using the old path after a project is moved or copied. An artifact
    location is kept if the experiment's runs have artifacts there and not next to the file."""
    path = sqlite_path(uri)
    if path is None:
        return
    with closing(sqlite3.connect(path.resolve().as_uri(), uri=True, timeout=5)) as database:
        runs_of = "SELECT count(*) FROM runs WHERE runs.experiment_id = e.experiment_id"
        query = f"SELECT experiment_id, artifact_location, ({runs_of}) FROM experiments e"
        for number, location, runs in database.execute(query).fetchall():
            location = location or ""
            address = urllib.parse.urlsplit(location)
            if address.scheme not in ("", "file"):
                continue  # the location is in a bucket or on a server
            stored = Path(urllib.parse.unquote(address.path if address.scheme else location))
            here = path.resolve().parent / ARTIFACTS / str(number)
            is_ours = stored.parts[-2:] == here.parts[-2:] and stored != here
            if is_ours and (not runs or here.exists() or (here.parent.exists() and not stored.parent.parent.exists())):
                new, end = here.as_uri(), len(location) + 1
                database.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (new, number))
                moved = "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) WHERE experiment_id = ?"
                database.execute(f"{moved} AND substr(artifact_uri, 1, ?) = ?", (new, end, number, end, f"{location}/"))
        database.commit()


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _open_kept_tables() -> sqlite3.Connection:
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        kept = cache.absolute() / "gpu-sweeper" / f"mlflow-{__version__}.db"
        _write_if_missing(kept, _make_tables)
        tables = sqlite3.connect(f"{kept.as_uri()}?mode=ro", uri=True)
        try:
            tables.execute(REVISION)
        except sqlite3.DatabaseError:  # damaged; the next start creates the file again
            kept.unlink()
            raise
        return tables
    except (OSError, RuntimeError, UserInputError, sqlite3.Error):  # no home folder, or read-only, full or damaged
        return _make_tables()


def _make_tables() -> sqlite3.Connection:
    """Let MLflow create its tables in a shared in-memory SQLite database, which MLflow opens by name."""
    name = f"file:{os.urandom(8).hex()}?mode=memory&cache=shared"
    memory = sqlite3.connect(name, uri=True)
    MlflowClient(tracking_uri=f"{SQLITE_PREFIX}{name}&uri=true").search_experiments(max_results=1)
    return memory


def _write(path: Path, tables: sqlite3.Connection) -> None:
    temporary = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        with closing(sqlite3.connect(temporary)) as database:
            database.execute("pragma synchronous = off")  # the whole file is synced once, below
            tables.backup(database)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        try:
            if not path.exists():  # an existing empty file is replaced
                os.link(temporary, path)
                return
        except FileExistsError:  # another process, which could not be locked out, was faster
            return
        except OSError:  # the file system has no hard links
            pass
        temporary.replace(path)
    except sqlite3.OperationalError as error:
        raise sqlite3.OperationalError(f"{error}: {path}") from error
    finally:
        temporary.unlink(missing_ok=True)
