"""Report results.

    python -m sweeper report [--dir DIR] [--store URI] [--experiment NAME] [--sweep NAME]
                             [--format html|markdown|csv|json|png] [--out FILE]
                             [--price-per-hour P] [--price-per-kwh P] [--within-gpu-hours H] [--within-cost C]
    python -m sweeper report --compare A B
    python -m sweeper report --baseline A [--sweep B] [--threshold 0.02] [--between-runs 0.02]
    python -m sweeper report leaderboard [--dir DIR] [--type bf16] [--json] [--send URL]

Without a verb: the sweeps, the best result of each device for each kind of work, and charts, from the MLflow store in
DIR or the one at URI. HTML is written to report.html, one file that opens offline. png writes an image for each kind of
work, report_….png (training in nine panels, other work by its speed), and one for each Pareto front of several
objectives. The other formats go to standard output.

--price-per-hour, --price-per-kwh   of a GPU and of electricity: the cost of tokens
--within-gpu-hours, --within-cost   of each sweep only the trials that had ended when it had used so many GPU-hours, or
              so much money at --price-per-hour: what a smaller budget would have found, its Pareto front too
--compare     compare two sweeps where they did the same work: which is faster, with all 95% intervals, or that it
              cannot be told; and point by point, where both measured the same parameters
--baseline    compare an earlier sweep with the latest one (or --sweep). Exit code 0: not slower, a loss of 1.5 times
              the threshold is excluded. 1: slower, by more than the threshold and by more than runs differ. 3: cannot
              be told; how many more runs a verdict needs. 2: there is nothing to compare
  --between-runs  standard deviation of equal runs, as a fraction. One run does not show it: 0.02 is assumed, so that
              a loss of up to 9% cannot be told from chance. python -m sweeper history measures it, and compares several
              runs: two equal sweeps alone mostly end with 3
leaderboard   the highest matmul rates measured here (workload=matmul stores them in DIR/matmul_ceilings.json) next to
              published ones; rates with different statistics are not comparable
  --json      print what --send would send, and nothing else
  --send URL  post exactly that to a collection address; without it nothing is ever sent
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sweeper.cli.output_file import check_output_file, writing
from sweeper.cli.parser import CommandParser, fraction
from sweeper.commands.report import leaderboard
from sweeper.metrics.derivation import Prices
from sweeper.pages.terminal import draw, terminal_width
from sweeper.preflight import ceilings
from sweeper.tracking.mlflow_store import check_uri, default_uri
from workloads.api.errors import UserInputError, suggest

if TYPE_CHECKING:
    from sweeper.commands.report.fronts import SweepFront
    from sweeper.pages.html_page import Table
    from sweeper.results.mlflow_results import Stored

FORMATS = ("html", "markdown", "csv", "json", "png")
SEVERAL_RUNS = "which python -m sweeper history compares; --baseline takes one of each"
DEFAULT_FRACTION = 0.02  # of --threshold and --between-runs
MIN_LEADERBOARD_COLUMNS = 3  # GPU, type and rate are shown in any terminal


def main(words: list[str]) -> None:
    """Run the command. The exit code is 2 for invalid input; those of --baseline are in the help."""
    parser = CommandParser("sweeper report", __doc__)
    parser.add_argument("verb", nargs="?")
    parser.add_argument("--dir", default=".")
    for name in ("--type", "--send", "--store", "--experiment", "--sweep", "--baseline", "--out"):
        parser.add_argument(name)
    parser.add_argument("--compare", nargs=2)
    parser.add_argument("--format", default="html")
    for name in ("--threshold", "--between-runs"):
        parser.add_argument(name, type=fraction)
    for name in ("--price-per-hour", "--price-per-kwh", "--within-gpu-hours", "--within-cost"):
        parser.add_argument(name, type=float)
    parser.add_argument("--json", action="store_true")
    parser.run(run, words)


def run(args: argparse.Namespace) -> int:
    """Run the verb. Returns the exit code."""
    if args.verb == "leaderboard":
        return show_leaderboard(args)
    if args.verb is not None:
        raise UserInputError(f"{args.verb}: unknown report. {suggest(args.verb, ['leaderboard'])}")
    if args.format not in FORMATS:
        raise UserInputError(f"--format {args.format}: unknown format. {suggest(args.format, FORMATS)}")
    if args.compare or args.baseline:
        return compare_sweeps(args)
    for name, value in (("--threshold", args.threshold), ("--between-runs", args.between_runs)):
        if value is not None:
            raise UserInputError(f"{name} {value:g}: is for --baseline and --compare")
    return write_report(args)


def read_store(args: argparse.Namespace, sweep: str | None = None) -> Stored:
    """Read the store that the arguments name: all of it, or one sweep."""
    from sweeper.results import mlflow_results  # pandas takes half a second: not for invalid arguments

    uri = args.store or default_uri(Path(args.dir))
    if not uri.startswith("sqlite:"):
        check_uri(uri, "--store ")  # MLflow would try for minutes
    return mlflow_results.read(uri, args.experiment, sweep)


def compare_sweeps(args: argparse.Namespace) -> int:
    """Print the comparison of two sweeps. Returns the exit code of the verdict where there is a baseline.

    Raises:
        UserInputError: the sweep has no result that is comparable with the baseline's.
    """
    from sweeper.results.runs import EXIT_CODES, Gate, Verdict

    values = [DEFAULT_FRACTION if value is None else value for value in (args.threshold, args.between_runs)]
    gate = Gate(*values)
    stored = read_store(args)
    from sweeper.commands.report import compare
    from sweeper.results.comparison import describe_more_runs

    if args.compare:
        first, second = args.compare
    else:
        first, second = args.baseline, args.sweep or compare.find_latest_sweep(stored, args.baseline)
    lines, comparison = compare.compare_sweeps(stored, first, second, gate)
    print("\n".join([*lines, *compare.compare_points(stored, first, second)]))
    if not args.baseline:
        return 0
    if comparison is None:
        raise UserInputError(f"--baseline {first}: {second} has no comparable result")
    cannot_be_told = comparison.verdict is Verdict.CANNOT_BE_TOLD
    more = f": {describe_more_runs(comparison)}, {SEVERAL_RUNS}" if cannot_be_told else ""
    assumed = f"at a threshold of {gate.threshold:g} and {gate.between_runs:g} between runs (assumed)"
    print(f"verdict: {comparison.verdict}, {assumed}{more}")
    return EXIT_CODES[comparison.verdict]


def read_prices(args: argparse.Namespace) -> Prices | None:
    """Return the prices of the arguments; None without any. Raises UserInputError for a negative one."""
    prices = {"--price-per-hour": args.price_per_hour, "--price-per-kwh": args.price_per_kwh}
    for name, price in prices.items():
        if price is not None and not price >= 0:
            raise UserInputError(f"{name} {price:g}: a price is 0 or more")
    return None if set(prices.values()) == {None} else Prices(*prices.values())


def budget_gpu_hours(args: argparse.Namespace) -> float | None:
    """Return the GPU-hours that the arguments cut each sweep to; None for no limit.

    Raises:
        UserInputError: a limit is not above 0, both are given, or the price of a GPU is unknown.
    """
    hours, cost = args.within_gpu_hours, args.within_cost
    if hours is not None and cost is not None:
        raise UserInputError("--within-gpu-hours and --within-cost: give one of them")
    for name, limit in (("--within-gpu-hours", hours), ("--within-cost", cost)):
        if limit is not None and not limit > 0:
            raise UserInputError(f"{name} {limit:g}: must be above 0")
    if cost is None:
        return hours
    if not args.price_per_hour:
        raise UserInputError(f"--within-cost {cost:g}: the price of a GPU is unknown; add --price-per-hour")
    return cost / args.price_per_hour


def write_report(args: argparse.Namespace) -> int:
    """Write the report in the format of the arguments."""
    if args.out:
        check_output_file("--out", Path(args.out))
    prices, gpu_hours = read_prices(args), budget_gpu_hours(args)
    stored = read_store(args, args.sweep)
    if gpu_hours is not None:
        stored = stored.cut_to_budget(gpu_hours)
    if args.format == "png":
        write_images(stored, Path(args.out or "report.png"))
        return 0
    from sweeper.commands.report import fronts, report_tables

    found = fronts.find_fronts(stored)
    tables = report_tables.build_tables(stored, prices, map(fronts.build_table, found))
    if not tables:
        raise UserInputError("the store has nothing to report: no sweep, and no imported result with tokens/s")
    if args.format == "html":
        write_page(stored, tables, found, Path(args.out or "report.html"))
    else:
        write_text(report_tables.build_text(stored, tables, args.format), args.out)
    return 0


def write_images(stored: Stored, path: Path) -> None:
    """Write an image for each kind of work and each front, and print the paths."""
    from sweeper.commands.report import fronts, images

    with writing("--out", path):
        paths = list(images.write_images(stored.best_results, fronts.find_fronts(stored), path))
    if not paths:
        raise UserInputError("--format png: there is no complete trial to draw")
    print("\n".join(map(str, paths)))


def write_page(stored: Stored, tables: Sequence[Table], found: Sequence[SweepFront], path: Path) -> None:
    """Write the HTML report and print its path."""
    from sweeper.commands.report import charts, fronts, imported_charts, overview
    from sweeper.pages import html_page

    drawn = [
        *map(fronts.build_chart, found),
        *charts.build_charts(stored),
        *imported_charts.build_charts(stored.imported),
    ]
    with writing("--out", path):
        path.write_text(html_page.build_page("sweeper: results", tables, drawn, overview.describe(stored, found)))
    print(path)


def write_text(text: str, path: str | None) -> None:
    """Write the text to a file and print its path; without a path print the text."""
    if path:
        with writing("--out", Path(path)):
            Path(path).write_text(text + "\n")
    print(path or text)


def show_leaderboard(args: argparse.Namespace) -> int:
    """Print the leaderboard, or the payload, or send it.

    Raises:
        UserInputError: there is nothing to show or to send.
    """
    folder = Path(args.dir)
    if not folder.is_dir():
        raise UserInputError(f"--dir {folder}: there is no such directory")
    rates = ceilings.read(folder)
    no_rates = f"there is no measured rate in {folder.resolve()}: run `python -m sweeper` to measure one"
    if args.json or args.send:
        if not rates:
            raise UserInputError(no_rates)
        print(leaderboard.build_payload(rates))
        if args.send:
            print(f"sent to {args.send}: {leaderboard.send_rates(rates, args.send)}", file=sys.stderr)
        return 0
    all_rows = leaderboard.build_rows(rates)
    rows = [cells for cells in all_rows if args.type is None or cells[1].startswith(args.type)]
    if not rows:
        raise UserInputError(
            f"--type {args.type}: unknown type. {suggest(args.type or '', {cells[1] for cells in all_rows})}"
        )
    console = Console(width=terminal_width(), highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(draw(leaderboard.HEADING, rows, MIN_LEADERBOARD_COLUMNS, console.width))
    if not rates:
        console.print(no_rates)
    return 0
