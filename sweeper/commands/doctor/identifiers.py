"""Replace what identifies a machine or its users by numbered placeholders, in values and in texts."""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads.api.secrets import mask, masked

SHORTEST_NAME = 4  # characters of a host's or user's name that is replaced wherever it stands
_KEY = re.compile(r"(?i)serial|uuid|hostname|node_?id|^(host|node|address|id)$")
_UUID = re.compile(r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_IPV4 = re.compile(rf"(?<![\w.]){_OCTET}(?:\.{_OCTET}){{3}}(?![\w.])")


class _Placeholders:
    """Equal identifiers get equal placeholders: the partitions of a GPU share a serial number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def replace(self, identifier: str) -> str:
        return f"masked-{self._numbers.setdefault(identifier, len(self._numbers) + 1)}"


def mask_identifiers(value: Any) -> Any:
    """Return a JSON value without secrets and without what identifies this machine."""
    placeholders = _Placeholders()
    return _mask(masked(value), placeholders, _own_names())


def mask_text(text: str) -> str:
    """Return a text, such as a log, without secrets and without what identifies this machine."""
    return _mask_text(mask(text), _Placeholders(), _own_names())


def _mask(value: Any, placeholders: _Placeholders, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            key: placeholders.replace(inner)
            if isinstance(inner, str) and inner and _KEY.search(key)
            else _mask(inner, placeholders, names)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mask(inner, placeholders, names) for inner in value]
    return _mask_text(value, placeholders, names) if isinstance(value, str) else value


def _mask_text(text: str, placeholders: _Placeholders, names: Mapping[str, str]) -> str:
    for name, placeholder in names.items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", placeholder, text)
    for pattern in (_UUID, _IPV4):
        text = pattern.sub(lambda match: placeholders.replace(match[0]), text)
    return text


def _own_names() -> dict[str, str]:
    """Return the names of this machine, its user and the user's home with their placeholders, the longest first."""
    host = socket.gethostname()
    names = {str(Path.home()): "<home>", host: "<host>", host.partition(".")[0]: "<host>"}
    with contextlib.suppress(KeyError, OSError):  # a user without an entry in the password file
        names[getpass.getuser()] = "<user>"
    long_enough = {name: placeholder for name, placeholder in names.items() if len(name) >= SHORTEST_NAME}
    return dict(sorted(long_enough.items(), key=lambda item: -len(item[0])))
