"""The command `sweeper`: run a sweep, or the subcommand named by the first argument."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path


def main() -> None:
    """Run the command and exit with a code from `sweeper.cli.exits`."""
    try:
        run(sys.argv[1:])
    except Exception as error:
        if shadow := find_shadow():
            message = f"{shadow[0]} hides the module {shadow[1]} that sweeper needs. Rename it"
        elif isinstance(error, ModuleNotFoundError):
            where = f"{sys.executable} lacks the module {error.name}"
            message = f"{where}. Activate the environment that has sweeper (. .venv/bin/activate), or install it"
        else:
            raise
        print(f"sweeper: {message}", file=sys.stderr)
        sys.exit(2)


def run(words: list[str]) -> None:
    """Run the command with these arguments and exit."""
    import sweeper.common.rare_collections  # noqa: F401
    from sweeper.cli.command import SUBCOMMANDS
    from sweeper.cli.exits import exit_with, interpreter, name_user, open_streams

    open_streams()
    name_user()

    if words and words[0] in SUBCOMMANDS:
        import_module(f"sweeper.commands.{words[0]}.main").main(words[1:])
    else:
        from sweeper.commands.sweep.main import run as run_sweeps

        program = ["sweeper"] if Path(sys.argv[0]).name == "sweeper" else [interpreter(), "-m", "sweeper"]
        exit_with(lambda: run_sweeps(words, program))


def find_shadow() -> tuple[Path, str] | None:
    """Return a file that `python -m` imported from the working directory, and the module that the file shadows."""
    here = Path.cwd()
    for name in {*sys.stdlib_module_names, *packages_distributions()} & sys.modules.keys() - {"sweeper", "workloads"}:
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if file.parent in (here, here / name):
            return file.relative_to(here), name
    return None


if __name__ == "__main__":
    main()
