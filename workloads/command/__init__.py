"""`workload=command`: run any training program as a gang over the devices, and read the program's log as it runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal

from workloads.api.contract import (
    BandEnds,
    Estimate,
    Infeasible,
    Machine,
    Measurement,
    Rank,
    Scalar,
    Workload,
    is_file_name,
)
from workloads.command.layouts import SETTABLE_FIELDS, estimate_layout, read_job
from workloads.command.template import PLACEHOLDERS, fill, find_placeholders
from workloads.estimator.estimate import find_band
from workloads.layouts.trainers import TRAINERS
from workloads.models.model import TRAINED_MODELS

METRIC_NAME = re.compile(r"[\w.-]+", re.ASCII)  # MLflow rejects other names
STEP_TIME_UNITS_S = {"step_time_s": 1.0, "step_time_ms": 1e-3}  # step time metrics and their units


@dataclass(frozen=True)
class CommandSettings:
    """A command and its log format.

    Every string is a template with {placeholders}: parameter names, and the names in `template.PLACEHOLDERS`.

    Attributes:
        run: the command line, as a list of arguments or as a string that a shell runs, with each value quoted.
        options: further arguments, keyed by parameter name and then by value.
        start: one process per "gpu", or one process per "node", as with torchrun.
        environment: environment variables for the program.
        files: files to write to {output} before the start, by name: a string, or a mapping for the name's format.
        directory: the directory in which the program is started.
        log: a regular expression with one group per metric; if empty, the formats of `workloads.formats.logs`.
        global_batch: sequences per step, if the log does not report them.
        sequence_length: tokens per sequence, if the log does not report them.
        model: the model that the program trains; a known model gives TFLOP/s and an MFU.
        dtype: the data type of the program's GEMMs, or the name of the recipe.
        warmup: the number of unmeasured steps at the start.
        steps: the number of measured steps, after which the program is terminated.
        silence_s: seconds without output after which the program is terminated.
        claims: what happens to a trial if the program claims a speed that its own steps contradict: "mark" (complete
            but not ranked) or "fail".
        layout: values of the fields of `workloads.layouts.layout.Layout`, and of `compiled` and `state` of
            `workloads.layouts.layout.Job`. Only valid layouts are tried.
        trainer: the planner's trainer, which gives the rules, memory and efficiency for layout estimates. If empty,
            speed is estimated as for this project's trainer, and memory is not estimated.
    """

    run: Any
    options: dict[str, Any] = field(default_factory=dict)
    start: Literal["gpu", "node"] = "node"
    environment: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    directory: str = "."
    log: dict[str, Any] = field(default_factory=dict)
    global_batch: str = ""
    sequence_length: str = ""
    model: str = ""
    dtype: str = ""
    warmup: int = field(default=3, metadata={"min": 0})
    steps: int = field(default=10, metadata={"min": 1})
    silence_s: float = field(default=300.0, metadata={"min": 1})
    claims: Literal["mark", "fail"] = "mark"
    layout: dict[str, Any] = field(default_factory=dict)
    trainer: str = ""

    def __post_init__(self) -> None:
        if not self.run or not (isinstance(self.run, str) or all(isinstance(word, str) for word in self.run)):
            raise ValueError("run has to be a list of words, or one text for a shell")
        for name, expression in self.log.items():
            if not METRIC_NAME.fullmatch(str(name)):
                raise ValueError(f"log.{name}: a metric's name has letters, digits, '_', '.' and '-' only")
            try:
                groups = re.compile(str(expression)).groups
            except re.error as error:
                raise ValueError(f"log.{name}: {expression!r} is not a regular expression ({error})") from error
            if groups != 1:
                raise ValueError(f"log.{name}: {expression!r} has {groups} groups, it needs exactly one for the value")
        rates = (*STEP_TIME_UNITS_S, "tokens_per_s")
        if self.log and not set(rates) & set(self.log):
            raise ValueError(f"log: has none of {', '.join(rates)}, one of which is needed for a rate")
        for name in map(str, self.files):
            if not is_file_name(name):
                raise ValueError(
                    f"files.{name}: must be the name of a file, without a folder; it is written to {{output}}"
                )
        if self.model and not find_placeholders(self.model) and self.model not in TRAINED_MODELS:
            raise ValueError(f"model={self.model}: it has to be one of {', '.join(TRAINED_MODELS)}")
        if self.trainer and self.trainer not in TRAINERS:
            raise ValueError(f"trainer={self.trainer}: it has to be one of {', '.join(TRAINERS)}")
        if unknown := set(self.layout) - set(SETTABLE_FIELDS):
            raise ValueError(f"layout.{min(unknown)}: unknown key, allowed are {', '.join(SETTABLE_FIELDS)}")
        for name in ("global_batch", "sequence_length", "model") if self.layout else ():
            if not getattr(self, name):
                raise ValueError(f"layout: needs {name} as well")
        if "pipeline_batch" in find_placeholders(self._templates) and "micro_batch" not in self.layout:
            raise ValueError("{pipeline_batch}: needs layout.micro_batch")

    @property
    def parameter_names(self) -> list[str]:
        """The command's parameters: the placeholders in the templates and the names of the options."""
        return sorted((find_placeholders(self._templates) | set(self.options)) - set(PLACEHOLDERS))

    @property
    def _templates(self) -> list[Any]:
        sizes = [self.global_batch, self.sequence_length, self.model, self.dtype]
        return [self.run, self.environment, self.files, self.layout, self.options, *sizes]


class Command(Workload):
    """One run of the program."""

    name = "command"
    Settings = CommandSettings
    Parameters: type[Any] = CommandSettings
    benchmark_version = "command/1"
    max_world_size = None
    reports_steps = True
    finalists = 0  # trials take minutes
    finals_rounds = 3
    runs_command = True
    work = ("model", "sequence_length", "global_batch", "dtype")
    settings: CommandSettings  # set by `with_settings`

    def with_settings(self, settings: CommandSettings) -> Command:
        """Return the workload for this command. The parameters are the names in the command's templates."""
        command = LayoutCommand() if settings.layout else Command()
        command.settings = settings
        parameters = [(name, Any) for name in settings.parameter_names]
        command.Parameters = make_dataclass("CommandParameters", parameters, frozen=True)
        # Programs that train the same model on the same batch do the same work under any configuration. Without a
        # model, only the command defines what is computed.
        command.ways = ("warmup", "steps", *([*settings.parameter_names, "command"] if settings.model else []))
        return command

    def recorded_parameters(self, parameters: Any) -> Mapping[str, Scalar]:
        """Return the command's parameters and the settings that define what the command computes."""
        values, settings = vars(parameters), self.settings
        command = settings.run if isinstance(settings.run, str) else shlex.join(settings.run)
        filled = {name: f"{{{name}}}" for name in PLACEHOLDERS} | values
        declared = {name: text for name in self.work if (text := fill(getattr(settings, name), filled))}
        return {"command": command, "warmup": settings.warmup, "steps": settings.steps, **values, **declared}

    def preview(self, parameters: Any, machine: Machine) -> str:
        """Return the first rank's command line and files, with secrets masked."""
        from workloads.command.invocation import build_invocation

        gpus, ranks_per_node = machine.world_size, machine.ranks_per_node
        nodes = max(1, gpus // ranks_per_node)
        rendezvous = "first-node:29500" if nodes > 1 else ""
        rank = Rank(world_size=gpus, ranks_per_node=ranks_per_node, rendezvous=rendezvous, nodes=nodes)
        try:
            invocation = build_invocation(self.settings, vars(parameters), rank, "{output}")
        except Infeasible as error:
            return f"infeasible: {error}"
        copies, unit = (gpus, "GPUs") if self.settings.start == "gpu" else (nodes, "nodes")
        parts = [f"# on the first of {copies} {unit}"] if copies > 1 else []
        parts += [invocation.describe()]
        parts += [f"\n# {{output}}/{name}\n{invocation.mask(text).rstrip()}" for name, text in invocation.files.items()]
        return "\n".join(parts)

    def try_out(self, parameters: Any) -> tuple[str, Measurement]:
        from workloads.command.run import read_first_steps

        return read_first_steps(self.settings, vars(parameters))

    def program_files(self, parameters: Any, rank: Rank, folder: str) -> Mapping[str, str]:
        from workloads.command.invocation import program_files

        return program_files(self.settings, vars(parameters), rank, folder)

    def run(self, parameters: Any, rank: Rank) -> Measurement:
        from workloads.command.run import measure

        return measure(self.settings, vars(parameters), rank)


class LayoutCommand(Command):
    """A command with known parallel degrees: only valid layouts are tried."""

    name = ""  # created by Command.with_settings, not registered
    has_estimates = True

    def estimate(self, parameters: Any, machine: Machine) -> Estimate:
        return estimate_layout(self.settings, vars(parameters), machine)

    def find_band(self, parameters: Any, machine: Machine) -> tuple[BandEnds, str]:
        band = find_band(read_job(self.settings, vars(parameters), machine), machine.cluster)
        return band.ends, band.meaning
