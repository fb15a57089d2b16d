"""Parse the arguments of a sweep: flags and configuration overrides."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NoReturn, get_args

from sweeper.cli.command import COMMAND_NAMES, SETTING_NAMES, SUBCOMMANDS
from sweeper.config.schema import Config
from sweeper.config.validation import keys_of
from workloads.api.errors import UserInputError
from workloads.suggestions import nearest, suggest

INFO_PARTS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
# Names, argparse options and help texts. All flags except --version come from Hydra. Hydra's flags that replace the
# root of the configuration or rerun a pickled configuration are not supported.
FLAGS: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
    (("--help", "-h"), {"action": "store_true"}, "this help, with the keys of the workload that workload= names"),
    (("--version",), {"action": "store_true"}, "the versions of sweeper, Python and the main packages"),
    (("--multirun", "-m"), {"action": "store_true"}, "one sweep for each of several values: -m seed=1,2,3"),
    (("--config-dir", "-cd"), {"metavar": "DIR"}, "a folder with your own DIR/workload/NAME.yaml"),
    (("--cfg", "-c"), {"choices": ("job", "hydra", "all")}, "print the composed configuration and exit: --cfg job"),
    (("--package", "-p"), {"metavar": "KEY"}, "with --cfg: only this section"),
    (("--resolve",), {"action": "store_true"}, "with --cfg: values in the place of ${references}"),
    (("--info", "-i"), {"choices": INFO_PARTS, "nargs": "?", "const": "all"}, "which files the configuration is from"),
    (("--run", "-r"), {"action": "store_true"}, "run one sweep, as without any flag"),
    (("--shell-completion", "-sc"), {"action": "store_true"}, "install or uninstall completion: -sc install=bash"),
    (("--hydra-help",), {"action": "store_true"}, "Hydra's own help"),
)
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
