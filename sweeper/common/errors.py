"""What a user can say wrongly, and the one way it is answered: a line or two that name the key and what it may be."""

from __future__ import annotations

import contextlib
import difflib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class UserInputError(Exception):
    """The user's words cannot be followed. The message is all that is shown; the exit code is 2."""


def describe_os_error(error: OSError) -> str:
    """What the system refused, and for which file."""
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"


def nearest(word: str, allowed: Iterable[str], prefix: str = "") -> str:
    """What to say after an unknown word: the nearest right one if there is one, else all of them."""
    words = sorted(allowed)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"did you mean {prefix}{close[0]}?" if close else f"it may be {', '.join(words)}"


def build(cls: type[T], given: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls` from plain values, every one of them checked.

    The annotations are the schema: int, float, str, bool, `X | None`, Literal, nested dataclasses, and
    list, dict or Any, which are taken as they are; `metadata={"min": …, "max": …}` bounds a number.
    Raises SaidWrongly with the full key.
    """
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in given.items():
        full = f"{where}{key}"
        if key not in known:
            raise UserInputError(f"{full}: there is no such key; {nearest(key, known, where)}")
        values[key] = convert(hints[key], value, full)
        check_bounds(values[key], known[key].metadata, full)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise UserInputError(f"{where}{name}: has to be given ({describe(hints[name])})")
    try:
        return cls(**values)
    except ValueError as error:  # what the class itself asks of its values together
        raise UserInputError(f"{where.rstrip('.') or 'the configuration'}: {error}") from error


def convert(kind: Any, value: Any, full: str) -> Any:
    """`value` as `kind`, or SaidWrongly. A whole float passes for an int, an int for a float; nothing else bends."""
    if kind is Any:
        return value
    if get_origin(kind) in (Union, types.UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        if value is None and len(options) < len(get_args(kind)):
            return None
        for option in options[1:]:
            with contextlib.suppress(UserInputError):
                return convert(option, value, full)
        if len(options) > 1 and isinstance(value, str):
            raise UserInputError(f"{full}={value}: it has to be {describe(kind)}")
        kind = options[0]
    if is_dataclass(kind) and isinstance(value, Mapping):
        return build(kind, {str(key): inner for key, inner in value.items()}, f"{full}.")  # type: ignore[arg-type]
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif get_origin(kind) in (list, dict):
        if isinstance(value, get_origin(kind)):
            return value
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserInputError(f"{full}={value}: it has to be finite")
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif kind is int and isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value):
        return int(value)
    elif kind in (str, bool) and isinstance(value, kind):
        return value
    elif kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # name=2026 is a name
    raise UserInputError(f"{full}={_shown(value)}: it has to be {describe(kind)}")


def describe(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join("null" if option is type(None) else describe(option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    words = {Any: "a value", int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    return words.get(kind, "a mapping" if is_dataclass(kind) else f"a {getattr(kind, '__name__', kind)}")


def check_bounds(value: Any, bounds: Mapping[str, Any], full: str) -> None:
    """Raises SaidWrongly for a number outside `{"min": …, "max": …}`."""
    if value is None or not isinstance(value, (int, float)):
        return
    if "min" in bounds and not value >= bounds["min"]:
        raise UserInputError(f"{full}={_shown(value)}: it has to be at least {bounds['min']}")
    if "max" in bounds and not value <= bounds["max"]:
        raise UserInputError(f"{full}={_shown(value)}: it has to be at most {bounds['max']}")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
