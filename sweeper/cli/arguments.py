"""Parse the arguments of a sweep: flags and configuration overrides."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NoReturn, get_args

from sweeper.cli.command import COMMAND_NAMES, SETTING_NAMES, SUBCOMMANDS
from sweeper.config.schema import Config
from workloads.api.errors import UserInputError
from workloads.api.validation import keys_of
from workloads.suggestions import nearest, suggest
from workloads.tables import read_toml

# Names, argparse options and help texts.
FLAGS: list[tuple[list[str], dict[str, Any], str]]
FLAGS = read_toml(__file__, "flags.toml")["flags"]
# Flags that choose an action and cannot be combined.
MODES = ("multirun", "run", "cfg", "info", "shell_completion")
KEYS = {"model", *(field.name for field in fields(Config))}
SWITCHES = {key.name for key in keys_of(Config) if bool in (key.annotation, *get_args(key.annotation))}
OVERRIDE = re.compile(r"[+~]{0,2}[a-z_][\w./@]*=")
TOPOLOGY_FILE = re.compile(r"topology=(.*\.ya?ml)")


@dataclass(frozen=True)
class Arguments:
    flags: dict[str, str | bool]  # the given flags by long name without dashes; True for a flag without a value
    overrides: tuple[str, ...]  # key=value and group=choice, as typed

    @property
    def config_dir(self) -> str | None:
        """The user's configuration folder."""
        return str(self.flags["config_dir"]) if "config_dir" in self.flags else None

    def format_flags(self) -> list[str]:
        flags = [(f"--{name.replace('_', '-')}", value) for name, value in self.flags.items()]
        return [flag if value is True else f"{flag}={value}" for flag, value in flags]


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserInputError(f"{message}; see --help")


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    """Parse flags and overrides. Raises UserInputError if an argument is unknown or flags contradict each other."""
    parser = _FlagParser("sweeper", allow_abbrev=False, add_help=False)
    actions = [parser.add_argument(*names, **options) for names, options, _ in FLAGS]
    parser.add_argument("overrides", nargs="*")
    with_value = {name for action in actions if action.nargs is None for name in action.option_strings}
    for flag, value in pairwise(arguments):  # argparse would take the next argument, such as plan=true, as the value
        if flag in with_value and OVERRIDE.match(value):
            raise UserInputError(f"{flag} {value}: the flag has no value; if that is one, write {flag}={value}")
    values, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise UserInputError(_explain_flag(unknown[0], values.overrides))
    for word in values.overrides:
        if word in SUBCOMMANDS:
            raise UserInputError(f"{word}: a subcommand is the first word: sweeper {word} …")
        meant = COMMAND_NAMES.get(word) or nearest(word, [*SUBCOMMANDS, *KEYS])
        if meant in {*SUBCOMMANDS, *COMMAND_NAMES.values()} and re.fullmatch("[a-z]+", word):
            available = ", ".join(SUBCOMMANDS)
            raise UserInputError(f"{word}: unknown subcommand. Did you mean sweeper {meant}? Available: {available}.")
    given = [f"--{name.replace('_', '-')}" for name in MODES if getattr(values, name)]
    if given[:1] == ["--multirun"] and given[1:] in (["--cfg"], ["--info"]):
        raise UserInputError(f"{given[1]}: shows one configuration; leave -m out and give each key one value")
    if len(given) > 1:
        raise UserInputError(f"{given[0]} and {given[1]}: cannot be combined")
    for flag in ("resolve", "package"):
        if getattr(values, flag) and not values.cfg:
            raise UserInputError(f"--{flag}: needs --cfg job")
    flags = {name: value for name, value in vars(values).items() if value and name != "overrides"}
    # Hydra's groups accept only names, so a topology file becomes a key.
    return Arguments(flags, tuple(TOPOLOGY_FILE.sub(r"topology.file=\1", word) for word in values.overrides))


def _explain_flag(flag: str, words: Sequence[str]) -> str:
    name, sign, value = flag.lstrip("-").partition("=")
    key = SETTING_NAMES.get(name, name.replace("-", "_"))
    if name in COMMAND_NAMES:
        return f"{flag}: unknown flag. Did you mean sweeper {' '.join([COMMAND_NAMES[name], *words])}?"
    if "." in key or key in KEYS:
        plain = next((word for word in words if "=" not in word), "VALUE")
        value = value if sign else "true" if key in SWITCHES else plain
        return f"{flag}: unknown flag; a setting has no dashes: {key}={value}"
    known = [name for names, _, _ in FLAGS for name in names if name.startswith("--")]
    return f"{flag}: unknown flag. {suggest(flag, known)}"
