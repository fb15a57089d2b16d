"""Keep reference figures in a file, and compare later runs with them.

    python -m sweeper history [compare] [SWEEP ...] [--junit FILE] [--markdown FILE]
    python -m sweeper history append [SWEEP ...] [--new-level]
    python -m sweeper history list
    python -m sweeper history plot [--out FILE.html|.svg|.png]

The file is performance.json or --file FILE: a small JSON that a repository commits. SWEEP is the name of a sweep in the
MLflow store of --dir DIR or --store URI, by default the last one. Several sweeps of the same work are runs of one
version.

compare  compare these runs with the file's, of equal work on equal hardware. Exit code 0: not slower. 1: slower. 3:
         cannot be told; how many more runs tell. 2: nothing to compare, or invalid arguments
append   add these runs to the file, and create it if need be
  --new-level     the runs start a new level, with which later ones are compared: after a wanted change of the speed
list     the file's figures: the present level of each work and device, and what runs differ by
plot     a picture of the history, with versions and drivers that changed; by default FILE.html

--threshold     the loss that is tolerated, 2%: a loss of 1.5 times as much is found in 90% of cases or more
--between-runs  standard deviation of equal runs, 2%: assumed as long as fewer than 12 runs measure it
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sweeper.cli.output_file import writing
from sweeper.cli.parser import CommandParser, fraction
from sweeper.tracking.mlflow_store import check_uri, default_uri
from workloads.api.errors import UserInputError, suggest

if TYPE_CHECKING:
    from sweeper.commands.history.new_runs import NewRun

VERBS = ("compare", "append", "list", "plot")
IMAGES = (".html", ".svg", ".png")


def main(words: list[str]) -> None:
    """Run the command. The exit codes are in the help."""
    parser = CommandParser("sweeper history", __doc__)
    parser.add_argument("words", nargs="*", metavar="SWEEP")
    parser.add_argument("--file", type=Path, default=Path("performance.json"))
    parser.add_argument("--dir", default=".")
    for name in ("--store", "--junit", "--markdown", "--out"):
        parser.add_argument(name)
    parser.add_argument("--new-level", action="store_true")
    for name in ("--threshold", "--between-runs"):
        parser.add_argument(name, type=fraction, default=0.02)
    parser.run(run, words)


def run(args: argparse.Namespace) -> int:
    """Run the verb. Returns the exit code."""
    verb, names = _split(args.words)
    _check_options(args, verb, names)
    if verb == "compare":
        return compare_runs(args, names)
    if verb == "append":
        return append_runs(args, names)
    return show_history(args) if verb == "list" else draw_history(args)


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb, which may be left out, and the names of sweeps."""
    if words and words[0] in VERBS:
        return words[0], list(words[1:])
    return "compare", list(words)


def _check_options(args: argparse.Namespace, verb: str, names: Sequence[str]) -> None:
    """Refuse what the verb has no use for: it would be ignored."""
    belongs = {"--junit": "compare", "--markdown": "compare", "--new-level": "append", "--out": "plot"}
    for option, owner in belongs.items():
        if getattr(args, option.removeprefix("--").replace("-", "_")) and verb != owner:
            raise UserInputError(f"{option}: belongs to `{owner}`, not to `{verb}`")
    if names and verb in ("list", "plot"):
        raise UserInputError(f"{names[0]}: `{verb}` shows the whole file and takes no sweep")


def read_runs(args: argparse.Namespace, names: Sequence[str]) -> list[NewRun]:
    """Read the runs of the sweeps from the store that the arguments name."""
    from sweeper.commands.history import new_runs
    from sweeper.results import mlflow_results  # pandas takes half a second: not for invalid arguments

    uri = args.store or default_uri(Path(args.dir))
    if not uri.startswith("sqlite:"):
        check_uri(uri, "--store ")  # MLflow would try for minutes
    try:
        return new_runs.read_runs(mlflow_results.read(uri), names)
    except UserInputError as error:
        close = [name for name in names if suggest(name, VERBS).endswith("?")]
        raise UserInputError(f"{error} {suggest(close[0], VERBS)}" if close else str(error)) from error


def compare_runs(args: argparse.Namespace, names: Sequence[str]) -> int:
    """Print the comparison, and write the files for a pipeline. Returns the exit code of the worst verdict."""
    from sweeper.commands.history import new_runs, output, reference_file
    from sweeper.results.runs import EXIT_CODES, Gate, find_worst

    gate = Gate(args.threshold, args.between_runs)
    known = reference_file.read(args.file)
    compared, unknown = new_runs.compare(known, read_runs(args, names), gate)
    worst = find_worst([item.result for item in compared])
    if worst is None:
        first = unknown[0]
        raise UserInputError(f"--file {args.file}: {first.new[-1].sweep}: {first.reason}")
    lines = output.build_lines(compared, unknown)
    note = f"At a threshold of {gate.threshold:.3g}, against the runs of {args.file.name}."
    print("\n".join(map(str, lines)))
    print(f"verdict: {worst.verdict}, at a threshold of {gate.threshold:g}")
    if args.markdown:
        _write(args.markdown, output.build_markdown(lines, note), "--markdown")
    if args.junit:
        _write(args.junit, output.build_junit(lines), "--junit")
    return EXIT_CODES[worst.verdict]


def append_runs(args: argparse.Namespace, names: Sequence[str]) -> int:
    """Add the runs to the file and print what it has now."""
    from sweeper.commands.history import new_runs, reference_file
    from sweeper.common.format import count
    from sweeper.results.runs import Gate

    gate = Gate(args.threshold, args.between_runs)
    known = reference_file.read(args.file) if args.file.exists() else reference_file.History()
    runs = read_runs(args, names)
    longer = new_runs.append(known, runs, gate, new_level=args.new_level)
    reference_file.write(args.file, longer)
    for new in runs:
        series = longer.find(new.identity)
        total = count(len(series.level) if series else 0, "run")
        print(f"{new.run.sweep}: {new.run.value:g} {new.identity.unit} on {new.identity.device}, {total} at its level")
    print(args.file)
    return 0


def show_history(args: argparse.Namespace) -> int:
    """Print the figures of the file."""
    from rich.console import Console

    from sweeper.commands.history import output, reference_file
    from sweeper.pages.terminal import draw, terminal_width

    table = output.build_table(reference_file.read(args.file))
    console = Console(width=terminal_width(), highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(draw(table.heading, table.rows, output.MIN_COLUMNS, console.width))
    return 0


def draw_history(args: argparse.Namespace) -> int:
    """Write a picture of the file and print its path."""
    from sweeper.commands.history import picture, reference_file

    path = Path(args.out) if args.out else args.file.with_suffix(".html")
    if path.suffix not in IMAGES:
        raise UserInputError(f"--out {path}: unknown format. {suggest(path.suffix, IMAGES)}")
    known = reference_file.read(args.file)
    if not known.series:
        raise UserInputError(f"--file {args.file}: the history is empty: `python -m sweeper history append` adds a run")
    if path.suffix == ".html":
        _write(str(path), picture.build_page(known, args.file.name), "--out")
    else:
        picture.write_image(known, path)
    print(path)
    return 0


def _write(path: str, text: str, option: str) -> None:
    with writing(option, Path(path)):
        Path(path).write_text(text)
