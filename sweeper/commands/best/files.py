"""The files of one trial: our command, and for a trainer its own configuration, with the software they ran with."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeper.commands.best.command_line import command_line, overrides_file, script_line, trial_parameters
from sweeper.common.format import format_interval, format_number, format_point
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.environment import process_values, without_variables
from sweeper.results.description import SweepDescription
from sweeper.results.stored import Winner
from workloads.api import registry
from workloads.api.errors import UserInputError
from workloads.api.metrics import get_metric
from workloads.formats.files import read_layout, render

FOLDER = "best"  # of the winner, in the sweep's folder
LINE, OVERRIDES, RESULT = "sweep.sh", "workload/best.yaml", "best.json"
PROGRAM = "program"  # the folder of what runs without this project
OTHER_TRAINERS = ("torchtitan", "megatron")  # whose files a layout of workload=parallel is written to as well


@dataclass(frozen=True)
class TrialFiles:
    """What runs one trial again.

    Attributes:
        folder: where the files lie, or will.
        title: which trial it is, with its figure.
        line: our command, for a shell.
        files: texts by their path below the folder.
        notes: what has to be known before one of them runs.
        result: the trial, its figure and its software, in plain values.
    """

    folder: Path
    title: str
    line: str
    files: Mapping[str, str]
    notes: tuple[str, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Write the files, in the place of those of an earlier run."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        for name, text in self.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if path.suffix == ".sh":
                path.chmod(0o700)


def build_files(description: SweepDescription, record: TrialRecord, value: Winner | None, folder: Path) -> TrialFiles:
    """Return the files of a trial.

    Args:
        description: of its sweep.
        record: of the trial.
        value: its objective; None of a trial that has none.
        folder: where the files will lie.
    """
    title = _describe(description, record, value)
    line = command_line(description, record)
    program, notes = _program_files(description, record, folder / PROGRAM)
    others, refusals = _other_trainers(description, record)
    result = _build_result(description, record, value, line)
    is_function = description.workload == "function"  # which no file of a configuration can name
    files = {
        LINE: f"#!/bin/sh\n# {title}\n{script_line(description, record)}\n",
        **({} if is_function else {OVERRIDES: overrides_file(description, record, title, folder)}),
        RESULT: json.dumps(result, indent=2, default=str) + "\n",
        **{f"{PROGRAM}/{name}": text for name, text in program.items()},
        **others,
    }
    if any("***" in text for text in files.values()):
        notes.append("*** stands for a secret, which is not stored: set it before you run the file")
    return TrialFiles(folder, title, line, files, (*notes, *refusals), result)


def _describe(description: SweepDescription, record: TrialRecord, value: Winner | None) -> str:
    """Return the trial with its figure in one line."""
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
    """Return the files of a program that the trial ran, and notes."""
    workload = registry.load(description.workload)
    if workload.Settings is not None:
        if description.settings is None:  # a function, whose parameters are known with it alone
            return {}, []
        workload = workload.with_settings(workload.Settings(**description.settings))
    values = trial_parameters(description, record)
    variables = {name: value for name, value in process_values(values).items() if value is not None}
    rank = replace(description.first_rank, environment=variables)
    try:
        files = workload.program_files(workload.Parameters(**without_variables(values)), rank, str(folder.absolute()))
    except Exception as error:  # whatever the parameters of a trial that failed lead to
        return {}, [f"{PROGRAM}: {type(error).__name__}: {error}"]
    return dict(files), []


def _other_trainers(description: SweepDescription, record: TrialRecord) -> tuple[dict[str, str], list[str]]:
    """Return the layout of a trial of `workload=parallel` as files of trainers, and why one cannot express it."""
    if description.workload != "parallel" or record.status is not TrialStatus.COMPLETE:
        return {}, []
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


def _build_result(
    description: SweepDescription, record: TrialRecord, value: Winner | None, line: str
) -> dict[str, Any]:
    measured = record.measurements[0].get("machine_info", {}) if record.measurements else {}
    bounds = {} if value is None or math.isnan(value.low) else {"low": value.low, "high": value.high}
    figure = None if value is None else {"value": value.value, **bounds, "rounds": value.rounds}
    others = {"other_objectives": dict(value.others)} if value is not None and value.others else {}
    return {
        "sweep": description.name,
        "trial": record.number,
        "outcome": record.status.value,
        "objective": description.objective,
        "direction": description.direction,
        "result": figure,
        **others,
        "parameters": record.all_params,
        "device": description.device,
        "gpus": description.gpus,
        "nodes": description.nodes,
        "software": description.software,
        "git": description.git,
        "process": measured,
        "command": line,
    }
