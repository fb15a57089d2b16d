"""Print text and tables on the terminal; tables omit columns if it is narrow."""

import re
import shutil
import sys
from collections.abc import Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from sweeper.common.format import shorten

MAX_WORD = 60  # characters of a word, such as a path; a longer one is shortened
MAX_UNBROKEN = 30  # characters of a word that is not broken across lines
WIDTH_OF_FILES = 200  # without a terminal, wide enough that nothing is wrapped
INDENT = 9  # of a line's text, after its name
_COMMAND = re.compile(r"(retry|certify|resume|extend|review|again) ")
_WORD = re.compile(r"""\s*(?:'[^']*'|"[^"]*"|\S)+""")  # a quoted word includes its spaces
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")


def terminal_width() -> int:
    """Return the terminal's width, or a large one for a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_FILES


def open_console(file: IO[str] | None = None, *, soft_wrap: bool = True) -> Console:
    """Return a console as wide as standard output that prints unmodified text to standard output or the file."""
    return Console(file=file, width=terminal_width(), highlight=False, soft_wrap=soft_wrap, markup=False, emoji=False)


def wrap_line(line: str, width: int, file: IO[str] | None = None) -> str:
    """Wrap a line to this width between words, and indent the continuation lines.

    Only lines for a terminal (standard output or the file) are wrapped. Longer words stay whole. The lines of a command
    end in a backslash, so that they can be pasted into a shell.
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
    """Return a table with its first `minimum` columns and all others that fit; the caption lists the hidden ones."""
    cells = [[_LONG_WORD.sub(lambda word: shorten(word[0], MAX_WORD), cell) for cell in row] for row in cells]
    columns = [list(column) for column in zip(heading, *cells, strict=True)]
    words = [[len(word) for text in column for word in text.split() or [""]] for column in columns]
    narrowest = [min(max(lengths), MAX_UNBROKEN) for lengths in words]

    def free_width(sizes: Sequence[int]) -> int:
        return width - sum(sizes) - 3 * len(sizes) + 1

    shown = len(heading)
    while shown > minimum and free_width(narrowest[:shown]) < 0:
        shown -= 1
    if heading[shown : shown + 1] == ["to"] and shown > minimum:  # half an interval is useless
        shown -= 1
    sizes = narrowest[:shown]
    wanted = [max(map(len, column)) for column in columns]
    for _ in range(free_width(sizes)):  # narrow columns grow first, each up to its wanted width
        growing = [place for place, size in enumerate(sizes) if size < wanted[place]]
        if not growing:
            break
        sizes[min(growing, key=sizes.__getitem__)] += 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", caption_justify="left")
    if hidden := heading[shown:]:
        table.caption = f"hidden, too narrow: {', '.join(hidden)}"
    for column, size in zip(columns, sizes, strict=False):
        is_numeric = all(re.fullmatch(r"[-+\d.e,%—]*", text) for text in column[1:])
        table.add_column(column[0], justify="right" if is_numeric else "left", width=size, overflow="fold")
    for row in cells:
        table.add_row(*row[:shown])
    return table
