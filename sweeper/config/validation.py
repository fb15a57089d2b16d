"""Plain values into typed dataclasses: the annotations are the schema, and every violation names its key."""

from __future__ import annotations

import contextlib
import math
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sweeper.config.migration import renamed_value
from workloads.api.errors import UserInputError, nearest, suggest

T = TypeVar("T")
MAX_INTEGER = 2**63  # of Optuna's, NumPy's and SQLite's whole numbers
SI_PREFIXES = {"k": 3, "K": 3, "M": 6, "G": 9, "B": 9, "T": 12}  # B as in 8B: billions
# PyTorch's names of data types.
TORCH_NAMES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Return an instance of the dataclass `cls`, every value of it checked.

    Annotations may be int, float, str, bool, `X | None`, Literal and nested dataclasses; list, dict and Any are taken
    as they are. `metadata={"min": …, "max": …}` bounds a number. `prefix` stands before each key in messages.

    Raises:
        UserInputError: for an unknown key, a missing one, a wrong type or a number out of bounds.
    """
    hints = get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    converted: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in known:
            raise UserInputError(f"{key}: unknown key. {suggest(name, known, prefix)}")
        converted[name] = convert(hints[name], value, key)
        check_bounds(converted[name], known[name].metadata, key)
    for name, field in known.items():
        if name not in converted and field.default is MISSING and field.default_factory is MISSING:
            raise UserInputError(f"{prefix}{name}: required ({describe_type(hints[name])})")
    try:
        return cls(**converted)
    except ValueError as error:  # a rule of the class over several of its values
        raise UserInputError(f"{prefix.rstrip('.') or 'configuration'}: {error}") from error


def convert(annotation: Any, value: Any, key: str) -> Any:
    """Return `value` as the annotation's type. A whole float passes for an int, an int for a float, nothing else.

    Raises:
        UserInputError: if the value is of another type.
    """
    if annotation is Any:
        return value
    if get_origin(annotation) in (Union, types.UnionType):
        options = [option for option in get_args(annotation) if option is not type(None)]
        if value is None and len(options) < len(get_args(annotation)):
            return None
        for option in options[1:]:
            with contextlib.suppress(UserInputError):
                return convert(option, value, key)
        if len(options) > 1 and isinstance(value, str):
            raise UserInputError(f"{key}={value}: must be {describe_type(annotation)}")
        annotation = options[0]
    if is_dataclass(annotation) and isinstance(value, Mapping):
        return build(annotation, {str(name): inner for name, inner in value.items()}, f"{key}.")  # type: ignore[arg-type]
    if get_origin(annotation) is Literal:
        if value in get_args(annotation):
            return value
        if (new := renamed_value(key, value)) in get_args(annotation):
            raise UserInputError(f"{key}={value}: renamed in 0.2; use {key}={new}")
        names = [option for option in get_args(annotation) if isinstance(option, str)]
        if close := TORCH_NAMES.get(str(value)) or nearest(str(value), names):
            suggestion = f". Did you mean {close}?" if close in names else ""
            raise UserInputError(f"{key}={_format_value(value)}: must be {describe_type(annotation)}{suggestion}")
    elif get_origin(annotation) in (list, dict):
        if isinstance(value, get_origin(annotation)):
            return value
    elif isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise UserInputError(f"{key}: must be between -2^63 and 2^63, has {value.bit_length()} bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserInputError(f"{key}={value}: must be finite")
    elif annotation is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif annotation is int and isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value):
        return int(value)
    elif annotation in (str, bool) and isinstance(value, annotation):
        return value
    elif annotation is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # name=2026 is a name
    raise UserInputError(f"{key}={_format_value(value)}: must be {describe_type(annotation)}{_spell_out(value)}")


def _spell_out(value: Any) -> str:
    """Return a hint for a number with an SI prefix, such as 1T or 300B; empty for anything else."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGBT])", str(value))
    return f". Write {number[1]}e{SI_PREFIXES[number[2]]}" if number else ""


def describe_type(annotation: Any) -> str:
    """Return the annotation in words."""
    if get_origin(annotation) in (Union, types.UnionType):
        options = get_args(annotation)
        return " or ".join("null" if option is type(None) else describe_type(option) for option in options)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    descriptions = {Any: "a value", int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    is_mapping = is_dataclass(annotation) or get_origin(annotation) is dict
    default = "a mapping" if is_mapping else f"a {getattr(annotation, '__name__', annotation)}"
    return descriptions.get(annotation, default)


def check_bounds(value: Any, bounds: Mapping[str, Any], key: str) -> None:
    """Check a number against `{"min": …, "max": …}`. Raises UserInputError if it is out of bounds."""
    if value is None or not isinstance(value, (int, float)):
        return
    if "min" in bounds and not value >= bounds["min"]:
        raise UserInputError(f"{key}={_format_value(value)}: must be at least {bounds['min']}")
    if "max" in bounds and not value <= bounds["max"]:
        raise UserInputError(f"{key}={_format_value(value)}: must be at most {bounds['max']}")


def _format_value(value: Any) -> str:
    """Return the value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
