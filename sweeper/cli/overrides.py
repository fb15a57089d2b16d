"""The command line: what Hydra is given of it, what each of several sweeps is told, and what Hydra could not follow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sweeper.common.errors import nearest
from sweeper.config.resolution import CONF, first_line

ADDED = ("space.", "command.")  # keys that a workload's YAML need not have


def quote_spaces(arguments: Sequence[str]) -> list[str]:
    """The same arguments with ranges, choices and lists of the space quoted, so that they reach it as text.

    To Hydra a range or a choice means "run me once for each", and only with -m. Under `space.` it is what the
    sampler chooses from. With -m the short form a,b keeps Hydra's meaning: one sweep for each. A list is quoted
    because Hydra does not put one where the YAML has a mapping for cpu and gpu.
    """
    multirun = any(argument in ("-m", "--multirun") for argument in arguments)
    quoted = [_quoted(argument) if _is_space(argument, multirun) else argument for argument in arguments]
    # What the workload's YAML leaves at its default may be said as well; the schema knows it all.
    return [f"++{argument}" if argument.startswith(ADDED) else argument for argument in quoted]


def said_of_one(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """What one of the sweeps that Hydra made of these arguments is told: its own overrides, as a person would say
    them, and the flags of all, such as --config-dir."""
    flags = list[str]()
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before.startswith("-") and before in flags and "=" not in before + argument
        if argument not in ("-m", "--multirun") and (argument.startswith("-") or is_value):
            flags.append(argument)
    marked = tuple(f"++{prefix}" for prefix in ADDED)
    return [*flags, *(word.removeprefix("++") if word.startswith(marked) else word for word in overrides)]


def _quoted(argument: str) -> str:
    key, _, text = argument.partition("=")
    return f'{key}="{text}"' if '"' not in text else f"{key}='{text}'"


def _is_space(argument: str, multirun: bool) -> bool:
    """Whether this is said of the space, or of `first`, in a form that Hydra would take otherwise."""
    if not re.match(r"(space\.\w+|first|nodes)=", argument):
        return False
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return False  # Hydra will say what is wrong with it
    if override.is_sweep_override():
        return not (multirun and getattr(override.value(), "simple_form", False))
    return isinstance(override.value(), list)


def explain(error: Exception, arguments: Sequence[str]) -> str:
    """What Hydra could not follow, in a line or two: the key, and what it may be."""
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, _, word = error.missing_cfg_file.rpartition("/")
        return f"{group}={word}: there is no such {group}; {nearest(word, error.options)}"
    text = str(error)
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found[1]
        return f"{key}: there is no such key; {_nearest_key(key, arguments)}"
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{found[1]}: several values; add -m to run one sweep for each"
    if found := re.search(r"Sweep parameters? '([^']+)' requires --multirun", text):
        return f"{found[1]}: several values; add -m to run one sweep for each"
    if isinstance(error, OverrideParseException):
        return f"{str(error.override).removeprefix('++')}: cannot be read; it has to be key=value, or group=choice"
    if "Interpolation key 'workload.name' not found" in text:
        said = next((word for word in arguments if word.startswith("workload=")), "workload")
        return f"{said}: its file gives no workload.name; `# @package _global_` has to be the first line of it"
    cause = f": {first_line(error.__cause__)}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return first_line(error) + cause


def _nearest_key(key: str, arguments: Sequence[str]) -> str:
    """The key that was probably meant, among those of the chosen workload's configuration."""
    groups = [argument for argument in arguments if re.match(r"(workload|space|hardware|search)=\w+$", argument)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=groups)
    plain = OmegaConf.to_container(composed, resolve=False)
    parent, _, word = key.rpartition(".")
    node: Any = plain
    for part in parent.split(".") if parent else []:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        return nearest(word, map(str, node), f"{parent}." if parent else "")
    return nearest(key, _flat(plain))


def _flat(node: Any, prefix: str = "") -> list[str]:
    """Every key that a value is said of; `{cpu: …, gpu: …}` is one."""
    if not isinstance(node, dict) or node.keys() <= {"cpu", "gpu"}:
        return [prefix]
    return [name for key, inner in node.items() for name in _flat(inner, f"{prefix}.{key}" if prefix else str(key))]
