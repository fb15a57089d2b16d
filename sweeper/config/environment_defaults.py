"""Environment variables that a device's YAML sets by default: `environment` in `conf/hardware/`.

What the space sets comes first, then what the nodes have in their own environment, then the device's default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sweeper.config.catalogue import catalogue
from sweeper.config.environment import PREFIX, check_name, check_values, only_variables
from sweeper.config.hardware import Node, Target
from sweeper.config.schema import Hardware
from sweeper.config.space import Space
from sweeper.config.validation import build
from workloads.api.errors import UserInputError

FROM_SPACE = "space.env"
FROM_NODES = "the nodes' environment"


@dataclass(frozen=True)
class DefaultVariable:
    """A variable that a device's YAML sets, why, and who recommends it."""

    value: str
    reason: str
    source: str


def read_defaults(hardware: Hardware) -> dict[str, DefaultVariable]:
    """Return the device's variables by name; null in the place of one removes it.

    Raises:
        UserInputError: for one without value, reason or source, or that a trial may not set.
    """
    defaults = {}
    for name, entry in hardware.environment.items():
        key = f"hardware.environment.{name}"
        if entry is None:
            continue
        if not isinstance(entry, Mapping):
            raise UserInputError(f"{key}={entry}: needs value, reason and source; for a value alone: space.env.{name}=")
        check_name(str(name))
        defaults[str(name)] = build(DefaultVariable, {str(part): text for part, text in entry.items()}, f"{key}.")
        check_values(str(name), [defaults[str(name)].value])
    return defaults


def default_names(chosen: Hardware) -> set[str]:
    """Return every variable that the chosen device or any of the catalogue sets by default."""
    return {name for hardware in (chosen, *catalogue().values()) for name in hardware.environment}


def apply_defaults(space: Space, target: Target) -> tuple[Space, dict[str, str]]:
    """Return the space with the device's variables, and for each constant variable what has set it.

    Raises:
        UserInputError: if the nodes differ in one.
    """
    constants: dict[str, str] = {}
    sources = dict.fromkeys(only_variables(space.constants), FROM_SPACE)
    for name, default in read_defaults(target.hardware).items():
        parameter = f"{PREFIX}{name}"
        if parameter in space.constants or parameter in space.dimensions:
            continue
        value = _common_value(name, default.value, target.nodes)
        check_values(name, [value])
        constants[parameter] = value
        is_set = any(name in dict(node.environment) for node in target.nodes)
        sources[parameter] = FROM_NODES if is_set else f"default of {target.hardware.name}"
    return replace(space, constants={**constants, **space.constants}), sources


def _common_value(name: str, default: str, nodes: Iterable[Node]) -> str:
    """Return the value that all nodes have, the default where they have none."""
    values = {node.label: dict(node.environment).get(name, default) for node in nodes}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{value} on {node}" for node, value in list(values.items())[:4])
        raise UserInputError(f"space.env.{name}: the nodes differ ({listed}); set space.env.{name}={default}")
    return next(iter(values.values()))
