"""The arguments of the console command: its flags, and the overrides of the configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from sweeper.cli.overrides import name_files
from sweeper.cli.parser import CommandParser
from workloads.api.errors import UserInputError, suggest

INFO_PARTS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
# Names, options for argparse, and what the help says. All but --version are Hydra's; its flags that replace the root of
# the configuration or rerun a pickled one are left out.
FLAGS: tuple[tuple[tuple[str, ...], dict[str, object], str], ...] = (
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
# Flags that each say what to do; only one of them has an effect.
MODES = ("multirun", "run", "cfg", "info", "shell_completion")


@dataclass(frozen=True)
class Arguments:
    """The parsed arguments of the console command.

    Attributes:
        flags: the given flags, by their long names without dashes; True where a flag has no value.
        overrides: key=value and group=choice, as typed.
    """

    flags: dict[str, str | bool]
    overrides: tuple[str, ...]

    @property
    def config_dir(self) -> str | None:
        """The user's folder of configurations."""
        folder = self.flags.get("config_dir")
        return None if folder is None else str(folder)

    def format_flags(self) -> list[str]:
        """Return the flags as Hydra takes them."""
        flags = [(f"--{name.replace('_', '-')}", value) for name, value in self.flags.items()]
        return [flag if value is True else f"{flag}={value}" for flag, value in flags]


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    """Return the flags and overrides, in any order.

    Raises:
        UserInputError: for an unknown flag, or flags that exclude each other.
    """
    parser = CommandParser("sweeper", None)
    for names, options, _ in FLAGS:
        parser.add_argument(*names, **options)
    parser.add_argument("overrides", nargs="*")
    values, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        if "=" in unknown[0] and "." in unknown[0]:
            raise UserInputError(f"{unknown[0]}: unknown flag; a key has no dashes: {unknown[0].lstrip('-')}")
        known = [name for names, _, _ in FLAGS for name in names if name.startswith("--")]
        raise UserInputError(f"{unknown[0]}: unknown flag. {suggest(unknown[0], known)}")
    _check_modes(values)
    flags = {name: value for name, value in vars(values).items() if value and name != "overrides"}
    return Arguments(flags, name_files(values.overrides))


def _check_modes(values: argparse.Namespace) -> None:
    """Check that the flags do not exclude each other."""
    given = [f"--{name.replace('_', '-')}" for name in MODES if getattr(values, name)]
    if given[:1] == ["--multirun"] and given[1:] in (["--cfg"], ["--info"]):
        raise UserInputError(f"{given[1]}: shows one configuration; leave -m out and give each key one value")
    if len(given) > 1:
        raise UserInputError(f"{given[0]} and {given[1]}: cannot be combined")
    for flag in ("resolve", "package"):
        if getattr(values, flag) and not values.cfg:
            raise UserInputError(f"--{flag}: needs --cfg job")
