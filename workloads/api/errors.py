"""Errors that a user can act on, and suggestions for misspelt words."""

import difflib
from collections.abc import Iterable


class UserInputError(Exception):
    """Invalid input. Its message is all that is shown: it names the key and what is allowed. The exit code is 2."""


def describe_os_error(error: OSError) -> str:
    """Return the reason of a system error and the file it concerns."""
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"


def suggest(word: str, allowed: Iterable[str], prefix: str = "") -> str:
    """Return the sentences that follow an unknown word: the available ones, and the nearest behind `prefix`."""
    names = sorted(allowed)
    close = nearest(word, names)
    available = f"Available: {', '.join(names) or 'none'}."
    return f"{available} Did you mean {prefix}{close}?" if close else available


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word that a misspelt one is closest to: whatever its case, the only one that it begins."""
    names = {name.lower(): name for name in allowed}
    begun = [name for name in names if word and name.startswith(word.lower())]
    close = begun if len(begun) == 1 else difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return names[close[0]] if close else None


def message_of(error: BaseException) -> str:
    """Return an error's message; empty if it has none, or none that it can return."""
    try:
        return str(error).strip()
    except Exception:  # of its own __str__
        return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (message_of(error).splitlines() or [type(error).__name__])[0]
