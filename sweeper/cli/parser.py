"""The argument parser of the subcommands: a module's docstring is its help, an error is one line."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from sweeper.common.format import printable
from workloads.api.errors import UserInputError, nearest

OVERRIDE = re.compile(r"[+~]{0,2}[a-z_][\w./@]*=")


class CommandParser(argparse.ArgumentParser):
    """The parser of the program `name`. With a text of help it has --help."""

    def __init__(self, name: str, help_text: str | None) -> None:
        self._flags_with_value: set[str] = set()
        super().__init__(name, allow_abbrev=False, add_help=help_text is not None)
        self._help_text = help_text or ""

    def format_help(self) -> str:
        return self._help_text.lstrip()

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        if action.nargs is None:
            self._flags_with_value.update(action.option_strings)
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words; refuse a flag without its value, which would take the next word, such as plan=true."""
        words = list(sys.argv[1:] if args is None else args)
        for flag, value in pairwise(words):
            if flag in self._flags_with_value and OVERRIDE.match(value):
                self.error(f"{flag} {value}: the flag has no value; if that is one, write {flag}={value}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            close = nearest(unknown[1], self._option_string_actions)
            message += f". Did you mean {close}?" if close else ""
        self.exit(2, f"{self.prog}: {printable(message)}; see --help\n")

    def run(self, command: Callable[[argparse.Namespace], int], words: Sequence[str]) -> NoReturn:
        """Run the command with the parsed arguments. Exits with its code, or with 2 for invalid input."""
        try:
            sys.exit(command(self.parse_intermixed_args(words)))
        except UserInputError as error:
            self.exit(2, f"{self.prog}: {printable(str(error))}\n")
        except BrokenPipeError:  # `| head` has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)


def fraction(text: str) -> float:
    """Return a fraction that is written as one or in percent: 0.02 or 2%."""
    return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
