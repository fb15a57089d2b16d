"""The groups of a command: the configuration without its single keys, and the files that it is composed from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from sweeper.cli.arguments import Arguments
from sweeper.config.files import ConfigFile
from sweeper.config.resolution import CONF

GROUPS = ("workload", "model", "hardware", "topology", "search")
_CHOICE = re.compile(rf"({'|'.join(GROUPS)})=([\w./-]+)")


def choices_of(arguments: Arguments) -> dict[str, str]:
    """Return the choice of each group that the command names. One that names several has none."""
    matches = [_CHOICE.fullmatch(override) for override in arguments.overrides]
    return {match[1]: match[2] for match in matches if match}


def compose_groups(arguments: Arguments) -> DictConfig:
    """Return the configuration with the choices of groups and without the other overrides, Hydra's section included."""
    with _config_loader():
        return compose("config", overrides=_group_overrides(arguments), return_hydra_config=True)


def loaded_files(arguments: Arguments) -> list[ConfigFile]:
    """Return the files that the configuration is composed from; a later one overrides an earlier one."""
    with _config_loader() as loader:
        defaults = loader.compute_defaults_list("config", _group_overrides(arguments), RunMode.RUN).defaults
    files = [(find_file(arguments, default.config_path or ""), default.package or "") for default in defaults]
    return [ConfigFile(path, package) for path, package in files if path is not None]


def find_file(arguments: Arguments, name: str) -> Path | None:
    """Return the file of a configuration such as workload/matmul; None if it is one of Hydra's own."""
    paths = [folder / f"{name}.yaml" for folder in config_folders(arguments)]
    return next((path for path in paths if path.is_file()), None)


def chosen_files(arguments: Arguments) -> list[Path]:
    """Return the files that the groups name, also where they cannot be composed."""
    paths = [find_file(arguments, f"{group}/{choice}") for group, choice in choices_of(arguments).items()]
    return [path for path in paths if path is not None]


def config_folders(arguments: Arguments) -> list[Path]:
    """Return the folders of configurations: ours, and the user's."""
    return [CONF, *([Path(arguments.config_dir).resolve()] if arguments.config_dir else [])]


def list_choices(arguments: Arguments, group: str) -> list[str]:
    """Return the names that a group may be set to."""
    folders = [folder / group for folder in config_folders(arguments)]
    return sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.yaml")})


@contextmanager
def _config_loader() -> Iterator[ConfigLoader]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        yield loader


def _group_overrides(arguments: Arguments) -> list[str]:
    paths = [override for override in arguments.overrides if override.startswith("hydra.searchpath=")]
    if arguments.config_dir and not paths:
        paths = [f"hydra.searchpath=['file://{Path(arguments.config_dir).resolve()}']"]
    return [*paths, *(f"{group}={choice}" for group, choice in choices_of(arguments).items())]


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
