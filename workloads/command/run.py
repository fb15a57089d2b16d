"""Run one trial of a command: start the program on its ranks, read its log, and measure its steps."""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workloads.api.contract import Infeasible, Measurement, Pruned, Rank, Scalar
from workloads.api.derived import find_source
from workloads.api.host import cpu_name
from workloads.api.logs import LogReader, Step
from workloads.command import STEP_TIME_UNITS_S, CommandSettings
from workloads.command.process import Program, ProgramSpec
from workloads.command.template import fill, format_value, render
from workloads.llama.flops import model_flops_per_token
from workloads.llama.shapes import MODELS

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass
class RegexLogReader:
    """Reads a log by the regular expressions of `command.log`. A step is complete when all of them have matched."""

    expressions: Mapping[str, str]
    reported_config: dict[str, Scalar] = field(default_factory=dict)
    kind: str = "command.log"
    device: str = ""
    _pending: dict[str, float] = field(default_factory=dict)
    _count: int = 0

    def feed(self, line: str) -> Step | None:
        """Return the step that the line completes, if it completes one."""
        for name, expression in self.expressions.items():
            if (match := re.search(expression, line)) and (value := _finite_number(match[1])) is not None:
                metric = "step_time_s" if name in STEP_TIME_UNITS_S else name
                self._pending[metric] = value * STEP_TIME_UNITS_S.get(name, 1.0)
        if len(self._pending) < len(self.expressions):
            return None
        metrics, self._pending, self._count = self._pending, {}, self._count + 1
        return Step(self._count, metrics)


def _finite_number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass
class ProgramLog:
    """The steps that were read from a program's log, and the last bytes of its text."""

    reader: LogReader | RegexLogReader
    steps: list[Step] = field(default_factory=list)
    text: bytes = b""


def measure(settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank) -> Measurement:
    """Run the program on this rank, or nothing where another rank of this node runs it.

    Raises:
        Infeasible: the ranks are not spread evenly over the nodes, or a value of the settings is not allowed.
        OutOfMemory, ProgramFailed, TrialTimeout: see `Program.run`.
        Pruned: other trials were better at the same step.
        RuntimeError: the program could not be started, or printed no step after warm-up.
    """
    if settings.start == "node" and rank.ranks_per_node * rank.nodes != rank.world_size:
        raise Infeasible(
            f"{rank.world_size} ranks are not spread evenly over {rank.nodes} nodes, as command.start=node requires"
        )
    if settings.start == "node" and rank.local_rank:
        return _empty_measurement(parameters, rank)
    output = Path(tempfile.mkdtemp(prefix="sweeper-command-"))
    try:
        return _measure_program(settings, parameters, rank, output)
    finally:
        shutil.rmtree(output, ignore_errors=True)


def _empty_measurement(parameters: Mapping[str, Scalar], rank: Rank) -> Measurement:
    """Return the measurement of a rank whose gang is measured by another rank."""
    return Measurement(executed=dict(parameters), step_times_s=(), of_gang=True, machine_info=_machine_info(rank))


def _measure_program(
    settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, output: Path
) -> Measurement:
    values = {**parameters, **_placeholder_values(rank, output)}
    for name, template in settings.files.items():
        (output / Path(name).name).write_text(render(name, template, values))
    log = ProgramLog(RegexLogReader(settings.log) if settings.log else LogReader())
    work = StepWork.from_settings(settings, values)
    program = _start(settings, values, rank, output, _stop_on_line(settings, rank, work, log))
    started = time.monotonic()
    program.run()
    elapsed_s = time.monotonic() - started
    log.text = bytes(program.log)
    if len(log.steps) <= settings.warmup and rank.reporter and rank.reporter.is_finished():
        return _empty_measurement(parameters, rank)
    if not log.steps and _must_print_steps(settings, rank):
        raise RuntimeError(
            f"the program ended after {elapsed_s:.0f} s, and no line of its {len(log.text)} bytes of log has the time "
            f"of a step{_describe_unmatched(settings, log.text)}"
        )
    return _build_measurement(settings, parameters, rank, work, log)


def _stop_on_line(settings: CommandSettings, rank: Rank, work: StepWork, log: ProgramLog) -> Callable[[str], bool]:
    """Return a function that reads a line of the log and returns whether enough steps were measured."""
    reporter = rank.reporter

    def stop_on_line(line: str) -> bool:
        if step := log.reader.feed(line):
            log.steps.append(step)
            if reporter and reporter.report(len(log.steps), work.with_rate(step, log.reader.reported_config)):
                raise Pruned
        if len(log.steps) < settings.warmup + settings.steps:
            return False
        if reporter:
            reporter.finish()  # before the program is terminated, which other ranks may take for a failure
        return True

    return stop_on_line


def _start(
    settings: CommandSettings,
    values: Mapping[str, Scalar],
    rank: Rank,
    output: Path,
    stop_on_line: Callable[[str], bool],
) -> Program:
    environment = {name: fill(str(text), values) for name, text in settings.environment.items()}
    reporter = rank.reporter
    try:
        return Program(
            ProgramSpec(
                _command_line(settings, values),
                {**_distributed_environment(settings, rank, values), **environment},
                Path(settings.directory),
                output,
                silence_s=settings.silence_s,
                timeout_s=rank.timeout_s,
            ),
            stop_on_line=stop_on_line,
            should_stop=lambda: bool(reporter and reporter.is_finished()),
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise RuntimeError(f"{error.filename}: {error.strerror}") from error


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


def _must_print_steps(settings: CommandSettings, rank: Rank) -> bool:
    """Return whether this rank runs the only program. Of several programs, some may print no steps."""
    return rank.world_size == 1 or (settings.start == "node" and rank.nodes == 1)


def _describe_unmatched(settings: CommandSettings, log: bytes) -> str:
    text = log.decode(errors="replace")
    unmatched = [name for name, expression in settings.log.items() if not re.search(expression, text)]
    return f"; nothing in it matches log.{unmatched[0]}" if unmatched else ""


@dataclass(frozen=True)
class StepWork:
    """The work of a step that the settings give. 0 and empty mean not given."""

    global_batch: int
    sequence_length: int
    model: str
    dtype: str

    @staticmethod
    def from_settings(settings: CommandSettings, values: Mapping[str, Scalar]) -> StepWork:
        """Fill the settings' templates.

        Raises:
            Infeasible: a size is not a whole number, or the model is unknown.
        """
        sizes = dict[str, int]()
        for name in ("global_batch", "sequence_length"):
            text = fill(getattr(settings, name), values)
            if text and not text.isdigit():
                raise Infeasible(f"command.{name}={text}: it has to be a whole number")
            sizes[name] = int(text or 0)
        model = fill(settings.model, values)
        if model and model not in MODELS:
            raise Infeasible(f"command.model={model}: it has to be one of {', '.join(MODELS)}")
        return StepWork(**sizes, model=model, dtype=fill(settings.dtype, values))

    def tokens(self, metrics: Mapping[str, float], reported_config: Mapping[str, Scalar]) -> tuple[int, int]:
        """Return the tokens of a step and of a sequence; 0 where they are unknown.

        What the settings do not say is taken from what the program printed.
        """
        global_batch = self.global_batch or _positive_int(reported_config.get("global_batch"))
        global_batch = global_batch or int(metrics.get("global_batch", 0))
        length = self.sequence_length or _positive_int(reported_config.get("sequence_length"))
        return global_batch * length, length

    def with_rate(self, step: Step, reported_config: Mapping[str, Scalar]) -> dict[str, float]:
        """Return a step's metrics with its tokens/s, if its tokens and its time are known."""
        tokens, _ = self.tokens(step.metrics, reported_config)
        time_s = step.metrics.get("step_time_s", 0.0)
        return dict(step.metrics) | ({"tokens_per_s": tokens / time_s} if tokens and time_s > 0 else {})


def _build_measurement(
    settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, work: StepWork, log: ProgramLog
) -> Measurement:
    timed_steps = log.steps[settings.warmup :]
    if log.steps and not timed_steps:
        raise RuntimeError(
            f"the program ended after {len(log.steps)} steps, all of them warm-up (command.warmup={settings.warmup})"
        )
    samples: dict[str, list[float]] = {}
    for step in timed_steps:
        for name, value in step.metrics.items():
            samples.setdefault(name, []).append(value)
    metrics = {
        name: max(values) if name.startswith("peak_") else statistics.median(values) for name, values in samples.items()
    }
    tokens, length = work.tokens(metrics, log.reader.reported_config)
    step_times_s = [time_s for time_s in samples.get("step_time_s", []) if time_s > 0]
    if not step_times_s and tokens:
        step_times_s = [tokens / rate for rate in samples.get("tokens_per_s", []) if rate > 0]
    metrics = {f"claimed_{name}" if find_source(name) else name: value for name, value in metrics.items()}
    metrics = {name: value for name, value in metrics.items() if name not in ("step_time_s", "global_batch")}
    if "loss" in samples:
        metrics["loss"] = samples["loss"][-1]
    return Measurement(
        executed={name: log.reader.reported_config.get(name, value) for name, value in parameters.items()},
        step_times_s=tuple(step_times_s),
        of_gang=True,
        flops_per_step=model_flops_per_token(MODELS[work.model], length) * tokens if work.model else 0.0,
        tokens_per_step=tokens,
        matrix_dtype=work.dtype,
        metrics=metrics,
        machine_info=_machine_info(rank) | {"program": log.reader.kind, "device": log.reader.device},
        files={"log.txt": log.text} if log.text else {},
    )


def _positive_int(value: Scalar) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _placeholder_values(rank: Rank, output: Path) -> dict[str, Scalar]:
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
        "output": str(output),
        "python": sys.executable,
    }


def _distributed_environment(settings: CommandSettings, rank: Rank, values: Mapping[str, Scalar]) -> dict[str, str]:
    """Return the variables of torch.distributed for a program per GPU; of one per node, the gang's visible devices."""
    variables = {
        "MASTER_ADDR": format_value(values["master_address"]),
        "MASTER_PORT": format_value(values["master_port"]),
        "PYTHONUNBUFFERED": "1",
    }
    if settings.start == "gpu":
        return variables | {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "LOCAL_RANK": "0"}
    return variables | {
        name: rank.node_devices for name in VISIBLE_DEVICES if os.environ.get(name) and rank.node_devices
    }


def _machine_info(rank: Rank) -> dict[str, Scalar]:
    return {"rank": rank.rank, "world_size": rank.world_size, "host_cpu": cpu_name()}
