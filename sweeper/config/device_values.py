"""Values in a space that depend on the devices: the number of GPUs, and environment variables.

tp: divisors(gpus)               all divisors of the number of GPUs, such as 1, 2, 3 and 6 for 6 GPUs
ep: divisors(gpus)               the same if a model has experts, otherwise 1
global_batch: multiple(gpus, 64) the smallest multiple of the number of GPUs that is at least 64
environment                      variables that a device's YAML file in `conf/hardware/` sets by default
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sweeper.config import space as spaces
from sweeper.config.catalogue import catalogue
from sweeper.config.environment import PREFIX, check_name, check_values, only_variables
from sweeper.config.hardware import Target
from sweeper.config.resolution import ResolvedConfig
from sweeper.config.schema import Hardware
from sweeper.config.space import BY_GPUS, Choice, Space
from workloads.api.errors import UserInputError
from workloads.api.validation import build
from workloads.layouts.enumeration import divisors
from workloads.models.trained import load_trained_model

FROM_SPACE = "space.env"
FROM_NODES = "the nodes' environment"


def fill_space(resolved: ResolvedConfig, target: Target, gpus: int) -> ResolvedConfig:
    """Fill in the values that depend on the number of GPUs."""
    entries, is_command = resolved.config.space, resolved.settings is not None
    if entries.get("ep") == "divisors(gpus)" and not is_command and not _has_experts(entries, target.hardware.kind):
        entries = {name: entry for name, entry in entries.items() if name != "ep"}  # only 1 is valid
    return replace(resolved, config=replace(resolved.config, space=_apply_count(entries, gpus)))


def _apply_count(entry: Any, gpus: int) -> Any:
    if isinstance(entry, Mapping):
        return {name: _apply_count(value, gpus) for name, value in entry.items()}
    if not isinstance(entry, str) or not (found := BY_GPUS.fullmatch(entry)):
        return entry
    return -(-int(found[1]) // gpus) * gpus if found[1] else list(divisors(gpus))


def _has_experts(space: Mapping[str, Any], kind: str) -> bool:
    """Return whether a model of the space has experts or is not known here, which is reported later."""
    model = spaces.parse_entry("model", spaces.select_kind(space.get("model"), kind, "space.model"))
    names = model.values if isinstance(model, Choice) else (model,)
    with suppress(ValueError):
        return any(load_trained_model(str(name)).experts for name in names)
    return True


@dataclass(frozen=True)
class DefaultVariable:
    """An environment variable that a device's YAML file sets, with the reason and the source."""

    value: str
    reason: str
    source: str


def read_defaults(hardware: Hardware) -> dict[str, DefaultVariable]:
    """Return the device's variables by name, skipping null entries. Raises UserInputError if an entry is incomplete."""
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
    return {name for hardware in (chosen, *catalogue().values()) for name in hardware.environment}


def apply_defaults(space: Space, target: Target) -> tuple[Space, dict[str, str]]:
    """Return the space with the device's variables added, and where each constant variable was set.

    The space takes precedence, then the nodes' environment, then the default. Raises UserInputError if the nodes'
    values differ."""
    constants: dict[str, str] = {}
    sources = dict.fromkeys(only_variables(space.constants), FROM_SPACE)
    for name, default in read_defaults(target.hardware).items():
        parameter = f"{PREFIX}{name}"
        if parameter in space.constants or parameter in space.dimensions:
            continue
        values = {node.label: dict(node.environment).get(name, default.value) for node in target.nodes}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value} on {node}" for node, value in list(values.items())[:4])
            key = f"space.env.{name}"
            raise UserInputError(f"{key}: the nodes differ ({listed}); set {key}={default.value}")
        constants[parameter] = next(iter(values.values()))
        check_values(name, [constants[parameter]])
        is_set = any(name in dict(node.environment) for node in target.nodes)
        sources[parameter] = FROM_NODES if is_set else f"default of {target.hardware.name}"
    return replace(space, constants={**constants, **space.constants}), sources
