"""Build the files that rerun one trial: the sweeper command, the trainer's configuration, and the software versions."""

import json
import math
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from sweeper.cli.arguments import parse_arguments
from sweeper.common.format import format_interval, format_number, format_point
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.environment import is_variable, process_values, without_variables
from sweeper.config.space import LISTS, Parameters, Value, escape_references, write_value
from sweeper.results.description import SweepDescription
from sweeper.results.stored import Winner
from workloads.api import registry
from workloads.api.errors import UserInputError
from workloads.api.metrics import get_metric

FOLDER = "best"  # the winner's subfolder in a sweep's folder
LINE, RESULT = "sweep.sh", "best.json"
PROGRAM = "program"  # the subfolder for files that run without this project
OTHER_TRAINERS = ("torchtitan", "megatron")  # trainers for which a layout of workload=parallel is also written


@dataclass(frozen=True)
class TrialFiles:
    """The files that rerun one trial."""

    folder: Path
    title: str  # the trial and its result
    line: str  # the sweeper command, quoted for a shell
    files: Mapping[str, str]  # file contents by their path in the folder
    notes: tuple[str, ...] = ()  # warnings and instructions for running the files
    result: Mapping[str, Any] = field(default_factory=dict)  # content of best.json: trial, result, software

    def write(self) -> None:
        """Write the files, replacing all earlier files in the folder."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        for name, text in self.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if path.suffix == ".sh":
                path.chmod(0o700)


def build_files(description: SweepDescription, record: TrialRecord, value: Winner | None, folder: Path) -> TrialFiles:
    """Build the files to put in `folder` to rerun a trial. `value` is None for a trial without an objective value."""
    title = _describe(description, record, value)
    line = shlex.join(command_words(description, record))
    program, notes = _program_files(description, record, folder / PROGRAM)
    others, refusals = _other_trainers(description, record)
    figure = None
    if value is not None:
        bounds = {} if math.isnan(value.low) else {"low": value.low, "high": value.high}
        figure = {"value": value.value, **bounds, "rounds": value.rounds}
    result = {
        "sweep": description.name,
        "trial": record.number,
        "outcome": record.status.value,
        "objective": description.objective,
        "direction": description.direction,
        "result": figure,
        **({"other_objectives": dict(value.others)} if value is not None and value.others else {}),
        "parameters": record.all_params,
        "device": description.device,
        "gpus": description.gpus,
        "nodes": description.nodes,
        "software": description.software,
        "git": description.git,
        "process": record.measurements[0].get("machine_info", {}) if record.measurements else {},
        "command": line,
    }
    files = {
        LINE: f"#!/bin/sh\n# {title}\n{script_line(description, record)}\n",
        RESULT: json.dumps(result, indent=2, default=str) + "\n",
        **{f"{PROGRAM}/{name}": text for name, text in program.items()},
        **others,
    }
    if any("***" in text for text in files.values()):
        notes.append("*** stands for a secret, which is not stored: set it before you run the file")
    return TrialFiles(folder, title, line, files, (*notes, *refusals), result)


def _describe(description: SweepDescription, record: TrialRecord, value: Winner | None) -> str:
    trial = f"trial {record.number} of {description.name}: {format_point(record.params)}"
    if value is None:
        return f"{trial}; {record.status.value}{f', {record.reason}' if record.reason else ''}".replace("\n", " ")
    figure = f"{format_number(value.value)} {get_metric(description.objective).unit or description.objective}"
    interval = f"95% {format_interval(value.low, value.high)}, " if not math.isnan(value.low) else ""
    method = f"mean of {value.rounds} rounds of the finals" if value.rounds else "a single trial"
    others = "".join(f", {format_number(v)} {get_metric(name).unit or name}" for name, v in value.others.items())
    return f"{trial}; {figure} ({interval}{method}){others} on {description.device}"


def _program_files(
    description: SweepDescription, record: TrialRecord, folder: Path
) -> tuple[dict[str, str], list[str]]:
    workload = registry.load(description.workload)
    if workload.Settings is not None:
        if description.settings is None:  # a function defines its own parameters
            return {}, []
        workload = workload.with_settings(workload.Settings(**description.settings))
    values = trial_parameters(description, record)
    variables = {name: value for name, value in process_values(values).items() if value is not None}
    rank = replace(description.first_rank, environment=variables)
    try:
        files = workload.program_files(workload.Parameters(**without_variables(values)), rank, str(folder.absolute()))
    except Exception as error:  # a failed trial's parameters can raise any exception
        return {}, [f"{PROGRAM}: {type(error).__name__}: {error}"]
    return dict(files), []


def _other_trainers(description: SweepDescription, record: TrialRecord) -> tuple[dict[str, str], list[str]]:
    if description.workload != "parallel" or record.status is not TrialStatus.COMPLETE:
        return {}, []
    from workloads.formats.files import read_layout, render  # takes 0.05 s to import

    values = trial_parameters(description, record)
    words = " ".join(f"space.{name}={str(value).lower()}" for name, value in without_variables(values).items())
    files, notes = {}, []
    for trainer in OTHER_TRAINERS:
        try:
            job = read_layout(f"python -m sweeper workload=parallel {words}", description.gpus).job
            rendered = render(job, description.gpus, trainer)
        except UserInputError as error:
            notes.append(f"no file for {trainer}: {error}")
            continue
        files[f"{trainer}/{rendered.name}"] = rendered.text
        notes.append(f"{trainer}/{rendered.name} runs with: {rendered.command}")
        notes += [f"{trainer}/{rendered.name}: {note}" for note in rendered.notes]
    return files, notes


# Arguments that a single trial does not need or that its parameters replace. An entry with a final dot is a section.
REPLACED = (
    *("space.", "search", "search.", "budget.", "finals.", "projection.", "workload.strategy"),
    *("model", "name", "retry", "plan", "progress", "gpus", "hardware", "cluster.cpus"),
)


def trial_parameters(description: SweepDescription, record: TrialRecord) -> Parameters:
    """Return all parameters of a trial, starting with the constants of the sweep's space."""
    return {**description.constants, **record.params}


def command_words(description: SweepDescription, record: TrialRecord) -> list[str]:
    """Return the command that runs only this trial: the sweep's command with the trial's parameters as constants."""
    program, words = _split_program(description.arguments)
    arguments = parse_arguments(words)
    kept = []
    for word in arguments.overrides:
        key = word.lstrip("+~").partition("=")[0]
        if not any(key.startswith(name) if name.endswith(".") else key == name for name in REPLACED):
            kept.append(word)
    flags = [f"--config-dir={arguments.config_dir}"] if arguments.config_dir else []
    values = trial_parameters(description, record)
    cpus = description.cpus or description.config.get("cluster", {}).get("cpus")  # 0.2 described only the setting
    return [
        *(*program, *flags, *kept),
        *(f"hardware={description.hardware}", f"gpus={description.gpus}"),
        *([f"cluster.cpus={cpus}"] if cpus else []),
        *(f"space.{name}={override_value(name, value)}" for name, value in values.items()),
        *("search=grid", "finals.top=0"),
    ]


def script_line(description: SweepDescription, record: TrialRecord) -> str:
    """Return the command that uses the sweep's interpreter, because the result depends on the packages installed there.
    Each run gets a new name. With an existing name, the command would find the trial finished and measure nothing."""
    words = command_words(description, record)
    words = words[3:] if words[1:2] == ["-m"] else words[1:]
    command = shlex.join([description.python, "-m", "sweeper", *words])
    return f'{command} name="{description.name}-trial{record.number}-$(date -u +%Y%m%dT%H%M%S)"'


def override_value(name: str, value: Value) -> str:
    """Format a parameter's value in Hydra's override syntax. Text that could be a list has quotes."""
    if isinstance(value, str) and any(mark in value for mark in LISTS):
        value = QuotedString(value, Quote.single).with_quotes()
        if is_variable(name) and "," in value:  # `cli.composition` adds the outer quotes
            return escape_references(value)
    return write_value(value)


def _split_program(arguments: Any) -> tuple[list[str], list[str]]:
    words = list(arguments)
    if words[1:3] == ["-m", "sweeper.function"]:  # the form that sweeper 0.2 recorded
        words[2:3] = ["sweeper", "function"]
    size = 3 if words[1:2] == ["-m"] else 1
    size += 2 if words[size : size + 1] == ["function"] else 0
    return words[:size], words[size:]
