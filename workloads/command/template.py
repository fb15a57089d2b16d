"""Fill in templates: texts with {placeholders}. No value can break out of its argument, line or file entry."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml

from workloads.api.contract import Scalar

# Matches {name}; {{ and }} stand for braces.
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w+)\}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# The placeholders of every program, in addition to its parameters.
PLACEHOLDERS = (
    *("rank", "world_size", "local_rank", "node_rank", "nodes", "gpus_per_node"),
    *("master_address", "master_port", "output", "python", "pipeline_batch"),
)

Values = Mapping[str, Scalar]


def find_placeholders(template: Any) -> set[str]:
    """Return the names in a template, or in a mapping or list of templates."""
    if isinstance(template, str):
        return {name for name in _PLACEHOLDER.findall(template) if name}
    if isinstance(template, Mapping):
        return set().union(*(find_placeholders(part) for item in template.items() for part in item))
    return set().union(*map(find_placeholders, template)) if isinstance(template, (list, tuple)) else set()


def fill(template: str, values: Values, *, shell: bool = False) -> str:
    """Return the text with values filled in, each quoted for a shell if `shell` is set."""

    def replacement(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        text = format_value(values[match[1]])
        return shlex.quote(text) if shell else text

    return _PLACEHOLDER.sub(replacement, template)


def fill_all(template: Any, values: Values) -> Any:
    """Fill in all templates in mappings and lists. A string that is only a {name} becomes the value itself."""
    if isinstance(template, str):
        single = re.fullmatch(r"\{(\w+)\}", template)
        return values[single[1]] if single else fill(template, values)
    if isinstance(template, Mapping):
        return {fill(str(key), values): fill_all(inner, values) for key, inner in template.items()}
    return [fill_all(inner, values) for inner in template] if isinstance(template, list) else template


def render(name: str, template: Any, values: Values) -> str:
    """Return a file's contents: a mapping in the format of the suffix (.json, .yaml, .toml), a string unchanged."""
    if isinstance(template, str):
        return fill(template, values)
    content, suffix = fill_all(template, values), PurePath(name).suffix
    if suffix == ".toml":
        return "".join(f"{line}\n" for line in _toml_lines(content))
    return json.dumps(content, indent=2) if suffix == ".json" else str(yaml.safe_dump(content, sort_keys=False))


def _toml_lines(table: Mapping[str, Any], parents: tuple[str, ...] = ()) -> list[str]:
    """Return lines of the form `a.b = value`. Nulls are omitted, because TOML has none."""
    lines = []
    for key, value in table.items():
        path = (*parents, str(key) if _BARE_KEY.fullmatch(str(key)) else _toml_value(str(key)))
        if isinstance(value, Mapping):
            lines += _toml_lines(value, path)
        elif value is not None:
            lines.append(f"{'.'.join(path)} = {_toml_value(value)}")
    return lines


def _toml_value(value: Any) -> str:
    """Return a scalar or list as JSON, which is valid TOML except for one control character and surrogate pairs."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_value(value: Scalar) -> str:
    """Return the value as text for a command line: true and false in lower case, an empty string for null, and a large
    whole number, such as 1e5, as an integer, since a program may not take 100000.0 as one."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and 1000 <= abs(value) < 1e15:
        return str(int(value))
    return "" if value is None else str(value)
