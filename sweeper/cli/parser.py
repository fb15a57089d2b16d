"""The command line of a module beside the sweep's own: its docstring is the help, an error is one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from sweeper.common.errors import UserInputError


class CommandParser(argparse.ArgumentParser):
    """Of the module `name`, which says of itself what `told` says."""

    def __init__(self, name: str, told: str | None) -> None:
        super().__init__(name, allow_abbrev=False)
        self._told = told or ""

    def format_help(self) -> str:
        return self._told.lstrip()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help says what there is\n")

    def run(self, work: Callable[[argparse.Namespace], int]) -> NoReturn:
        """Do the work with what was said and exit with its code, or with 2 for what was said wrongly."""
        try:
            sys.exit(work(self.parse_args()))
        except UserInputError as error:
            self.exit(2, f"{self.prog}: {error}\n")
