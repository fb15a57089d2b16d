"""The command of one rank with its values filled in: its words, variables and files, and how they are kept."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.api.contract import Infeasible, Rank, Scalar
from workloads.api.secrets import mask, masked, secret_values
from workloads.api.visible_devices import restrict_program
from workloads.command import CommandSettings
from workloads.command.template import fill, fill_all, format_value, render

COMMAND_FILE = "command.txt"
# The names of a trial's own files: a rendered file with one of them is kept as rendered_….
TRIAL_FILES = (COMMAND_FILE, "log.txt", "last_lines.txt", "trial.json")


@dataclass(frozen=True)
class Invocation:
    """A command as one rank runs it.

    Attributes:
        arguments: the words of the command line; a text is run by a shell.
        environment: variables in addition to those of this process.
        files: the texts of the files in {output}, by name.
    """

    arguments: list[str] | str
    environment: Mapping[str, str]
    directory: Path
    files: Mapping[str, str]

    def mask(self, text: str) -> str:
        """Return the text without secrets: also without those of the command line and of all variables."""
        words = shlex_words(self.arguments) if isinstance(self.arguments, str) else self.arguments
        return mask(text, secret_values(words, {**os.environ, **self.environment}))

    def describe(self) -> str:
        """Return the command as a shell runs it, secrets masked."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(masked(dict(self.environment)).items())]
        words = ["/bin/sh", "-c", self.arguments] if isinstance(self.arguments, str) else self.arguments
        lines = [f"cd {shlex.quote(str(self.directory))} &&", *variables, shlex.join(masked(words))]
        return self.mask(" \\\n".join(lines))

    def kept_files(self) -> dict[str, bytes]:
        """Return the command and the rendered files as they are kept with the trial, secrets masked."""
        kept = {COMMAND_FILE: f"{self.describe()}\n".encode()}
        for name, text in self.files.items():
            kept[f"rendered_{name}" if name in TRIAL_FILES else name] = self.mask(text).encode()
        return kept


def build_invocation(
    settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, output: str
) -> Invocation:
    """Fill the settings' templates for one rank. `output` is the folder of the files.

    Raises:
        Infeasible: a parameter has a value for which `options` has no words.
    """
    return fill_invocation(settings, {**parameters, **placeholder_values(settings, parameters, rank, output)}, rank)


def fill_invocation(settings: CommandSettings, values: Mapping[str, Scalar], rank: Rank) -> Invocation:
    """Fill the settings' templates with these values of their parameters and placeholders.

    Raises:
        Infeasible: a parameter has a value for which `options` has no words.
    """
    environment = {name: fill(str(text), values) for name, text in settings.environment.items()}
    return Invocation(
        _command_line(settings, values),
        {**rank.environment, **_distributed_environment(settings, rank, values), **environment},
        Path(settings.directory),
        {name: render(name, template, values) for name, template in settings.files.items()},
    )


def placeholder_values(
    settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, output: str
) -> dict[str, Scalar]:
    """Return the values of `template.PLACEHOLDERS`; `pipeline_batch` only where the layout has a batch."""
    values = _rank_values(rank, output)
    layout = fill_all(settings.layout, {**parameters, **values})
    if "micro_batch" not in layout:
        return values
    batch = count_pipeline_batch(layout, int(fill(settings.global_batch, {**parameters, **values})), rank.world_size)
    return values | {"pipeline_batch": batch}


def count_pipeline_batch(layout: Mapping[str, Any], global_batch: int, ranks: int) -> int:
    """Return the sequences that a data parallel rank takes at once: a micro-batch, or what fills a pipeline once.

    torchtitan splits its local batch into a pipeline's micro-batches (torchtitan/distributed/pipeline_parallel.py).
    """
    if int(layout.get("pp", 1)) == 1:
        return int(layout["micro_batch"])
    per_copy = math.prod(int(layout.get(degree, 1)) for degree in ("tp", "pp", "cp"))
    return max(1, global_batch * per_copy // ranks)


def _rank_values(rank: Rank, output: str) -> dict[str, Scalar]:
    host, _, port = rank.rendezvous.rpartition(":")
    return {
        "rank": rank.rank,
        "world_size": rank.world_size,
        "local_rank": rank.local_rank,
        "node_rank": rank.node_rank,
        "nodes": rank.nodes,
        "gpus_per_node": rank.world_size // rank.nodes,
        "master_address": host or "127.0.0.1",
        "master_port": int(port or 29500),
        "output": output,
        "python": sys.executable,
    }


def shlex_words(text: str) -> list[str]:
    """Return the words of a text for a shell; of one with an open quote those between its spaces."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _command_line(settings: CommandSettings, values: Mapping[str, Scalar]) -> list[str] | str:
    """Return the words of the command line, those of its options included; a text for a shell."""
    if isinstance(settings.run, str):
        return fill(settings.run, values, shell=True)
    words = list(settings.run)
    for name, options in settings.options.items():
        if (value := format_value(values[name])) not in options:
            raise Infeasible(f"{name}={value}: command.options.{name} has {', '.join(options)}")
        words += map(str, options[value])
    return [fill(word, values) for word in words]


def _distributed_environment(settings: CommandSettings, rank: Rank, values: Mapping[str, Scalar]) -> dict[str, str]:
    """Return the variables of torch.distributed for a program per GPU; of one per node, the gang's visible devices."""
    variables = {
        "MASTER_ADDR": format_value(values["master_address"]),
        "MASTER_PORT": format_value(values["master_port"]),
        "PYTHONUNBUFFERED": "1",
    }
    if settings.start == "gpu":
        return variables | {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "LOCAL_RANK": "0"}
    return variables | restrict_program(os.environ, rank.node_devices)
