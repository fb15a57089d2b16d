"""List the sweeps of a results directory.

    python -m sweeper list [--dir DIR]
    python -m sweeper list --follow NAME
    python -m sweeper list --delete NAME [--yes] [--store URI]

Without an option: each sweep with its state (running, interrupted, finished), the best trial so far or with several
objectives the size of their front, its size on disk and the time since its last run started, the last one first.

--follow NAME   show the progress of a sweep that another process runs, until it ends. Ctrl-C detaches: it goes on
--delete NAME   remove a sweep that does not run, from disk and from its MLflow store, after asking. MLflow keeps
                deleted runs until `mlflow gc`
  --yes         do not ask
  --store URI   its MLflow store, where the address that the sweep recorded has a masked password
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sweeper.cli.parser import CommandParser
from sweeper.commands.list.deletion import delete
from sweeper.commands.list.follow import follow
from sweeper.common.format import count, format_number
from sweeper.pages.terminal import draw, terminal_width
from sweeper.results.stored import StoredSweep, find_sweep, find_sweeps
from workloads.api.errors import UserInputError
from workloads.api.metrics import get_metric

HEADING = ["sweep", "state", "best", "size", "age"]
MIN_COLUMNS = 2  # the name and the state are shown in any terminal
# Ages and sizes by their units: the first whose size is reached.
AGES_S = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
SIZES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def main(words: list[str]) -> None:
    """Run the command. The exit code is 2 for invalid input."""
    make_parser().run(run, words)


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser("sweeper list", __doc__)
    parser.add_argument("--dir", default=".", type=Path)
    parser.add_argument("--follow")
    parser.add_argument("--delete")
    parser.add_argument("--yes", action="store_true")
    parser.add_argument("--store")
    return parser


def run(args: argparse.Namespace) -> int:
    """List, follow or delete. Returns the exit code."""
    if args.follow and args.delete:
        raise UserInputError("--follow and --delete: cannot be combined")
    if args.follow:
        return follow(find_sweep(args.dir, args.follow, option="--follow "))
    if args.delete:
        return _delete(find_sweep(args.dir, args.delete, option="--delete "), args)
    if not args.dir.is_dir():
        raise UserInputError(f"--dir {args.dir}: there is no such directory")
    return show(find_sweeps(args.dir), args.dir)


def show(sweeps: Sequence[StoredSweep], directory: Path) -> int:
    """Print the table. Returns the exit code."""
    if not sweeps:
        print(f"no sweep in {directory.resolve()}; `python -m sweeper` runs one")
        return 0
    width = terminal_width()
    console = Console(width=width, highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(draw(HEADING, [describe_row(sweep) for sweep in sweeps], MIN_COLUMNS, width))
    return 0


def describe_row(sweep: StoredSweep) -> list[str]:
    """Return the cells of a sweep; of one with a damaged file what is known without it."""
    try:
        return _describe_read(sweep)
    except UserInputError as error:
        age = format_amount(time.time() - sweep.changed_at_s, AGES_S)
        return [sweep.name, "damaged", str(error), format_amount(sweep.size_bytes, SIZES), age]


def _describe_read(sweep: StoredSweep) -> list[str]:
    description = sweep.description
    best = f"front of {count(sweep.front_size, 'trial')}" if sweep.front_size else ""
    if description and not best and (winner := sweep.winner):
        unit = get_metric(description.objective).unit or description.objective
        best = f"{format_number(winner.value)} {unit}, trial {winner.trial}"
    started_s = description.started_at_s if description else sweep.changed_at_s
    age, size = format_amount(time.time() - started_s, AGES_S), format_amount(sweep.size_bytes, SIZES)
    return [sweep.name, sweep.state, best, size, age]


def format_amount(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return a duration or a size with two digits, in the largest of its units that it fills."""
    name, factor = next(((name, factor) for name, factor in units if value >= factor), units[-1])
    return f"{value / factor:.2g} {name}" if value < 10 * factor else f"{value / factor:.0f} {name}"


def _delete(sweep: StoredSweep, args: argparse.Namespace) -> int:
    if sweep.is_running:
        raise UserInputError(f"--delete {sweep.name}: process {sweep.driver} is running it; stop that first")
    size = format_amount(sweep.size_bytes, SIZES)
    question = f"delete {sweep.name} ({count(len(sweep.records), 'trial')}, {size}) and its runs in MLflow?"
    if not args.yes and not _confirm(question):
        print("nothing is deleted")
        return 0
    for line in delete(sweep, args.store):
        print(line)
    return 0


def _confirm(question: str) -> bool:
    """Ask on the terminal.

    Raises:
        UserInputError: there is none.
    """
    if not sys.stdin.isatty():
        raise UserInputError(f"{question} There is no terminal to ask on: set --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
