"""Environment variables as parameters: `space.env.NAME` in a space, `env.NAME` in points, records and reports.

Variables must be set before torch is imported, so each environment gets its own workers. In the space, a value is a
number or a string; in the process, it is always a string. If the value is null, the sweep does not set the variable.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from workloads.api.errors import UserInputError
from workloads.api.secrets import is_secret, mask
from workloads.tables import read_toml

SECTION = "env"
PREFIX = f"{SECTION}."
# POSIX leaves lowercase names to applications. A variable in the wrong case would be set without any effect.
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_RESERVED: dict[str, str] = read_toml(__file__, "reserved.toml")


def flatten(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a space or a point, with entries of the `env` section renamed to `env.NAME`."""
    flat = dict[str, Any]()
    for key, entry in entries.items():
        if key == SECTION and isinstance(entry, Mapping):
            flat |= {f"{PREFIX}{name}": value for name, value in entry.items()}
        else:
            flat[str(key)] = entry  # YAML reads 1 as a number
    return flat


def is_variable(name: str) -> bool:
    return name.startswith(PREFIX)


def without_variables(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if not is_variable(name)}


def only_variables(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if is_variable(name)}


def process_values(parameters: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the environment variables in the parameters, as strings by name. A variable that is None is not set."""
    variables = only_variables(parameters)
    return {name.removeprefix(PREFIX): None if value is None else str(value) for name, value in variables.items()}


def check_name(variable: str) -> None:
    """Raise UserInputError if a trial's environment must not set this variable."""
    key = f"space.{PREFIX}{variable}"
    if not _NAME.fullmatch(variable):
        upper = re.sub(r"\W", "_", variable).upper().strip("_")
        close = f". Did you mean {upper}?" if _NAME.fullmatch(upper) else ""
        raise UserInputError(f"{key}: a variable's name has capital letters, digits and _, and no digit first{close}")
    if is_secret(variable):
        raise UserInputError(f"{key}: looks like a secret, and parameters are recorded; set it on the nodes")
    for reason, pattern in _RESERVED.items():
        if re.fullmatch(pattern, variable):
            raise UserInputError(f"{key}: cannot be a parameter; it {reason}")


def check_values(variable: str, values: Iterable[Any]) -> None:
    """Raise UserInputError if a value looks like a secret or would not reach the process as written."""
    key = f"space.{PREFIX}{variable}"
    for value in values:
        if isinstance(value, bool):  # YAML reads true, True and yes alike, but a program may not
            raise UserInputError(f"{key}={str(value).lower()}: put true or false in quotes")
        text = str(value)
        if "$" in text or not text.isprintable():
            raise UserInputError(f"{key}={value}: values are taken literally; $ and control characters are not allowed")
        if mask(text) != text or mask(f"{variable}={text}") != f"{variable}={text}":
            raise UserInputError(f"{key}: a value looks like a secret, and values are recorded")
