"""Read results.

    python -m sweeper.report [--dir DIR] [--store URI] [--experiment NAME] [--sweep NAME] [--price-per-hour P]
                             [--format html|markdown|csv|json|png] [--out FILE]
    python -m sweeper.report --compare A B
    python -m sweeper.report --baseline A [--sweep B] [--threshold 0.02]
    python -m sweeper.report leaderboard [--dir DIR] [--type bf16] [--json] [--send URL]

Without a verb: what ran where, the best of each device at each kind of work, and pictures, from the MLflow store in
DIR or the one at URI. HTML goes to report.html, one file that opens offline; png is an image for each kind of work,
report_….png: training in nine panels, other work by its speed; the other formats go to standard output.

--compare     two sweeps, where they did the same work: which is faster, with both intervals, or that none is
--baseline    the same of an earlier sweep and the last one (or --sweep); exit code 1 where it is slower by more than
              the threshold and outside both intervals, 2 where nothing compares
leaderboard   the highest matrix rates measured here (workload=matmul keeps them in DIR/rates.json) beside those that
              others have published; rates with different statistics do not compare
  --json      what --send would send, and nothing else
  --send URL  post exactly that to a collection address; nothing is ever sent without it
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from sweeper.cli.parser import CommandParser
from sweeper.common.errors import UserInputError, suggest
from sweeper.planning import ceilings
from sweeper.report import leaderboard
from sweeper.tracking.mlflow_store import check_uri, default_uri
from sweeper.ui import tables
from sweeper.ui.tables import terminal_width

FORMATS = ("html", "markdown", "csv", "json", "png")


def main() -> None:
    """The command line. Exit code 2 for what is said wrongly, 1 for a regression."""
    words = CommandParser("sweeper.report", __doc__)
    words.add_argument("verb", nargs="?")
    words.add_argument("--dir", default=".")
    for name in ("--type", "--send", "--store", "--experiment", "--sweep", "--baseline", "--out"):
        words.add_argument(name)
    words.add_argument("--compare", nargs=2)
    words.add_argument("--format", default="html")
    words.add_argument("--threshold", type=float, default=0.02)
    words.add_argument("--price-per-hour", type=float)
    words.add_argument("--json", action="store_true")
    words.run(show)


def show(said: argparse.Namespace) -> int:
    """What the verb says; the exit code."""
    if said.verb == "leaderboard":
        show_leaderboard(Path(said.dir), said.type, said.json, said.send)
        return 0
    if said.verb is not None:
        raise UserInputError(f"{said.verb}: there is no such report; {suggest(said.verb, ['leaderboard'])}")
    return show_report(said)


def show_report(said: argparse.Namespace) -> int:
    """Write the report, or compare; the exit code."""
    if said.format not in FORMATS:
        raise UserInputError(f"--format {said.format}: {suggest(said.format, FORMATS)}")
    from sweeper.report import compare, store, summary  # MLflow takes seconds to import: not for a wrong word

    uri = said.store or default_uri(Path(said.dir))
    if not uri.startswith("sqlite:"):
        check_uri(uri, "--store ")  # MLflow would try for minutes
    if said.compare or said.baseline:
        stored = store.read(uri, said.experiment)
        one, other = said.compare or (said.baseline, said.sweep or compare.last(stored, said.baseline))
        lines, worse = compare.sweeps(stored, one, other, said.threshold)
        print("\n".join(lines))
        if said.baseline and worse is None:
            raise UserInputError(f"--baseline {one}: nothing of {other} compares with it")
        return int(bool(said.baseline and worse))
    stored = store.read(uri, said.experiment, said.sweep)
    if said.format == "png":
        from sweeper.report import png

        paths = list(png.images(stored.best_results, Path(said.out or "report.png")))
        if not paths:
            raise UserInputError("--format png: there is no complete trial to draw")
        print("\n".join(map(str, paths)))
        return 0
    tables = summary.tables(stored, said.price_per_hour)
    if not tables:
        raise UserInputError("there is nothing to show: no sweep, and no imported result that has tokens/s")
    if said.format == "html":
        from sweeper.report import charts, page

        path = Path(said.out or "report.html")
        path.write_text(page.page("sweeper: results", tables, list(charts.figures(stored))))
        print(path)
        return 0
    if said.format == "markdown":
        text = summary.markdown(tables)
    else:
        from sweeper.report import export

        text = export.csv(stored) if said.format == "csv" else export.json_of(stored, tables)
    if said.out:
        Path(said.out).write_text(text + "\n")
        print(said.out)
    else:
        print(text)
    return 0


def show_leaderboard(folder: Path, dtype: str | None, as_json: bool, send_to: str | None) -> None:
    """Print the table or what would be sent, or send it. Raises UserInputError if there is nothing to show or send."""
    if not folder.is_dir():
        raise UserInputError(f"--dir {folder}: there is no such directory")
    kept = ceilings.read(folder)
    if (as_json or send_to) and not kept:
        raise UserInputError(f"nothing was measured in {folder.resolve()}: `python -m sweeper` does")
    if as_json or send_to:
        print(leaderboard.payload(kept))
        if send_to:
            print(f"sent to {send_to}: {leaderboard.send(kept, send_to)}", file=sys.stderr)
        return
    lines = [cells for cells in leaderboard.rows(kept) if dtype is None or cells[1].startswith(dtype)]
    if not lines:
        raise UserInputError(f"--type {dtype}: {suggest(dtype or '', {cells[1] for cells in leaderboard.rows(kept)})}")
    out = Console(width=terminal_width(), highlight=False, soft_wrap=True, markup=False, emoji=False)
    out.print(tables.draw(leaderboard.HEADING, lines, 3, out.width))
    if not kept:
        out.print(f"nothing was measured in {folder.resolve()} yet: `python -m sweeper` does")


if __name__ == "__main__":
    main()
