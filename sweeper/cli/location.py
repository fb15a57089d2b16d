"""The file and line of a wrong key that stands in a file, not on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sweeper.cli.arguments import Arguments
from sweeper.cli.groups import GROUPS, chosen_files, loaded_files
from sweeper.config.files import ConfigFile
from sweeper.config.resolution import CONF

# Groups whose files set keys of the whole configuration.
GLOBAL_GROUPS = ("workload", "model")


def locate(message: str, arguments: Arguments, *, shipped: bool) -> str:
    """Return the message behind the file and line of the key that it begins with, unless that was typed.

    `shipped`: also in our own files. They are valid as they are, so they are named only for what no device decides.
    """
    match = re.match(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*(?=[=:])", message)
    if match is None or _is_typed(match[0], arguments):
        return message
    is_missing = ": required" in message
    shipped = shipped and not is_missing  # our files leave it to the user
    files = [file for file in reversed(loaded_files(arguments)) if shipped or not file.path.is_relative_to(CONF)]
    for file in files:
        if problem := file.problem(is_global=file.path.parent.name in GLOBAL_GROUPS):
            return f"{display(file.path)}:1: {problem}"
    places = [_place(file, key) for key in _with_sections(match[0]) for file in files]
    places += [display(file.path) for file in files if is_missing]  # a whole section is missing
    return next((f"{place}: {message}" for place in places if place), message)


def locate_text(text: str, arguments: Arguments) -> str:
    """Return the file and line that the text stands in, with a colon; empty if it was typed."""
    if any(text in override for override in arguments.overrides):
        return ""
    for path in chosen_files(arguments):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if text in line:
                return f"{display(path)}:{number}: "
    return ""


def display(path: Path | str | None) -> str:
    """Return the path, relative where it is below the working directory."""
    absolute, here = Path(path or "").resolve(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _place(file: ConfigFile, key: str) -> str:
    line = file.line_of(key)
    return "" if line is None else f"{display(file.path)}:{line}"


def _with_sections(key: str) -> Iterator[str]:
    """Yield the key, then the sections that it is in: what is missing has no line of its own."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _is_typed(key: str, arguments: Arguments) -> bool:
    """Return whether the command line sets the key, one of its section or one inside of it."""
    typed = {override.lstrip("+~").partition("=")[0] for override in arguments.overrides}
    if key in typed:
        return True
    typed -= {*GROUPS}  # workload=NAME sets no key, but chooses the file that does
    return any(f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.") for name in typed)
