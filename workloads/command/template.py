"""Templates: text with {names} in it, filled so that no value can break out of its place."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml

from workloads.api.contract import Scalar

# {name}; {{ and }} stand for braces.
_PLACE = re.compile(r"\{\{|\}\}|\{(\w+)\}")
# What every program is given beside the parameters.
PLACES = (
    "rank",
    "world_size",
    "local_rank",
    "node_rank",
    "nodes",
    "gpus_per_node",
    "master_address",
    "master_port",
    "output",
    "python",
)

Values = Mapping[str, Scalar]


def places(template: Any) -> set[str]:
    """The names in a template, or anywhere in a mapping or list of them."""
    if isinstance(template, str):
        return {name for name in _PLACE.findall(template) if name}
    if isinstance(template, Mapping):
        return set().union(*(places(each) for pair in template.items() for each in pair))
    return set().union(*map(places, template)) if isinstance(template, (list, tuple)) else set()


def filled(template: str, values: Values, *, shell: bool = False) -> str:
    """The text with its values in place; `shell`: each quoted for one."""

    def of(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        text = said(values[found[1]])
        return shlex.quote(text) if shell else text

    return _PLACE.sub(of, template)


def filled_all(template: Any, values: Values) -> Any:
    """Mappings and lists with all their templates filled; a text that is one {name} and nothing else takes the value as
    it is, a number as a number."""
    if isinstance(template, str):
        whole = re.fullmatch(r"\{(\w+)\}", template)
        return values[whole[1]] if whole else filled(template, values)
    if isinstance(template, Mapping):
        return {filled(str(key), values): filled_all(inner, values) for key, inner in template.items()}
    return [filled_all(inner, values) for inner in template] if isinstance(template, list) else template


def rendered(name: str, template: Any, values: Values) -> str:
    """A file's text: of a mapping in the format of its name (.json, .yaml, .toml), of a text as it is."""
    if isinstance(template, str):
        return filled(template, values)
    plain, kind = filled_all(template, values), PurePath(name).suffix
    if kind == ".toml":
        return "".join(f"{line}\n" for line in _toml(plain))
    return json.dumps(plain, indent=2) if kind == ".json" else str(yaml.safe_dump(plain, sort_keys=False))


def _toml(node: Mapping[str, Any], above: tuple[str, ...] = ()) -> list[str]:
    """Lines of `a.b = value`. What is null is left out."""
    lines = []
    for key, value in node.items():
        path = (*above, _as_toml(str(key)))
        if isinstance(value, Mapping):
            lines += _toml(value, path)
        elif value is not None:
            lines.append(f"{'.'.join(path)} = {_as_toml(value)}")
    return lines


def _as_toml(value: Any) -> str:
    """A scalar or list of JSON's is one of TOML's as well, but for one control character, and pairs of escapes."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def said(value: Scalar) -> str:
    """As a command line says it."""
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
