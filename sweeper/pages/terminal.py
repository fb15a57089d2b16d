"""Print text and tables on the terminal. On a narrow terminal, tables omit columns."""

import re
import shutil
import sys
from collections.abc import Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from sweeper.common.format import find_numeric, shorten

MAX_WORD = 60  # characters; longer words, such as paths, are shortened
MAX_UNBROKEN = 30  # characters; longer words may be broken across lines
WIDTH_OF_FILES = 200  # wide enough that nothing is wrapped without a terminal
INDENT = 9  # the column where a line's text starts, after the name
_COMMAND = re.compile(r"(retry|certify|resume|extend|review|again) ")
_WORD = re.compile(r"""\s*(?:'[^']*'|"[^"]*"|\S)+""")  # spaces in quotes do not end a word
# A number stays with its unit, and with the end of its interval.
_CELL_WORD = re.compile(r"\(\S+ to \S+|\d\S* (?!\()(?:to )?\S+|\S+")
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")


def terminal_width() -> int:
    """Return the terminal's width, or a large width if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_FILES


def open_console(file: IO[str] | None = None, *, soft_wrap: bool = True) -> Console:
    """Return a console that prints text unmodified to standard output or `file`, as wide as standard output."""
    return Console(file=file, width=terminal_width(), highlight=False, soft_wrap=soft_wrap, markup=False, emoji=False)


def wrap_line(line: str, width: int, file: IO[str] | None = None) -> str:
    """Wrap a line between words to this width, and indent the continuation lines.

    Lines are wrapped only if the output (`file` or standard output) is a terminal. Long words stay whole. Wrapped
    commands get a backslash at the end of each line so that they can be pasted into a shell.
    """
    if len(line) <= width or not (file or sys.stdout).isatty():
        return line
    is_command, lines = bool(_COMMAND.match(line)), [""]
    for word in _WORD.findall(line):
        if len(lines[-1]) + len(word) > width - 2 * is_command and lines[-1].strip():
            lines.append(f"{' ' * INDENT}{word.lstrip()}")
        else:
            lines[-1] += word
    return (" \\\n" if is_command else "\n").join(text.rstrip() for text in lines)


def draw(heading: Sequence[str], cells: Sequence[Sequence[str]], minimum: int, width: int) -> Table:
    """Return a table of the first `minimum` columns and further columns that fit. The caption lists hidden columns."""
    cells = [[_LONG_WORD.sub(lambda word: shorten(word[0], MAX_WORD), cell) for cell in row] for row in cells]
    columns = [list(column) for column in zip(heading, *cells, strict=True)]
    words = [[len(word) for text in column for word in _CELL_WORD.findall(text) or [""]] for column in columns]
    narrowest = [min(max(lengths), MAX_UNBROKEN) for lengths in words]

    def free_width(sizes: Sequence[int]) -> int:
        return width - sum(sizes) - 3 * len(sizes) + 1

    shown = len(heading)
    while shown > minimum and free_width(narrowest[:shown]) < 0:
        shown -= 1
    if heading[shown : shown + 1] == ["to"] and shown > minimum:  # the lower bound alone is useless
        shown -= 1
    sizes = narrowest[:shown]
    wanted = [max(map(len, column)) for column in columns]
    for _ in range(free_width(sizes)):  # narrow columns grow first, up to the wanted width
        growing = [place for place, size in enumerate(sizes) if size < wanted[place]]
        if not growing:
            break
        sizes[min(growing, key=sizes.__getitem__)] += 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", caption_justify="left")
    if hidden := heading[shown:]:
        table.caption = f"hidden, too narrow: {', '.join(hidden)}"
    numeric = find_numeric(cells) or [False] * len(heading)
    for name, is_numeric, size in zip(heading, numeric, sizes, strict=False):
        table.add_column(name, justify="right" if is_numeric else "left", width=size, overflow="fold")
    for row in cells:
        table.add_row(*row[:shown])
    return table
