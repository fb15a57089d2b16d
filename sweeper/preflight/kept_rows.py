"""Keep rows for later sweeps in a JSON file next to the sweeps. Several sweeps may write the file at the same time."""

import fcntl
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from sweeper.common.files import write_whole
from workloads.api.errors import UserInputError

FOLDER = "sweeps"  # the folder in a results directory
Row = TypeVar("Row")


def read_rows(directory: Path, file: str, build: Callable[[Mapping[str, Any]], Row]) -> list[Row]:
    """Return the rows stored in a results directory. Raises UserInputError if the file cannot be read."""
    # Up to version 0.3, the file was in the results directory itself.
    path = next((path for path in (directory / FOLDER / file, directory / file) if path.exists()), None)
    if path is None:
        return []
    try:
        return [build(fields) for fields in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserInputError(f"{path}: cannot be read ({error}); move it away, a sweep writes a new one") from error


def replace_rows(directory: Path, file: str, change: Callable[[], Iterable[Any]]) -> None:
    """Store the rows that `change` returns. A lock keeps other sweeps from writing in the meantime."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{file}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_whole(folder / file, json.dumps([asdict(row) for row in change()], indent=1) + "\n")
