"""What looks like a secret is masked wherever it would be kept or shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# A name whose last words are of a secret: WANDB_API_KEY, hf-token, PGPASSWORD; and not tokens_per_s.
_LAST = r"token|secret|\w{0,60}password|passwd|passphrase|credentials?|(?:api|access|private|secret)[_-]?key"
_SECRET = rf"(?:[\w.-]{{0,60}}[_.-])?(?:{_LAST})"
_SAID = re.compile(rf"(?i)(?<![\w-])({_SECRET})(['\"]?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s}}]+)")
_OPTION = re.compile(rf"(?i)(?<!\S)(--{_SECRET})(\s+)([^\s-]\S*)")
_URL = re.compile(
    r"(?<!\w)(\w{1,20}(?:\+\w{1,20})?://[^/\s:@]{0,200}):[^/\s@]{0,1000}@"
)  # bounded: logs have long words


def mask(text: str) -> str:
    """The text without the password of any URL in it, and without what is said of a name that looks like a secret's."""
    return _OPTION.sub(r"\1\2***", _SAID.sub(r"\1\2***", _URL.sub(r"\1:***@", text)))


def masked(plain: Any) -> Any:
    """The same mapping or list, without the values of keys that look like a secret's, and every text in it masked."""
    if isinstance(plain, dict):
        return {key: "***" if is_secret(str(key)) else masked(value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        pairs = zip(["", *plain], plain, strict=False)  # what follows the name of one is it
        return ["***" if isinstance(name, str) and is_secret(name) else masked(each) for name, each in pairs]
    return mask(plain) if isinstance(plain, str) else plain


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Of a command line: the whole of what is said of such a name."""
    split = [argument.partition("=") for argument in arguments]
    return [f"{name}=***" if said and is_secret(name) else mask(f"{name}{said}{text}") for name, said, text in split]


def is_secret(name: str) -> bool:
    """Whether it looks like the name of one."""
    return re.fullmatch(_SECRET, name.lstrip("+~-"), re.IGNORECASE) is not None
