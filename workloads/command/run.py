"""A trial of a command: start it where it is to start, read what it prints, and make figures of its steps."""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workloads.api.contract import Infeasible, Measurement, Pruned, Rank, Scalar
from workloads.api.host import cpu_name
from workloads.api.logs import LogReader, Step
from workloads.command import TIMES, CommandSettings
from workloads.command.process import Program
from workloads.command.template import filled, rendered, said
from workloads.llama.flops import model_flops_per_token
from workloads.llama.shapes import MODELS

CLAIMED = ("tflops_per_gpu", "tokens_per_s_per_gpu", "mfu")  # computed again where there is what it takes
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass
class OwnLog:
    """Reads lines by a user's regular expressions: a step is there when all of them have been seen."""

    expressions: Mapping[str, str]
    told: dict[str, Scalar] = field(default_factory=dict)
    kind: str = "own"
    device: str = ""
    _seen: dict[str, float] = field(default_factory=dict)
    _count: int = 0

    def feed(self, line: str) -> Step | None:
        for name, expression in self.expressions.items():
            if (found := re.search(expression, line)) and (value := _number(found[1])) is not None:
                self._seen["step_time_s" if name in TIMES else name] = value * TIMES.get(name, 1.0)
        if len(self._seen) < len(self.expressions):
            return None
        metrics, self._seen, self._count = self._seen, {}, self._count + 1
        return Step(self._count, metrics)


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def measure(settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank) -> Measurement:
    """Run it on this rank, or nothing where another rank of this node does. Raises ProgramFailed, Infeasible."""
    if settings.start == "node" and rank.ranks_per_node * rank.nodes != rank.world_size:
        raise Infeasible(f"{rank.world_size} ranks are not evenly on {rank.nodes} nodes, as one launcher on each needs")
    if settings.start == "node" and rank.local_rank:
        return _silent(parameters, rank)
    output = Path(tempfile.mkdtemp(prefix="sweeper-command-"))
    try:
        return _measured(settings, parameters, rank, output)
    finally:
        shutil.rmtree(output, ignore_errors=True)


def _silent(parameters: Mapping[str, Scalar], rank: Rank) -> Measurement:
    """Of a rank that has nothing to say beside another one of its gang."""
    return Measurement(executed=dict(parameters), step_times_s=(), of_gang=True, machine_info=_facts(rank))


def _measured(settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, output: Path) -> Measurement:
    values, reporter = {**parameters, **_places(rank, output)}, rank.reporter
    for name, template in settings.files.items():
        (output / Path(name).name).write_text(rendered(name, template, values))
    reader = OwnLog(settings.log) if settings.log else LogReader()
    work, steps = Work.of(settings, values), list[Step]()

    def enough(line: str) -> bool:
        if step := reader.feed(line):
            steps.append(step)
            if reporter and reporter.report(len(steps), work.with_rate(step, reader.told)):
                raise Pruned
        if len(steps) < settings.warmup + settings.steps:
            return False
        if reporter:
            reporter.finish()  # before it ends, which others may take for a failure
        return True

    environment = {name: filled(str(text), values) for name, text in settings.environment.items()}
    try:
        program = Program(
            _words(settings, values),
            {**_variables(settings, rank, values), **environment},
            Path(settings.directory),
            output,
            silence_s=settings.silence_s,
            timeout_s=rank.timeout_s,
            enough=enough,
            over=lambda: bool(reporter and reporter.is_finished()),
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise RuntimeError(f"{error.filename}: {error.strerror}") from error
    started = time.monotonic()
    program.run()
    if len(steps) <= settings.warmup and reporter and reporter.is_finished():
        return _silent(parameters, rank)
    if not steps and _speaks(settings, rank):
        raise RuntimeError(
            f"the program ended after {time.monotonic() - started:.0f} s, and no line of its {len(program.log)} bytes "
            f"of log said what a step took{_unmatched(settings, program.log)}"
        )
    return _figures(settings, parameters, rank, work, reader, steps, bytes(program.log))


def _words(settings: CommandSettings, values: Mapping[str, Scalar]) -> list[str] | str:
    """The command line, with the words that its options have for these values; a text for a shell."""
    if isinstance(settings.run, str):
        return filled(settings.run, values, shell=True)
    words = list(settings.run)
    for name, options in settings.options.items():
        if (value := said(values[name])) not in options:
            raise Infeasible(f"{name}={value}: command.options has words for {', '.join(options)}")
        words += map(str, options[value])
    return [filled(word, values) for word in words]


def _speaks(settings: CommandSettings, rank: Rank) -> bool:
    """Whether this rank has to have printed steps: of several some may stay silent, but not the only one."""
    return rank.world_size == 1 or (settings.start == "node" and rank.nodes == 1)


def _unmatched(settings: CommandSettings, log: bytearray) -> str:
    text = log.decode(errors="replace")
    silent = [name for name, expression in settings.log.items() if not re.search(expression, text)]
    return f"; nothing in it matches log.{silent[0]}" if silent else ""


@dataclass(frozen=True)
class Work:
    """What a step computes, as far as the settings say: sequences, tokens of each, of which model, in which type."""

    batch: int
    length: int
    model: str
    dtype: str

    @staticmethod
    def of(settings: CommandSettings, values: Mapping[str, Scalar]) -> Work:
        """Raises Infeasible for what is no number, and for a model that is none of ours."""
        numbers = dict[str, int]()
        for name in ("global_batch", "sequence_length"):
            text = filled(getattr(settings, name), values)
            if text and not text.isdigit():
                raise Infeasible(f"command.{name}={text}: it has to be a whole number")
            numbers[name] = int(text or 0)
        model = filled(settings.model, values)
        if model and model not in MODELS:
            raise Infeasible(f"command.model={model}: it may be {', '.join(MODELS)}")
        return Work(numbers["global_batch"], numbers["sequence_length"], model, filled(settings.dtype, values))

    def tokens(self, metrics: Mapping[str, float], told: Mapping[str, Scalar]) -> tuple[int, int]:
        """Of a step and of a sequence, the rest by what was printed; 0 where nobody says."""
        batch = self.batch or _whole(told.get("global_batch")) or int(metrics.get("global_batch", 0))
        length = self.length or _whole(told.get("sequence_length"))
        return batch * length, length

    def with_rate(self, step: Step, told: Mapping[str, Scalar]) -> dict[str, float]:
        """A step's figures with its rate."""
        tokens, _ = self.tokens(step.metrics, told)
        time_s = step.metrics.get("step_time_s", 0.0)
        return dict(step.metrics) | ({"tokens_per_s": tokens / time_s} if tokens and time_s > 0 else {})


def _figures(
    settings: CommandSettings,
    parameters: Mapping[str, Scalar],
    rank: Rank,
    work: Work,
    reader: LogReader | OwnLog,
    steps: list[Step],
    log: bytes,
) -> Measurement:
    steady = steps[settings.warmup :]
    if steps and not steady:
        raise RuntimeError(f"it ended after {len(steps)} steps, all of them warm-up (command.warmup={settings.warmup})")
    seen: dict[str, list[float]] = {}
    for step in steady:
        for name, value in step.metrics.items():
            seen.setdefault(name, []).append(value)
    metrics = {name: max(v) if name.startswith("peak_") else statistics.median(v) for name, v in seen.items()}
    tokens, length = work.tokens(metrics, reader.told)
    times = [time_s for time_s in seen.get("step_time_s", []) if time_s > 0]
    if not times and tokens:
        times = [tokens / rate for rate in seen.get("tokens_per_s", []) if rate > 0]
    metrics = {f"claimed_{name}" if name in CLAIMED else name: value for name, value in metrics.items()}
    metrics = {name: value for name, value in metrics.items() if name not in ("step_time_s", "global_batch")}
    if "loss" in seen:
        metrics["loss"] = seen["loss"][-1]
    return Measurement(
        executed={name: reader.told.get(name, value) for name, value in parameters.items()},
        step_times_s=tuple(times),
        of_gang=True,
        flops_per_step=model_flops_per_token(MODELS[work.model], length) * tokens if work.model else 0.0,
        tokens_per_step=tokens,
        matrix_dtype=work.dtype,
        metrics=metrics,
        machine_info=_facts(rank) | {"program": reader.kind, "device": reader.device},
        files={"log.txt": log} if log else {},
    )


def _whole(told: Scalar) -> int:
    return told if isinstance(told, int) and told > 0 else 0


def _places(rank: Rank, output: Path) -> dict[str, Scalar]:
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


def _variables(settings: CommandSettings, rank: Rank, values: Mapping[str, Scalar]) -> dict[str, str]:
    """Those of torch.distributed for a process of its own, and for a node's which devices are this gang's."""
    found = {"MASTER_ADDR": said(values["master_address"]), "MASTER_PORT": said(values["master_port"])}
    found["PYTHONUNBUFFERED"] = "1"
    if settings.start == "gpu":
        return found | {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "LOCAL_RANK": "0"}
    return found | {name: rank.node_devices for name in VISIBLE if os.environ.get(name) and rank.node_devices}


def _facts(rank: Rank) -> dict[str, Scalar]:
    return {"rank": rank.rank, "world_size": rank.world_size, "host_cpu": cpu_name()}
