"""Build one rank's command: arguments, environment variables and files, and a script that runs the command."""

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workloads.api.contract import Infeasible, Rank, Scalar
from workloads.api.secrets import mask, masked, secret_values
from workloads.api.visible_devices import restrict_program
from workloads.command import CommandSettings
from workloads.command.template import fill, fill_all, format_value, render

COMMAND_FILE = "command.txt"
# Names of a trial's own files. A rendered file with one of these names is kept as rendered_….
TRIAL_FILES = (COMMAND_FILE, "log.txt", "last_lines.txt", "trial.json")
SCRIPT = "run.sh"
# Values that differ between a program's processes, each with its environment variable and default.
OF_EACH_NODE = {
    "node_rank": ("NODE_RANK", "0"),
    "master_address": ("MASTER_ADDR", "127.0.0.1"),
    "master_port": ("MASTER_PORT", "29500"),
}


@dataclass(frozen=True)
class Invocation:
    """The command that one rank runs."""

    arguments: list[str] | str  # command-line arguments; a shell runs a string
    environment: Mapping[str, str]  # variables in addition to this process's variables
    directory: Path
    files: Mapping[str, str]  # contents of the files in {output}, by name

    def mask(self, text: str) -> str:
        """Return the text with secrets masked, including those in the command line and in all variables."""
        try:
            words = shlex.split(self.arguments) if isinstance(self.arguments, str) else self.arguments
        except ValueError:  # a quote is not closed
            words = str(self.arguments).split()
        return mask(text, secret_values(words, {**os.environ, **self.environment}))

    def describe(self) -> str:
        """Return the command as a shell line, with secrets masked."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(masked(dict(self.environment)).items())]
        words = ["/bin/sh", "-c", self.arguments] if isinstance(self.arguments, str) else self.arguments
        lines = [f"cd {shlex.quote(str(self.directory))} &&", *variables, shlex.join(masked(words))]
        return self.mask(" \\\n".join(lines))

    def kept_files(self) -> dict[str, bytes]:
        """Return the command and the rendered files to keep with the trial, with secrets masked."""
        names = {name: f"rendered_{name}" if name in TRIAL_FILES else name for name in self.files}
        files = {names[name]: self.mask(text).encode() for name, text in self.files.items()}
        return {COMMAND_FILE: f"{self.describe()}\n".encode(), **files}


def build_invocation(
    settings: CommandSettings,
    parameters: Mapping[str, Scalar],
    rank: Rank,
    output: str,
    replaced: Mapping[str, str] | None = None,
) -> Invocation:
    """Fill in the settings' templates for one rank. `output` is the folder that will contain the files.

    The values in `replaced` override the rank's placeholders. Raises Infeasible if `options` has no arguments for a
    parameter's value.
    """
    values = {**parameters, **placeholder_values(settings, parameters, rank, output), **(replaced or {})}
    if isinstance(settings.run, str):
        arguments: list[str] | str = fill(settings.run, values, shell=True)
    else:
        words = list(settings.run)
        for name, options in settings.options.items():
            texts = (format_value(values[name]), str(values[name]))  # such as 1000 and 1000.0
            if (value := next(filter(options.__contains__, texts), texts[0])) not in options:
                raise Infeasible(f"{name}={value}: command.options.{name} has {', '.join(options)}")
            words += map(str, options[value])
        arguments = [fill(word, values) for word in words]
    # torch.distributed's variables for one program per GPU, or the gang's visible devices for one program per node.
    address = {"MASTER_ADDR": values["master_address"], "MASTER_PORT": values["master_port"]}
    variables = {name: format_value(value) for name, value in address.items()} | {"PYTHONUNBUFFERED": "1"}
    if settings.start == "gpu":
        variables |= {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "LOCAL_RANK": "0"}
    else:
        variables |= restrict_program(os.environ, rank.node_devices)
    environment = {name: fill(str(text), values) for name, text in settings.environment.items()}
    return Invocation(
        arguments,
        {**rank.environment, **variables, **environment},
        Path(settings.directory),
        {name: render(name, template, values) for name, template in settings.files.items()},
    )


def placeholder_values(
    settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, output: str
) -> dict[str, Scalar]:
    """Return the values of `template.PLACEHOLDERS`; `pipeline_batch` is included only if the layout has a batch."""
    host, _, port = rank.rendezvous.rpartition(":")
    values: dict[str, Scalar] = {
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
    layout = fill_all(settings.layout, {**parameters, **values})
    if "micro_batch" not in layout:
        return values
    # torchtitan splits the sequences that a data-parallel rank receives at once into the micro-batches of one pipeline
    # pass (torchtitan/distributed/pipeline_parallel.py).
    batch = int(layout["micro_batch"])
    if int(layout.get("pp", 1)) > 1:
        per_copy = math.prod(int(layout.get(degree, 1)) for degree in ("tp", "pp", "cp"))
        global_batch = int(fill(settings.global_batch, {**parameters, **values}))
        batch = max(1, global_batch * per_copy // rank.world_size)
    return values | {"pipeline_batch": batch}


def program_files(
    settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, folder: str
) -> dict[str, str]:
    """Return a shell script that runs the program without this project, and the rendered files. Secrets are masked.

    `rank` is the trial's first rank. `folder` is where the files will be; it replaces {output} in their contents.
    Raises Infeasible under the same conditions as `build_invocation`.
    """
    differing, lines = {}, ["#!/bin/sh"]
    if settings.start == "gpu" and rank.world_size > 1:
        differing, last = {"rank": ("RANK", "0"), **OF_EACH_NODE}, rank.world_size - 1
        lines += [f"# Start it once for each of {rank.world_size} GPUs, with RANK=0 to {last} and MASTER_ADDR."]
    elif rank.nodes > 1:
        differing, last = OF_EACH_NODE, rank.nodes - 1
        lines += [f"# Start it on each of {rank.nodes} nodes, with NODE_RANK=0 to {last} and MASTER_ADDR."]
    # Differing values are marked in the contents; @ needs no quotes in a shell.
    markers = {name: f"@{variable}@" for name, (variable, _) in differing.items()}
    invocation = build_invocation(settings, parameters, rank, folder, markers)

    def replace_markers(text: str) -> str:
        for variable, default in differing.values():
            text = text.replace(f"@{variable}@", f"${{{variable}:-{default}}}")
        return text

    def quote_word(text: str) -> str:
        if replace_markers(text) == text:
            return shlex.quote(text)
        escaped = re.sub(r'([\\"$`])', r"\\\1", text)
        return f'"{replace_markers(escaped)}"'

    variables = {**invocation.environment, **({"RANK": "@RANK@"} if "rank" in differing else {})}
    lines += [f"cd {shlex.quote(str(invocation.directory))} || exit 1"]
    lines += [f"export {name}={quote_word(value)}" for name, value in sorted(variables.items())]
    if isinstance(invocation.arguments, str):
        lines += [replace_markers(invocation.arguments)]
    else:
        lines += ["exec " + " \\\n    ".join(map(quote_word, invocation.arguments))]
    files = {SCRIPT: "\n".join(lines) + "\n", **invocation.files}
    return {name: invocation.mask(text) for name, text in files.items()}
