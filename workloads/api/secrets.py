"""Masking of whatever looks like a secret before it is stored or shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# A name that ends like a secret's: WANDB_API_KEY, hf-token, PGPASSWORD; not tokens_per_s.
_ENDING = r"token|secret|\w{0,60}password|passwd|passphrase|credentials?|(?:api|access|private|secret)[_-]?key"
_SECRET = rf"(?:[\w.-]{{0,60}}[_.-])?(?:{_ENDING})"
_ASSIGNMENT = re.compile(rf"(?i)(?<![\w-])({_SECRET})(['\"]?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s}}]+)")
_OPTION = re.compile(rf"(?i)(?<!\S)(--{_SECRET})(\s+)([^\s-]\S*)")
_URL = re.compile(
    r"(?<!\w)(\w{1,20}(?:\+\w{1,20})?://[^/\s:@]{0,200}):[^/\s@]{0,1000}@"
)  # bounded: logs have long words


def mask(text: str) -> str:
    """Return the text without passwords in URLs and without the values of names that look like a secret's."""
    return _OPTION.sub(r"\1\2***", _ASSIGNMENT.sub(r"\1\2***", _URL.sub(r"\1:***@", text)))


def masked(value: Any) -> Any:
    """Return the mapping or list with its texts masked, and the values of keys that look like a secret's replaced."""
    if isinstance(value, dict):
        return {key: "***" if is_secret(str(key)) else masked(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        pairs = zip(["", *value], value, strict=False)  # what follows a secret's name is its value
        return ["***" if isinstance(name, str) and is_secret(name) else masked(item) for name, item in pairs]
    return mask(value) if isinstance(value, str) else value


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line's arguments with the values of such names replaced."""
    split = [argument.partition("=") for argument in arguments]
    return [
        f"{name}=***" if equals and is_secret(name) else mask(f"{name}{equals}{text}") for name, equals, text in split
    ]


def is_secret(name: str) -> bool:
    """Return whether the name looks like a secret's."""
    return re.fullmatch(_SECRET, name.lstrip("+~-"), re.IGNORECASE) is not None
