"""Read results.

    python -m sweeper.report leaderboard [--dir DIR] [--type bf16] [--json] [--send URL]

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

from sweeper import rates, table
from sweeper.report import leaderboard
from sweeper.said import SaidWrongly, nearest
from sweeper.summary import shown_width


def main() -> None:
    """The command line. Exit code 2 for what is said wrongly."""
    parser = argparse.ArgumentParser("python -m sweeper.report", usage=__doc__, add_help=False)
    parser.add_argument("verb", nargs="?")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--type")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--send")
    parser.add_argument("-h", "--help", action="store_true")
    said = parser.parse_args()
    if said.help or said.verb is None:
        print(__doc__)
        return
    try:
        if said.verb != "leaderboard":
            raise SaidWrongly(f"{said.verb}: there is no such report; {nearest(said.verb, ['leaderboard'])}")
        show_leaderboard(Path(said.dir), said.type, said.json, said.send)
    except SaidWrongly as error:
        print(f"sweeper.report: {error}", file=sys.stderr)
        sys.exit(2)


def show_leaderboard(folder: Path, dtype: str | None, as_json: bool, send_to: str | None) -> None:
    """Print the table, or what would be sent, or send it. Raises SaidWrongly where there is nothing to show or send."""
    if not folder.is_dir():
        raise SaidWrongly(f"--dir {folder}: there is no such directory")
    kept = rates.read(folder)
    if (as_json or send_to) and not kept:
        raise SaidWrongly(f"nothing was measured in {folder.resolve()}: `python -m sweeper` does")
    if as_json or send_to:
        print(leaderboard.payload(kept))
        if send_to:
            print(f"sent to {send_to}: {leaderboard.send(kept, send_to)}", file=sys.stderr)
        return
    lines = [cells for cells in leaderboard.rows(kept) if dtype is None or cells[1].startswith(dtype)]
    if not lines:
        raise SaidWrongly(f"--type {dtype}: {nearest(dtype or '', {cells[1] for cells in leaderboard.rows(kept)})}")
    out = Console(width=shown_width(), highlight=False, soft_wrap=True, markup=False, emoji=False)
    out.print(table.draw(leaderboard.HEADING, lines, 3, out.width))
    if not kept:
        out.print(f"nothing was measured in {folder.resolve()} yet: `python -m sweeper` does")


if __name__ == "__main__":
    main()
