"""Keys and values of version 0.1 that version 0.2 spells differently. To be removed in 0.3.

Each is refused with the line that names its new spelling: a key that is silently ignored changes what is measured.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from typing import Any

from workloads.api.errors import UserInputError

# Keys of every configuration.
RENAMED_KEYS = {
    "first": "search.initial_points",
    "strategy": "workload.strategy",
    "cluster.network_gb_s": "topology.network_gb_s",
    "cluster.workers": "cluster.max_concurrent_trials",
    "cluster.set_aside_below": "cluster.drain_below",
}
# Keys whose value changes too.
REPLACED_KEYS = {
    "nodes": "projection.nodes, which counts nodes of the cluster and not multiples of gpus=",
    "hardware.memory_gb": "hardware.memory_gib, which is in GiB and what the driver reports (torch.cuda.mem_get_info)",
}
# Parameters of the space, where the workload has the new one and not the old one.
RENAMED_PARAMETERS = {
    "route": "backend",
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "tensor": "tp",
    "context": "cp",
    "pipeline": "pp",
    "stages": "stages_per_rank",
    "reshard": "reshard_after_forward",
    "tensor_across_nodes": "tp_across_nodes",
}
# Choices of a group, with what replaces them on the command line.
RENAMED_CHOICES = {
    ("model", "llama1b"): "model=llama3_1b",
    ("model", "llama8b"): "model=llama3_8b",
    ("model", "llama70b"): "model=llama3_70b",
    ("model", "qwen7b"): "model=qwen2_5_7b",
    ("model", "tiny"): "model=llama_tiny",
    ("space", "llama3_8b"): "workload=matmul_layers model=llama3_8b",
    ("space", "llama3_70b"): "workload=matmul_layers model=llama3_70b",
    ("space", "qwen2_5_7b"): "workload=matmul_layers model=qwen2_5_7b",
}
# Values of a parameter.
RENAMED_VALUES = {("layer", "head"): "lm_head"}


def check_arguments(arguments: Sequence[str]) -> None:
    """Check command-line overrides for spellings of 0.1. Raises UserInputError with the new spelling."""
    for argument in arguments:
        key, equals, value = argument.lstrip("+~").partition("=")
        if not equals:
            continue
        if (new := RENAMED_CHOICES.get((key, value))) is not None:
            raise UserInputError(f"{argument}: renamed in 0.2; use {new}")
        check_key(key, value)


def check_key(key: str, value: Any) -> None:
    """Check one key of a configuration. Raises UserInputError if 0.2 spells it differently."""
    if key in REPLACED_KEYS and value not in (None, "null"):
        raise UserInputError(f"{key}={value}: replaced in 0.2; use {REPLACED_KEYS[key]}")
    new = RENAMED_KEYS.get(key)
    section, dot, name = key.rpartition(".")
    if section == "command.layout" and name in RENAMED_PARAMETERS:
        new = f"{section}{dot}{RENAMED_PARAMETERS[name]}"
    if new is not None and value not in (None, "null"):
        raise UserInputError(f"{key}={value}: renamed in 0.2; use {new}={value}")


def renamed_parameter(name: str) -> str | None:
    """Return the 0.2 name of a parameter of 0.1, None if it was not renamed."""
    return RENAMED_PARAMETERS.get(name)


def check_placeholders(names: Iterable[str], given: Container[str]) -> None:
    """Check the placeholders of a user's command against the parameters that its space gives.

    A command may have a parameter of its own by a name of 0.1: only one without values, whose new name has some, is a
    spelling of 0.1.

    Raises:
        UserInputError: with the new spelling.
    """
    for name in names:
        new = renamed_parameter(name)
        if new is not None and name not in given and new in given:
            raise UserInputError(f"command: {{{name}}} was renamed in 0.2; use {{{new}}}, or give space.{name} values")


def renamed_value(key: str, value: Any) -> Any:
    """Return the 0.2 spelling of a parameter's value of 0.1, None if it was not renamed."""
    name = re.split(r"[.]", key)[-1]
    return RENAMED_VALUES.get((name, value)) if isinstance(value, str) else None
