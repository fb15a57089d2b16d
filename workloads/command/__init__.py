"""`workload=command`: anybody's own trainer. A command line with a trial's parameters in it, run as a gang over the
devices, its log read while it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any, Literal, get_args

from workloads.api.contract import Estimate, Machine, Measurement, Rank, Workload
from workloads.command.template import PLACES, filled, filled_all, places
from workloads.llama.shapes import MODELS
from workloads.parallel.cost_model import estimate_step_s
from workloads.parallel.layout import DEGREES, Checkpointing, Layout, Setting, find_violation

TIMES = {"step_time_s": 1.0, "step_time_ms": 1e-3}  # what a log may say a step took, and how much of a second


@dataclass(frozen=True)
class CommandSettings:
    """What is run and how it is read; every text a template with {names} of parameters and of `template.PLACES`.

    run: the words of the command line; one text: for a shell, each value quoted
    options: further words, by a parameter's name and then its value
    start: one process for each gpu, or one for each node (as torchrun is started)
    environment, files: variables, and files written to {output} before: a mapping in the format of the file's name
    directory: where it is started
    log: regular expressions for what its lines say, by metric, each with one group; none: formats that are known
    global_batch, sequence_length: of a step, where the log does not say; with model (one of ours) and dtype there is
    MFU
    warmup, steps: steps left out, and steps that are enough: then the program is ended
    silence_s: after so long without a word it is ended
    layout: degrees by the names of `workloads.parallel.layout.Layout`: only legal ones are tried
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
    layout: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.run or not (isinstance(self.run, str) or all(isinstance(word, str) for word in self.run)):
            raise ValueError("run has to be a list of words, or one text for a shell")
        for name, expression in self.log.items():
            try:
                groups = re.compile(str(expression)).groups
            except re.error as error:
                raise ValueError(f"log.{name}: {expression!r} is no regular expression ({error})") from error
            if groups != 1:
                raise ValueError(f"log.{name}: {expression!r} has {groups} groups, one is what is read")
        if self.model and not places(self.model) and self.model not in MODELS:
            raise ValueError(f"model={self.model}: it may be {', '.join(MODELS)}")
        if self.layout:
            self._check_layout()
        if self.log and not {*TIMES, "tokens_per_s"} & set(self.log):
            raise ValueError(f"log: has none of {', '.join(TIMES)}, tokens_per_s, so there is no rate")

    def _check_layout(self) -> None:
        if strange := set(self.layout) - set(Layout.__dataclass_fields__):
            raise ValueError(f"layout.{min(strange)}: it may be {', '.join(Layout.__dataclass_fields__)}")
        if missing := [name for name in ("global_batch", "sequence_length", "model") if not getattr(self, name)]:
            raise ValueError(f"layout: needs {missing[0]} as well")

    @property
    def places(self) -> list[str]:
        """The parameters that it takes."""
        texts = [self.run, self.environment, self.files, self.global_batch, self.sequence_length, self.model]
        texts += [self.dtype, self.layout, self.options]
        return sorted((places(texts) | set(self.options)) - set(PLACES))


class Command(Workload):
    """One run of the program."""

    name = "command"
    Settings = CommandSettings
    Parameters: type[Any] = CommandSettings
    benchmark_version = "command/1"
    max_world_size = None
    reports_steps = True

    def __init__(self, settings: CommandSettings | None = None) -> None:
        self.settings = settings

    def with_settings(self, settings: CommandSettings) -> Command:
        """Of this command: its parameters are the names in its templates."""
        made = (LaidOut if settings.layout else Command)(settings)
        made.Parameters = make_dataclass("CommandParameters", [(name, Any) for name in settings.places], frozen=True)
        return made

    def run(self, parameters: Any, rank: Rank) -> Measurement:
        from workloads.command.run import measure

        assert self.settings is not None
        return measure(self.settings, vars(parameters), rank)


class LaidOut(Command):
    """A command whose degrees are known: only valid layouts are tried."""

    name = ""  # made by Command.with_settings, not registered
    has_estimates = True

    def estimate(self, parameters: Any, machine: Machine) -> Estimate:
        """By the rules of layouts. Memory is the program's own affair; the speed is our own trainer's."""
        assert self.settings is not None
        try:
            layout, setting = self._laid_out(vars(parameters), machine)
        except (KeyError, ValueError, TypeError) as error:
            return Estimate(f"is no layout: {error}", "it is a layout", description=str(vars(parameters)))
        if violation := find_violation(layout, setting):
            return Estimate(violation.reason, violation.rule, description=str(layout))
        if setting.shape.layers % layout.pp:
            reason = f"pp {layout.pp} of {setting.shape.layers} layers"
            return Estimate(reason, "pp divides the layers", description=str(layout))
        seconds = estimate_step_s(layout, setting, 2, machine)
        tokens = layout.global_batch * setting.sequence_length
        return Estimate(metrics={"tokens_per_s": tokens / seconds}, description=str(layout))

    def _laid_out(self, values: Mapping[str, Any], machine: Machine) -> tuple[Layout, Setting]:
        """The layout, all ranks that no degree names sharded, or copies where shard is named."""
        settings = self.settings
        assert settings is not None
        said = filled_all(settings.layout, values)
        layout = Layout(**{"global_batch": int(filled(settings.global_batch, values)), **said})
        if layout.checkpointing not in get_args(Checkpointing):
            raise ValueError(f"checkpointing={layout.checkpointing}, it may be {', '.join(get_args(Checkpointing))}")
        for name in (*DEGREES, "stages_per_rank", "micro_batch", "global_batch"):
            if not isinstance(number := getattr(layout, name), int) or number < 1:
                raise ValueError(f"{name}={number}, it has to be a whole number from 1 on")
        rest = max(1, machine.world_size // layout.world_size)
        layout = replace(layout, dp_replicate=rest) if "dp_shard" in said else replace(layout, dp_shard=rest)
        length = int(filled(settings.sequence_length, values))
        shape = MODELS[filled(settings.model, values)]
        return layout, Setting(shape, length, machine.world_size, machine.ranks_per_node, compiled=False)
