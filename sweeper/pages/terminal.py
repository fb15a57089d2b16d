"""Tables on the terminal that leave out columns where it is narrow."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence

from rich import box
from rich.table import Table

from sweeper.common.format import shorten

MAX_WORD = 60  # characters of a word, such as a path; a longer one is shortened
MAX_UNBROKEN = 30  # of a word that is not broken into lines
WIDTH_OF_FILES = 200  # where there is no terminal: wide enough that nothing is wrapped


def terminal_width() -> int:
    """Return the terminal's width, of a file a large one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_FILES


def draw(heading: Sequence[str], cells: Sequence[Sequence[str]], minimum: int, width: int) -> Table:
    """Return a table with its first `minimum` columns and as many more as fit into `width`.

    The caption names the columns that do not fit. Words are wrapped, numbers never.
    """
    long_word = re.compile(rf"\S{{{MAX_WORD + 1},}}")
    cells = [[long_word.sub(lambda word: shorten(word[0], MAX_WORD), cell) for cell in row] for row in cells]
    columns = [list(column) for column in zip(heading, *cells, strict=True)]
    words = [[len(word) for text in column for word in text.split() or [""]] for column in columns]
    narrowest = [min(max(lengths), MAX_UNBROKEN) for lengths in words]
    shown = len(heading)
    while shown > minimum and _free_width(narrowest[:shown], width) < 0:
        shown -= 1
    if heading[shown : shown + 1] == ["to"] and shown > minimum:  # half an interval is useless
        shown -= 1
    widths = _distribute_width(narrowest[:shown], [max(map(len, column)) for column in columns], width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", caption_justify="left")
    if hidden := heading[shown:]:
        table.caption = f"hidden, too narrow: {', '.join(hidden)}"
    for column, size in zip(columns, widths, strict=False):
        is_numeric = all(re.fullmatch(r"[-+\d.e,%—]*", text) for text in column[1:])
        table.add_column(column[0], justify="right" if is_numeric else "left", width=size, overflow="fold")
    for row in cells:
        table.add_row(*row[:shown])
    return table


def _free_width(widths: Sequence[int], width: int) -> int:
    """Return the characters that columns of these widths leave of a line."""
    return width - sum(widths) - 3 * len(widths) + 1


def _distribute_width(narrowest: Sequence[int], wanted: Sequence[int], width: int) -> list[int]:
    """Return the widths of columns, each up to what it wants, the narrow ones first."""
    widths = list(narrowest)
    for _ in range(_free_width(widths, width)):
        growing = [place for place, size in enumerate(widths) if size < wanted[place]]
        if not growing:
            break
        widths[min(growing, key=widths.__getitem__)] += 1
    return widths
