"""The command `sweeper`: a sweep, or the subcommand that its first word names."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from sweeper.cli.command import SUBCOMMANDS
from sweeper.cli.exits import exit_with, interpreter


def main() -> None:
    """Run the command and exit with a code of `sweeper.cli.exits`."""
    words = sys.argv[1:]
    if words and words[0] in SUBCOMMANDS:
        import_module(f"sweeper.commands.{words[0]}.main").main(words[1:])
    else:
        from sweeper.commands.sweep.main import run

        program = ["sweeper"] if Path(sys.argv[0]).name == "sweeper" else [interpreter(), "-m", "sweeper"]
        exit_with(lambda: run(words, program))


if __name__ == "__main__":
    main()
