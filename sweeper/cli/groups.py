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
