"""Command-line overrides: as Hydra needs them, as each sweep of a multirun gets them, and Hydra's errors in a line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sweeper.common.errors import first_line, suggest
from sweeper.config.resolution import CONF

# Keys that a workload's YAML need not list, since the schema knows them.
OPTIONAL_SECTIONS = ("space.", "command.")
# Keys whose value Hydra would otherwise expand into several runs.
VALUE_KEYS = re.compile(r"(space\.\w+|search\.initial_points|projection\.nodes)=")
MULTIRUN_FLAGS = ("-m", "--multirun")


def quote_spaces(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ranges, choices and lists of the space quoted, so that they reach it as text.

    Hydra expands a range or a choice into one run for each value, with -m only. Under `space.` it is what the sampler
    chooses from. With -m, the short form a,b keeps Hydra's meaning: one sweep for each value. A list is quoted because
    Hydra refuses one where the YAML has a mapping for cpu and gpu.
    """
    multirun = any(argument in MULTIRUN_FLAGS for argument in arguments)
    quoted = [_quote(argument, multirun) for argument in arguments]
    return [f"++{argument}" if argument.startswith(OPTIONAL_SECTIONS) else argument for argument in quoted]


def build_sweep_arguments(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the arguments of one sweep of a multirun: the flags of the command, and its own overrides as typed."""
    flags = list[str]()
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        is_value = previous.startswith("-") and previous in flags and "=" not in previous + argument
        if argument not in MULTIRUN_FLAGS and (argument.startswith("-") or is_value):
            flags.append(argument)
    added = tuple(f"++{section}" for section in OPTIONAL_SECTIONS)
    return [
        *flags,
        *(override.removeprefix("++") if override.startswith(added) else override for override in overrides),
    ]


def _quote(argument: str, multirun: bool) -> str:
    """Return the argument with its value quoted if Hydra would expand or refuse it."""
    if not VALUE_KEYS.match(argument):
        return argument
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return argument  # Hydra reports what is wrong with it
    key, _, text = argument.partition("=")
    if override.is_sweep_override():
        is_short = getattr(override.value(), "simple_form", False)
        if multirun and is_short:
            return argument
        text = f"choice({text})" if is_short else text  # as a person writes it in YAML
    elif not isinstance(override.value(), list):
        return argument
    return f'{key}="{text}"' if '"' not in text else f"{key}='{text}'"


def explain(error: Exception, arguments: Sequence[str]) -> str:
    """Return Hydra's error in one or two lines that name the key and what is allowed."""
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"{group}={choice}: unknown {group} '{choice}'. {suggest(choice, error.options)}"
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        return f"{match[1]}: unknown key. {_suggest_key(match[1], arguments)}"
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{match[1]}: several values; add -m to run one sweep for each"
    if match := re.search(r"Sweep parameters? '([^']+)' requires --multirun", text):
        return f"{match[1]}: several values; add -m to run one sweep for each"
    if isinstance(error, OverrideParseException):
        return f"{str(error.override).removeprefix('++')}: cannot be parsed; must be key=value or group=choice"
    if "Interpolation key 'workload.name' not found" in text:
        choice = next((argument for argument in arguments if argument.startswith("workload=")), "workload")
        return f"{choice}: its file sets no workload.name; its first line must be `# @package _global_`"
    cause = f": {first_line(error.__cause__)}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return first_line(error) + cause


def _suggest_key(key: str, arguments: Sequence[str]) -> str:
    """Return the keys of the chosen workload's configuration beside an unknown one, and the nearest."""
    groups = [argument for argument in arguments if re.match(r"(workload|model|hardware|search)=\w+$", argument)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=groups)
    values = OmegaConf.to_container(composed, resolve=False)
    section, _, name = key.rpartition(".")
    node: Any = values
    for part in section.split(".") if section else []:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        return suggest(name, map(str, node), f"{section}." if section else "")
    return suggest(key, _flatten(values))


def _flatten(node: Any, prefix: str = "") -> list[str]:
    """Return every key that has a value; `{cpu: …, gpu: …}` is a value."""
    if not isinstance(node, dict) or node.keys() <= {"cpu", "gpu"}:
        return [prefix]
    return [key for name, inner in node.items() for key in _flatten(inner, f"{prefix}.{name}" if prefix else str(name))]
