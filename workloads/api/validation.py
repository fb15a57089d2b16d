"""Use dataclasses as schemas: check plain values against annotations, and read key descriptions from docstrings."""

import contextlib
import inspect
import math
import re
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from workloads.api.errors import UserInputError
from workloads.api.metrics import find_ending
from workloads.suggestions import nearest, suggest

T = TypeVar("T")
MAX_INTEGER = 2**63  # the limit for integers in Optuna, NumPy and SQLite
SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}  # seconds in each unit that people may write
SI_PREFIXES = {"k": 3, "K": 3, "M": 6, "G": 9, "B": 9, "T": 12}  # B stands for billions, as in 8B
TORCH_NAMES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
LONG_UNITS = {"s": "seconds", "W": "watts"}  # as in help and messages


def find_unit(name: str) -> str:
    """Return the unit that a name's suffix stands for, or an empty string."""
    unit = find_ending(name)
    return LONG_UNITS.get(unit, unit)


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Check every value and return an instance of the dataclass `cls`.

    Annotations may be int, float, str, bool, `X | None`, Literal, nested dataclasses, and mappings to dataclasses. The
    contents of other lists and mappings, and Any, are not checked. `metadata={"min": …, "max": …}` bounds a number.

    Raises UserInputError for an unknown or missing key, a wrong type or a number out of bounds.
    """
    hints = get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    converted: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in known:
            section = prefix.rpartition(": ")[2]  # without the file name
            raise UserInputError(f"{key}: unknown key. {suggest(name, known, section)}")
        converted[name] = convert(hints[name], value, key)
        check_bounds(converted[name], known[name].metadata, key)
    for name, item in known.items():
        if name not in converted and item.default is MISSING and item.default_factory is MISSING:
            raise UserInputError(f"{prefix}{name}: required ({describe_type(hints[name])})")
    try:
        return cls(**converted)
    except ValueError as error:  # raised by a rule in the class about several values
        raise UserInputError(f"{prefix.rstrip('.: ') or 'configuration'}: {error}") from error


def convert(annotation: Any, value: Any, key: str) -> Any:
    """Convert `value` to the annotated type: whole floats to int, ints to float. Raises UserInputError."""
    if annotation is Any:
        return value
    declared = annotation
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
        names = [option for option in get_args(annotation) if isinstance(option, str)]
        if close := TORCH_NAMES.get(str(value)) or nearest(str(value), names):
            suggestion = f". Did you mean {close}?" if close in names else ""
            raise UserInputError(f"{key}={format_value(value)}: must be {describe_type(declared)}{suggestion}")
    elif get_origin(annotation) in (list, dict):
        if isinstance(value, get_origin(annotation)):
            inner = get_args(annotation)[-1]
            if not is_dataclass(inner):
                return value
            return {name: convert(inner, entry, f"{key}.{name}") for name, entry in value.items()}
    elif isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise UserInputError(f"{key}: must be between -2^63 and 2^63, has {value.bit_length()} bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserInputError(f"{key}={value}: must be finite")
    elif annotation in (str, bool) and isinstance(value, annotation):
        return value
    elif (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (annotation in (float, str) or (annotation is int and value == int(value)))
    ):
        return annotation(value)  # name=2026 is a valid name
    hint, unit = "", find_unit(key)
    number = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+|%)", str(value)) if annotation in (int, float) else None
    declared = annotation if number else declared  # a number with a unit is not meant as null
    if annotation is float and not unit and str(value).endswith("%"):
        with contextlib.suppress(ValueError):
            return float(str(value)[:-1]) / 100
    if number and number[2] in SI_PREFIXES and not unit:  # such as 1T or 300B
        plain = f"{number[1]}e{SI_PREFIXES[number[2]]}"
        if annotation is float:
            return float(plain)
        hint = f". Write {plain}" + f" or {1024 * float(number[1]):.0f}" * (number[2] in "kK")
    elif number:
        factors = SECONDS if unit == "seconds" else {unit.lower(): 1, unit[:1].lower(): 1}
        factor = factors.get(number[2].lower(), 0 if unit or number[2] == "%" else 1)
        hint = (f" of {unit}" if unit else "") + (f". Write {factor * float(number[1]):g}" if factor else "")
    elif key.startswith("space.") and len(words := str(value).split()) > 1:
        hint = f". Separate values by commas: {key}={','.join(words)}"
    if is_dataclass(annotation):
        names = [item.name for item in fields(annotation)]
        meant = f". Did you mean {key}.{names[0]}={value}?" if isinstance(value, int | float) else ""
        hint = f" with the keys {', '.join(names)}{meant}"
    raise UserInputError(f"{key}={format_value(value)}: must be {describe_type(declared)}{hint}")


def describe_type(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        options = get_args(annotation)
        return " or ".join("null" if option is type(None) else describe_type(option) for option in options)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    descriptions = {Any: "a value", int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    is_mapping = is_dataclass(annotation) or get_origin(annotation) is dict
    default = "a mapping" if is_mapping else f"a {getattr(annotation, '__name__', annotation)}"
    return descriptions.get(annotation, default)


def check_known(word: str, allowed: Collection[str], problem: str) -> None:
    """Raise UserInputError with the problem and a suggestion if the word is not allowed."""
    if word not in allowed:
        raise UserInputError(f"{problem}. {suggest(word, allowed)}")


def check_bounds(value: Any, bounds: Mapping[str, Any], key: str) -> None:
    """Raise UserInputError if a number is outside the bounds `{"min": …, "max": …}`."""
    if not isinstance(value, (int, float)):
        return
    if "min" in bounds and not value >= bounds["min"]:
        raise UserInputError(f"{key}={format_value(value)}: must be at least {bounds['min']}")
    if "max" in bounds and not value <= bounds["max"]:
        raise UserInputError(f"{key}={format_value(value)}: must be at most {bounds['max']}")


def format_value(value: object) -> str:
    """Return a scalar as written in configuration files."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Key:
    name: str
    annotation: Any
    default: Any  # MISSING for a required key
    meaning: str = ""  # from the dataclass's docstring; empty if not described
    bounds: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """The unit that the key's suffix stands for, or an empty string."""
        return find_unit(self.name)

    def describe(self, default: str | None = None) -> str:
        """Return the meaning, the unit, the allowed values and the default. The meaning may name the first two."""
        if default is None:
            default = "" if self.default is MISSING else format_value(self.default) or "''"
        choices = literal_values(self.annotation)
        is_explained = bool(choices) and all(choice in self.meaning for choice in choices)
        unit, shown = "" if self.unit in self.meaning else self.unit, f"default: {default}" if default else "required"
        meaning = self.meaning.replace("`", "").replace("None", "null").rstrip(".")
        details = filter(None, (unit, "" if is_explained else self.allowed(), shown))
        return f"{meaning} [{'; '.join(details)}]".lstrip()

    def allowed(self) -> str:
        """Return a description of the allowed values, or an empty string if any value is allowed."""
        words = [] if self.annotation is Any else [describe_type(self.annotation)]
        words += [f"at least {self.bounds['min']}"] if "min" in self.bounds else []
        words += [f"at most {self.bounds['max']}"] if "max" in self.bounds else []
        return ", ".join(words)


def keys_of(cls: type[Any], prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass and of the dataclasses nested in it, in order."""
    hints, bases = get_type_hints(cls), reversed(cls.__mro__)
    meanings = {name: text for base in bases for name, text in attribute_docs(base).items()}
    for item in fields(cls):
        name, annotation = f"{prefix}{item.name}", hints[item.name]
        if is_dataclass(annotation):
            for key in keys_of(annotation, f"{name}."):  # type: ignore[arg-type]
                yield replace(key, meaning=meanings.get(key.name.removeprefix(prefix), key.meaning))
            continue
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        yield Key(name, annotation, default, meanings.get(item.name, ""), item.metadata)


def attribute_docs(cls: type[Any]) -> dict[str, str]:
    """Return the entries in the "Attributes:" section of a class docstring. `a, b: text` describes both names."""
    _, heading, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    section, *_ = re.split(r"\n(?=\S)", section, maxsplit=1)  # the next section
    docs: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", section) if heading else ():
        names, _, text = entry.partition(":")
        docs |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return docs


def literal_values(annotation: Any) -> tuple[str, ...]:
    """Return the values of a Literal or an optional Literal, or an empty tuple for any other type."""
    options = (annotation, *get_args(annotation))
    return tuple(str(value) for option in options if get_origin(option) is Literal for value in get_args(option))


def read_value(key: Key, text: str) -> Any:
    """Parse a value. Text stays as typed, also where it is not of the key's type."""
    if not text:
        raise UserInputError(f"{key.name}=: has no value; leave it out for the default")
    types = {key.annotation, *get_args(key.annotation)}
    if text == "null" and type(None) in types:
        return None
    if str in types or literal_values(key.annotation):
        return text
    if bool in types:
        return {"true": True, "false": False}.get(text.lower(), text)
    with contextlib.suppress(ValueError):
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    return text
