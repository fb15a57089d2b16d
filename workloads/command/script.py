"""The program of a command with its values filled in, as a shell script and files that run without this project."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from workloads.api.contract import Rank, Scalar
from workloads.command import CommandSettings
from workloads.command.invocation import Invocation, fill_invocation, placeholder_values
from workloads.command.template import format_value

SCRIPT = "run.sh"
# Values that differ between the processes of a program, with their defaults. @ needs no quotes in a shell.
OF_EACH_NODE = {"node_rank": "0", "master_address": "127.0.0.1", "master_port": "29500"}
OF_EACH_GPU = {"rank": "0", **OF_EACH_NODE}
VARIABLES = {"rank": "RANK", "node_rank": "NODE_RANK", "master_address": "MASTER_ADDR", "master_port": "MASTER_PORT"}


def program_files(
    settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, folder: str
) -> dict[str, str]:
    """Return the files by name: the script, and the rendered files of the command. Secrets are masked.

    Args:
        settings: of the command.
        parameters: of the trial.
        rank: the first rank of the trial.
        folder: where the files will lie, which is {output} in their texts.

    Raises:
        Infeasible: a parameter has a value for which `options` has no words.
    """
    markers = {name: f"@{VARIABLES[name]}@" for name in _differing(settings, rank)}
    values = {**parameters, **placeholder_values(settings, parameters, rank, folder), **markers}
    invocation = fill_invocation(settings, values, rank)
    files = {name: invocation.mask(text) for name, text in invocation.files.items()}
    return {SCRIPT: invocation.mask(_script(settings, rank, invocation)), **files}


def _differing(settings: CommandSettings, rank: Rank) -> Mapping[str, str]:
    """Return the placeholders whose values differ between the processes."""
    if settings.start == "gpu" and rank.world_size > 1:
        return OF_EACH_GPU
    return OF_EACH_NODE if rank.nodes > 1 else {}


def _script(settings: CommandSettings, rank: Rank, invocation: Invocation) -> str:
    defaults = _differing(settings, rank)
    lines = ["#!/bin/sh", *_describe_start(settings, rank, defaults)]
    lines += [f"cd {shlex.quote(str(invocation.directory))} || exit 1"]
    variables = {**invocation.environment, **({"RANK": "@RANK@"} if "rank" in defaults else {})}
    lines += [f"export {name}={_word(value, defaults)}" for name, value in sorted(variables.items())]
    if isinstance(invocation.arguments, str):
        lines += [_expand(invocation.arguments, defaults)]
    else:
        lines += ["exec " + " \\\n    ".join(_word(word, defaults) for word in invocation.arguments)]
    return "\n".join(lines) + "\n"


def _describe_start(settings: CommandSettings, rank: Rank, defaults: Mapping[str, str]) -> list[str]:
    """Return the comment that says where to start the script, and with which variables."""
    if not defaults:
        return []
    if settings.start == "gpu":
        return [
            f"# Start it once for each of {rank.world_size} GPUs, with RANK=0 to {rank.world_size - 1} and MASTER_ADDR."
        ]
    return [f"# Start it on each of {rank.nodes} nodes, with NODE_RANK=0 to {rank.nodes - 1} and MASTER_ADDR."]


def _word(value: Scalar, defaults: Mapping[str, str]) -> str:
    """Return a value as one word of a shell, in which the variables are replaced."""
    text = format_value(value)
    if _expand(text, defaults) == text:
        return shlex.quote(text)
    escaped = re.sub(r'([\\"$`])', r"\\\1", text)
    return f'"{_expand(escaped, defaults)}"'


def _expand(text: str, defaults: Mapping[str, str]) -> str:
    for name, default in defaults.items():
        text = text.replace(f"@{VARIABLES[name]}@", f"${{{VARIABLES[name]}:-{default}}}")
    return text
