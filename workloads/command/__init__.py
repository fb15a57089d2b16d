"""`workload=command`: run any training program as a gang over the devices, and read its log while it runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any, Literal, get_args

from workloads.api.contract import Estimate, Infeasible, Machine, Measurement, Rank, Scalar, Workload
from workloads.command.template import PLACEHOLDERS, fill, fill_all, find_placeholders
from workloads.llama.shapes import MODELS
from workloads.parallel.estimates import estimate_speed
from workloads.parallel.layout import Checkpointing, Layout, Setting
from workloads.parallel.rules import find_violation
from workloads.planner.rules import DEGREES

STEP_TIME_UNITS_S = {"step_time_s": 1.0, "step_time_ms": 1e-3}  # the metrics of a step's time, and their units


@dataclass(frozen=True)
class CommandSettings:
    """The command and the format of its log.

    Every text is a template with {placeholders}: the names of parameters, and those of `template.PLACEHOLDERS`.

    Attributes:
        run: the words of the command line; one text is run by a shell, with each value quoted.
        options: further words, by a parameter's name and then its value.
        start: one process for each "gpu", or one for each "node", as torchrun is started.
        environment: variables of the program.
        files: files written to {output} before the start, by name: a text, or a mapping in the format of the name.
        directory: where the program is started.
        log: a regular expression with one group for each metric; if empty, the formats of `workloads.api.logs`.
        global_batch: sequences of a step, where the log does not have them.
        sequence_length: tokens of a sequence, where the log does not have them.
        model: the model that the program trains; with a known one there are TFLOP/s and an MFU.
        dtype: data type of the program's matrix products, or the name of its recipe.
        warmup: steps that are not measured.
        steps: measured steps, after which the program is terminated.
        silence_s: a program that prints nothing for so long is terminated.
        claims: what becomes of a trial whose program claims a speed that its own steps contradict: "mark", complete
            but not ranked, or "fail".
        layout: values of `workloads.parallel.layout.Layout` by the names of its fields: only valid layouts are tried.
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

    def __post_init__(self) -> None:
        if not self.run or not (isinstance(self.run, str) or all(isinstance(word, str) for word in self.run)):
            raise ValueError("run has to be a list of words, or one text for a shell")
        self._check_log()
        if self.model and not find_placeholders(self.model) and self.model not in MODELS:
            raise ValueError(f"model={self.model}: it has to be one of {', '.join(MODELS)}")
        if self.layout:
            self._check_layout()

    def _check_log(self) -> None:
        for name, expression in self.log.items():
            try:
                groups = re.compile(str(expression)).groups
            except re.error as error:
                raise ValueError(f"log.{name}: {expression!r} is not a regular expression ({error})") from error
            if groups != 1:
                raise ValueError(f"log.{name}: {expression!r} has {groups} groups, it needs exactly one for the value")
        rates = (*STEP_TIME_UNITS_S, "tokens_per_s")
        if self.log and not set(rates) & set(self.log):
            raise ValueError(f"log: has none of {', '.join(rates)}, one of which is needed for a rate")

    def _check_layout(self) -> None:
        known = Layout.__dataclass_fields__
        if unknown := set(self.layout) - set(known):
            raise ValueError(f"layout.{min(unknown)}: unknown key, allowed are {', '.join(known)}")
        if missing := [name for name in ("global_batch", "sequence_length", "model") if not getattr(self, name)]:
            raise ValueError(f"layout: needs {missing[0]} as well")

    @property
    def parameter_names(self) -> list[str]:
        """The parameters of the command: the placeholders in its templates and the names of its options."""
        templates = [self.run, self.environment, self.files, self.global_batch, self.sequence_length, self.model]
        templates += [self.dtype, self.layout, self.options]
        return sorted((find_placeholders(templates) | set(self.options)) - set(PLACEHOLDERS))


class Command(Workload):
    """One run of the program."""

    name = "command"
    Settings = CommandSettings
    Parameters: type[Any] = CommandSettings
    benchmark_version = "command/1"
    max_world_size = None
    reports_steps = True
    runs_command = True
    work = ("model", "sequence_length", "global_batch", "dtype")

    def __init__(self, settings: CommandSettings | None = None) -> None:
        self.settings = settings

    def with_settings(self, settings: CommandSettings) -> Command:
        """Return the workload of this command. Its parameters are the names in the command's templates."""
        command = LayoutCommand(settings) if settings.layout else Command(settings)
        parameters = [(name, Any) for name in settings.parameter_names]
        command.Parameters = make_dataclass("CommandParameters", parameters, frozen=True)
        # Programs that train the same model on the same batch do the same work, however they are configured. Without
        # a model nothing but the command states what is computed.
        command.ways = ("warmup", "steps", *([*settings.parameter_names, "command"] if settings.model else []))
        return command

    def declared_work(self, parameters: Mapping[str, Any]) -> dict[str, str]:
        """Return what the settings declare of the work of one point; empty texts where they do not."""
        assert self.settings is not None
        values = {name: f"{{{name}}}" for name in PLACEHOLDERS} | dict(parameters)
        return {name: fill(getattr(self.settings, name), values) for name in self.work}

    def recorded_parameters(self, parameters: Any) -> Mapping[str, Scalar]:
        """Return the parameters of the command with the settings that state what it computes."""
        assert self.settings is not None
        values, settings = vars(parameters), self.settings
        command = settings.run if isinstance(settings.run, str) else shlex.join(settings.run)
        measuring = {"command": command, "warmup": settings.warmup, "steps": settings.steps}
        return {**measuring, **values, **{name: text for name, text in self.declared_work(values).items() if text}}

    def preview(self, parameters: Any, machine: Machine) -> str:
        """Return the command line and the files of the first rank, secrets masked."""
        from workloads.command.invocation import build_invocation

        assert self.settings is not None
        nodes = max(1, machine.world_size // machine.ranks_per_node)
        rank = Rank(
            world_size=machine.world_size,
            ranks_per_node=machine.ranks_per_node,
            rendezvous="first-node:29500" if nodes > 1 else "",
            nodes=nodes,
        )
        try:
            invocation = build_invocation(self.settings, vars(parameters), rank, "{output}")
        except Infeasible as error:
            return f"infeasible: {error}"
        copies = machine.world_size if self.settings.start == "gpu" else nodes
        unit = "GPUs" if self.settings.start == "gpu" else "nodes"
        parts = [f"# on the first of {copies} {unit}"] if copies > 1 else []
        parts += [invocation.describe()]
        parts += [f"\n# {{output}}/{name}\n{invocation.mask(text).rstrip()}" for name, text in invocation.files.items()]
        return "\n".join(parts)

    def program_files(self, parameters: Any, rank: Rank, folder: str) -> Mapping[str, str]:
        """Return a shell script that runs the program, and the command's rendered files."""
        from workloads.command.script import program_files

        assert self.settings is not None
        return program_files(self.settings, vars(parameters), rank, folder)

    def run(self, parameters: Any, rank: Rank) -> Measurement:
        from workloads.command.run import measure

        assert self.settings is not None
        return measure(self.settings, vars(parameters), rank)


class LayoutCommand(Command):
    """A command whose parallel degrees are known: only valid layouts are tried."""

    name = ""  # created by Command.with_settings, not registered
    has_estimates = True

    def estimate(self, parameters: Any, machine: Machine) -> Estimate:
        """Check the layout's rules, and estimate the speed as if this project's trainer ran it.

        The program's memory is not estimated.
        """
        try:
            layout, setting = self._read_layout(vars(parameters), machine)
        except (KeyError, ValueError, TypeError) as error:
            return Estimate(
                f"is not a layout: {error}", "the parameters are a layout", description=str(vars(parameters))
            )
        if violation := find_violation(layout, setting):
            return Estimate(violation.reason, violation.rule, description=str(layout))
        if setting.shape.layers % layout.pp:
            reason = f"pp {layout.pp} does not divide {setting.shape.layers} layers"
            return Estimate(reason, "pp divides the layers", description=str(layout))
        speed = estimate_speed(layout, setting, machine)
        return Estimate(metrics={"tokens_per_s": speed["tokens_per_s"]}, description=str(layout))

    def _read_layout(self, values: Mapping[str, Any], machine: Machine) -> tuple[Layout, Setting]:
        """Return the layout of these parameters.

        Ranks that no degree names are sharded data parallel, or copies where dp_shard is named.

        Raises:
            ValueError: a value is not allowed.
        """
        settings = self.settings
        assert settings is not None
        fields = fill_all(settings.layout, values)
        layout = Layout(**{"global_batch": int(fill(settings.global_batch, values)), **fields})
        if layout.checkpointing not in get_args(Checkpointing):
            allowed = ", ".join(get_args(Checkpointing))
            raise ValueError(f"checkpointing={layout.checkpointing}, it has to be one of {allowed}")
        for name in (*DEGREES, "stages_per_rank", "micro_batch", "global_batch"):
            if not isinstance(number := getattr(layout, name), int) or number < 1:
                raise ValueError(f"{name}={number}, it has to be a whole number from 1")
        remaining = max(1, machine.world_size // layout.world_size)
        is_replicated = "dp_shard" in fields
        layout = replace(layout, dp_replicate=remaining) if is_replicated else replace(layout, dp_shard=remaining)
        length = int(fill(settings.sequence_length, values))
        shape = MODELS[fill(settings.model, values)]
        return layout, Setting(shape, length, machine.world_size, machine.ranks_per_node, compiled=False)
