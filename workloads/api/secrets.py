"""Mask everything that looks like a secret before it is stored or shown."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

SHORTEST_SECRET = 6  # characters; values of at least this length are masked everywhere
# Endings of secret names: WANDB_API_KEY, hf-token and PGPASSWORD match; tokens_per_s and flops_per_token do not.
_ENDING = (
    r"(?<!per[_.-])token|secret|\w{0,60}password|passwd|passphrase|credentials?|(?:api|access|private|secret)[_-]?key"
)
_SECRET = rf"(?:[\w.-]{{0,60}}[_.-])?(?:{_ENDING})"
_ASSIGNMENT = re.compile(rf"(?i)(?<![\w-])({_SECRET})(['\"]?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s}}]+)")
_VARIABLE = re.compile(rf"(?i)(?:{_SECRET}|\w+_key)")  # SIGNING_KEY; in logs, other words have this ending
_OPTION = re.compile(rf"(?i)(?<!\S)(--{_SECRET})(\s+)([^\s-]\S*)")
_URL = re.compile(
    r"(?<!\w)(\w{1,20}(?:\+\w{1,20})?://[^/\s:@]{0,200}):[^/\s@]{0,1000}@"
)  # bounded, because logs contain long words


def mask(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text, masking `secrets`, passwords in URLs, and values whose names look like secrets."""
    for secret in sorted(secrets, key=len, reverse=True):  # one secret may contain another
        text = text.replace(secret, "***")
    return _OPTION.sub(r"\1\2***", _ASSIGNMENT.sub(_masked_assignment, _URL.sub(r"\1:***@", text)))


def _masked_assignment(match: re.Match[str]) -> str:
    """Return the assignment with its value masked. Quoted values stay quoted, for JSON and TOML."""
    quote = match[3][0] if match[3][0] in "\"'" and match[3][-1] == match[3][0] else ""
    return f"{match[1]}{match[2]}{quote}***{quote}"


def masked(value: Any) -> Any:
    """Return the mapping or list with its strings masked and values replaced if their keys look like secrets."""
    if isinstance(value, dict):
        return {key: "***" if is_secret(str(key)) else masked(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        pairs = zip(["", *value], value, strict=False)  # the item after a secret's name is its value
        return ["***" if isinstance(name, str) and is_secret(name) else masked(item) for name, item in pairs]
    return mask(value) if isinstance(value, str) else value


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line's arguments, masking the values of arguments whose names look like secrets."""
    split = [argument.partition("=") for argument in arguments]
    return [
        f"{name}=***" if equals and is_secret(name) else mask(f"{name}{equals}{text}") for name, equals, text in split
    ]


def secret_values(arguments: Sequence[str], environment: Mapping[str, str]) -> set[str]:
    """Return the values whose names look like secrets, except values so short that other words could contain them."""
    values = {value for name, value in environment.items() if _VARIABLE.fullmatch(name)}
    for option, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = option.partition("=")
        if is_secret(name):
            values.add(value if equals else following)
    return {value for value in values if len(value) >= SHORTEST_SECRET}


def is_secret(name: str) -> bool:
    return re.fullmatch(_SECRET, name.lstrip("+~-"), re.IGNORECASE) is not None
