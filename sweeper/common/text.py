"""Texts of others in our output: values of parameters, lines of logs and names in files may hold anything."""

from __future__ import annotations

import re

# Control characters, also those of eight bits, and what reverses or hides text (Unicode's bidirectional and format
# characters, and its separators of lines). A terminal would obey them.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_FORMULA = re.compile(r"[=+\-@\t\r]")
_NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?%?|[-+]?(nan|inf(inity)?)", re.IGNORECASE)


def printable(text: str) -> str:
    """Return the text with characters that a terminal would obey as escapes: `\\x1b`. Newlines and tabs stay."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return a printable text with its newlines and tabs as escapes too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def shorten(text: str, length: int) -> str:
    """Return the text, or its beginning and its end with … between them, in at most so many characters."""
    if len(text) <= length:
        return text
    end = length // 3
    return f"{text[: length - end - 1]}…{text[-end:]}"


def spreadsheet_cell(value: object) -> object:
    """Return a value for a CSV file. A spreadsheet would take a text that begins like a formula for one: it gets a '.

    As OWASP's page on CSV injection advises. Numbers stay, also those that are texts.
    """
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
