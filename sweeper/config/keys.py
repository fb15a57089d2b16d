"""The keys of a configuration with their meaning, from the dataclasses that they are checked against."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sweeper.config.validation import describe_type

# Units by the ending of a key; the longest ending counts.
UNITS = {
    "_s": "seconds",
    "_w": "watts",
    "mib": "MiB",
    "_gib": "GiB",
    "_gb": "GB",
    "_gb_s": "GB/s",
    "_tb_s": "TB/s",
    "_tflops": "TFLOP/s",
}


@dataclass(frozen=True)
class Key:
    """A key of a configuration.

    Attributes:
        meaning: from the dataclass's docstring; empty if it has none.
        default: MISSING for a required key.
    """

    name: str
    annotation: Any
    default: Any
    meaning: str = ""
    bounds: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """The unit that the key's name ends in; empty if it has none."""
        return next((UNITS[end] for end in sorted(UNITS, key=len, reverse=True) if self.name.endswith(end)), "")

    def allowed(self) -> str:
        """Return the allowed values in words; empty for any."""
        words = [] if self.annotation is Any else [describe_type(self.annotation)]
        words += [f"at least {self.bounds['min']}"] if "min" in self.bounds else []
        words += [f"at most {self.bounds['max']}"] if "max" in self.bounds else []
        return ", ".join(words)


def keys_of(cls: type[Any], prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass and of those nested in it, in their order."""
    hints, meanings = get_type_hints(cls), attribute_docs(cls)
    for item in fields(cls):
        name, annotation = f"{prefix}{item.name}", hints[item.name]
        if is_dataclass(annotation):
            yield from keys_of(annotation, f"{name}.")  # type: ignore[arg-type]
            continue
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        yield Key(name, annotation, default, meanings.get(item.name, ""), item.metadata)


def attribute_docs(cls: type[Any]) -> dict[str, str]:
    """Return the entries of the "Attributes:" of a class's docstring. `a, b: text` counts for both names."""
    _, heading, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    section, *_ = re.split(r"\n(?=\S)", section, maxsplit=1)  # the next section
    docs: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", section) if heading else ():
        names, _, text = entry.partition(":")
        docs |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return docs


def literal_values(annotation: Any) -> tuple[str, ...]:
    """Return the values of a Literal, also where null is allowed; empty for any other type."""
    options = (annotation, *get_args(annotation))
    return tuple(str(value) for option in options if get_origin(option) is Literal for value in get_args(option))
