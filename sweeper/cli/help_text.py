"""The layout of help pages: wrapped text, and names with their meaning beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

# Where the meaning of a key starts: beside its name, or on a narrow terminal below it.
COLUMN, NARROW_COLUMN = 28, 8
NARROW = 72


def rows(pairs: Iterable[tuple[str, str]], width: int) -> str:
    """Return names with their meaning beside them, or below a long name."""
    column = COLUMN if width >= NARROW else NARROW_COLUMN
    lines = list[str]()
    for name, meaning in pairs:
        wrapped = wrap(meaning, width, " " * column).splitlines()
        if len(name) + 4 <= column and wrapped:
            wrapped[0] = f"  {name}{wrapped[0][len(name) + 2 :]}"
        else:
            lines.append(f"  {name}")
        lines += wrapped
    return "\n".join(lines)


def wrap(text: str, width: int, indent: str = "") -> str:
    """Return the text in lines of at most `width`. A line that is indented already stays as it is."""
    lines = list[str]()
    for paragraph in text.splitlines() or [""]:
        if paragraph.startswith(" ") or not paragraph:
            lines.append(paragraph)
        else:
            lines += textwrap.wrap(
                paragraph,
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
