"""The YAML files of a configuration: the line and the comment of a key, and what is wrong with a file as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

HEADER = "# @package _global_"


@dataclass(frozen=True)
class ConfigFile:
    """One file of a composed configuration."""

    path: Path
    package: str = ""  # the section that Hydra puts its keys into; empty for the root

    @cached_property
    def _text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _root(self) -> yaml.Node | None:
        return yaml.compose(self._text, yaml.SafeLoader)

    def entries(self) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Yield each key of the composed configuration that the file sets, with the nodes of its name and value."""
        yield from _walk(self._root, f"{self.package}." if self.package else "")

    def line_of(self, key: str) -> int | None:
        """Return the line of a key of the composed configuration, None if the file does not set it."""
        return next((name.start_mark.line + 1 for entry, name, _ in self.entries() if entry == key), None)

    def comments(self) -> dict[str, str]:
        """Return the comment beside each key that has one. It may go on in lines of comment below."""
        lines = self._text.splitlines()
        comments = {key: _comment(lines, name, value) for key, name, value in self.entries()}
        return {key: comment for key, comment in comments.items() if comment}

    def problem(self, *, is_global: bool) -> str:
        """Return what is wrong with the file as a whole; empty if nothing is.

        `is_global`: the keys of the file belong at the root.
        """
        if is_global and self.package:
            marked = self._text.startswith("\ufeff")
            where = "; remove the byte-order mark before it" if marked and HEADER in self._text else ""
            return f"the first line must be `{HEADER}`{where}"
        if self._root is None:
            return "has no keys"
        return "" if isinstance(self._root, yaml.MappingNode) else "must be a mapping: key: value"


def _walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        yield f"{prefix}{name.value}", name, value
        yield from _walk(value, f"{prefix}{name.value}.")


def _comment(lines: list[str], name: yaml.Node, value: yaml.Node) -> str:
    """Return the comment beside a value; beside its name where the value is a block below."""
    is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
    end = name.end_mark if is_block else value.end_mark
    if end.line >= len(lines):
        return ""
    rest = lines[end.line][end.column :].lstrip(": ")
    if not rest.startswith("#"):
        return ""
    comment = [rest]
    for line in lines[end.line + 1 :]:
        if not line.lstrip().startswith("#") or line.index("#") <= name.start_mark.column:
            break
        comment.append(line)
    return " ".join(text.strip().lstrip("#").strip() for text in comment)
