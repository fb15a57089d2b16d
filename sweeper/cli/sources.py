"""Find the files from which a configuration is composed, and the line and the comment of a key in these files."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from sweeper.cli.arguments import Arguments
from sweeper.config.resolution import CONF

GROUPS = ("workload", "model", "hardware", "topology", "search")
# Groups with files that set keys anywhere in the configuration.
GLOBAL_GROUPS = ("workload", "model")
HEADER = "# @package _global_"
_CHOICE = re.compile(rf"({'|'.join(GROUPS)})=([\w./-]+)")


@dataclass(frozen=True)
class ConfigFile:
    path: Path
    package: str = ""  # the section in which Hydra places the file's keys; empty for the root

    @cached_property
    def _text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _root(self) -> yaml.Node | None:
        return yaml.compose(self._text, yaml.SafeLoader)

    def entries(self) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Yield each key that the file sets in the composed configuration, and the YAML nodes of its name and value."""
        return _walk(self._root, f"{self.package}." if self.package else "")

    def line_of(self, key: str) -> int | None:
        """Return the line that sets a key of the composed configuration, or None if the file does not set the key."""
        return next((name.start_mark.line + 1 for entry, name, _ in self.entries() if entry == key), None)

    def comments(self) -> dict[str, str]:
        """Return the comment next to each key that has one. Comments may continue on the lines below."""
        lines = self._text.splitlines()
        comments = {key: _comment(lines, name, value) for key, name, value in self.entries()}
        return {key: comment for key, comment in comments.items() if comment}

    def problem(self, *, is_global: bool) -> str:
        """Describe any problem with the whole file; empty if valid. A global file must define its keys at the root."""
        if is_global and self.package:
            marked = self._text.startswith("\ufeff")
            where = "; remove the byte-order mark before it" if marked and HEADER in self._text else ""
            return f"the first line must be `{HEADER}`{where}"
        if self._root is None:
            return "has no keys"
        return "" if isinstance(self._root, yaml.MappingNode) else "must be a mapping: key: value"


def _walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        yield f"{prefix}{name.value}", name, value
        yield from _walk(value, f"{prefix}{name.value}.")


def _comment(lines: list[str], name: yaml.Node, value: yaml.Node) -> str:
    """Return the comment next to a value, or next to the name if the value is a block below it."""
    is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
    end = name.end_mark if is_block else value.end_mark
    if end.line >= len(lines):
        return ""
    rest = lines[end.line][end.column :].lstrip(": ")
    if not rest.startswith("#"):
        return ""
    comment = [rest]
    for line in lines[end.line + 1 :]:
        if not line.lstrip().startswith("#") or line.index("#") <= name.start_mark.column:
            break
        comment.append(line)
    return " ".join(text.strip().lstrip("#").strip() for text in comment)


def choices_of(arguments: Arguments) -> dict[str, str]:
    """Return the command's choice for each group. Groups with several values are omitted."""
    matches = [_CHOICE.fullmatch(override) for override in arguments.overrides]
    return {match[1]: match[2] for match in matches if match}


def compose_groups(arguments: Arguments) -> DictConfig:
    """Compose the configuration, including Hydra's section, from only the group choices in the overrides."""
    with _config_loader():
        return compose("config", overrides=_group_overrides(arguments), return_hydra_config=True)


def loaded_files(arguments: Arguments) -> list[ConfigFile]:
    """Return the files from which the configuration is composed. Later files override earlier files."""
    with _config_loader() as loader:
        defaults = loader.compute_defaults_list("config", _group_overrides(arguments), RunMode.RUN).defaults
    files = [(find_file(arguments, default.config_path or ""), default.package or "") for default in defaults]
    return [ConfigFile(path, package) for path, package in files if path is not None]


def find_file(arguments: Arguments, name: str) -> Path | None:
    """Return the file of a configuration such as workload/matmul, or None for Hydra's own files."""
    paths = [folder / f"{name}.yaml" for folder in config_folders(arguments)]
    return next((path for path in paths if path.is_file()), None)


def chosen_files(arguments: Arguments) -> list[Path]:
    """Return the files of the chosen groups, even if Hydra cannot compose them."""
    paths = [find_file(arguments, f"{group}/{choice}") for group, choice in choices_of(arguments).items()]
    return [path for path in paths if path is not None]


def config_folders(arguments: Arguments) -> list[Path]:
    return [CONF, *([Path(arguments.config_dir).resolve()] if arguments.config_dir else [])]


def list_choices(arguments: Arguments, group: str) -> list[str]:
    folders = [folder / group for folder in config_folders(arguments)]
    return sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.yaml")})


@contextmanager
def _config_loader() -> Iterator[ConfigLoader]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _group_overrides(arguments: Arguments) -> list[str]:
    paths = [override for override in arguments.overrides if override.startswith("hydra.searchpath=")]
    if arguments.config_dir and not paths:
        paths = [f"hydra.searchpath=['file://{Path(arguments.config_dir).resolve()}']"]
    return [*paths, *(f"{group}={choice}" for group, choice in choices_of(arguments).items())]


def locate(message: str, arguments: Arguments, *, shipped: bool) -> str:
    """If a message starts with a key that the user did not type, prefix the message with the key's file and line.
    `shipped` also searches our own files, which are valid; set it only for errors that do not depend on the device."""
    match = re.match(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*(?=[=:])", message)
    if match is None or _is_typed(match[0], arguments):
        return message
    is_missing = ": required" in message
    shipped = shipped and not is_missing  # our files leave required keys to the user
    files = [file for file in reversed(loaded_files(arguments)) if shipped or not file.path.is_relative_to(CONF)]
    for file in files:
        if problem := file.problem(is_global=file.path.parent.name in GLOBAL_GROUPS):
            return f"{display(file.path)}:1: {problem}"
    key = match[0]
    while key:  # try the key, then the enclosing sections, because a missing key has no line
        for file in files:
            if line := file.line_of(key):
                return f"{display(file.path)}:{line}: {message}"
        key = key.rpartition(".")[0]
    # If no line was found, a whole section is missing.
    return f"{display(files[0].path)}: {message}" if is_missing and files else message


def locate_text(text: str, arguments: Arguments) -> str:
    """Return the file and line that contain the text, followed by a colon, or "" if the user typed the text."""
    if any(text in override for override in arguments.overrides):
        return ""
    for path in chosen_files(arguments):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if text in line:
                return f"{display(path)}:{number}: "
    return ""


def display(path: Path | str | None) -> str:
    """Return the path as text, relative if it is below the working directory."""
    absolute, here = Path(path or "").resolve(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _is_typed(key: str, arguments: Arguments) -> bool:
    typed = {override.lstrip("+~").partition("=")[0] for override in arguments.overrides}
    if key in typed:
        return True
    typed -= {*GROUPS}  # workload=NAME sets no key, but chooses a file that sets keys
    return any(f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.") for name in typed)
