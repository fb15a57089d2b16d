"""The file that an option names for a command's output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workloads.api.errors import UserInputError, describe_os_error


def check_output_file(option: str, path: Path) -> None:
    """Refuse a path that no file can be written to, before the work for it begins.

    Raises:
        UserInputError: its folder does not exist, or it is a folder.
    """
    if not path.parent.is_dir():
        raise UserInputError(f"{option} {path}: {path.parent}: no such directory")
    if path.is_dir():
        raise UserInputError(f"{option} {path}: is a directory. Give the name of a file in it")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Name the option where the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserInputError(f"{option} {path}: cannot be written: {describe_os_error(error)}") from error
