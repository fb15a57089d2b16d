"""Suggestions for misspelled words."""

import difflib
from collections.abc import Iterable


def suggest(word: str, allowed: Iterable[str], prefix: str = "") -> str:
    """Return a message about an unknown word: the nearest word, after `prefix`, and all available words."""
    names = sorted(allowed)
    return f"{hint(word, names, prefix)} Available: {', '.join(names) or 'none'}.".strip()


def hint(word: str, allowed: Iterable[str], prefix: str = "") -> str:
    """Return a question to append to a sentence, which suggests the nearest allowed word; empty if none is near."""
    close = nearest(word, allowed)
    return f" Did you mean {prefix}{close}?" if close else ""


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word nearest to `word`, ignoring case; words that start with `word` take precedence."""
    names = {name.lower(): name for name in allowed}
    begun = [name for name in names if word and name.startswith(word.lower())]
    close = difflib.get_close_matches(word.lower(), begun or names, n=1, cutoff=0.0 if begun else 0.6)
    return names[close[0]] if close else None
