"""A trial of a command: start it where it is to start, read what it prints, and make figures of its steps."""

from __future__ import annotations

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
from typing import Any

from workloads.command import TIMES, CommandSettings
from workloads.command.process import Program
from workloads.command.template import filled, rendered, said
from workloads.contract import Hopeless, Infeasible, Measurement, Rank, Scalar
from workloads.host import cpu_name
from workloads.llama.flops import per_token
from workloads.llama.shapes import MODELS
from workloads.logs import LogReader, Step

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
            if found := re.search(expression, line):
                value = float(found[1].replace(",", ""))
                self._seen["step_time_s" if name in TIMES else name] = value * TIMES.get(name, 1.0)
        if len(self._seen) < len(self.expressions):
            return None
        figures, self._seen, self._count = self._seen, {}, self._count + 1
        return Step(self._count, figures)


def measure(settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank) -> Measurement:
    """Run it on this rank, or nothing where another rank of this node does. Raises ProgramFailed, Infeasible."""
    if settings.start == "node" and rank.local_rank:
        return Measurement(executed=dict(parameters), step_times_s=(), of_gang=True, facts=_facts(rank))
    output = Path(tempfile.mkdtemp(prefix="sweeper-command-"))
    try:
        return _measured(settings, parameters, rank, output)
    finally:
        shutil.rmtree(output, ignore_errors=True)


def _measured(settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, output: Path) -> Measurement:
    values = {**parameters, **_places(rank, output)}
    for name, template in settings.files.items():
        (output / Path(name).name).write_text(rendered(name, template, values))
    words = _words(settings, values)
    reader = OwnLog(settings.log) if settings.log else LogReader()
    steps: list[Step] = []

    def enough(line: str) -> bool:
        if step := reader.feed(line):
            steps.append(step)
            if rank.tell and rank.tell(len(steps), _with_rate(settings, parameters, reader, step)):
                raise Hopeless
        return len(steps) >= settings.warmup + settings.steps

    environment = {name: filled(str(text), values) for name, text in settings.environment.items()}
    try:
        program = Program(
            words,
            {**_variables(settings, rank), **environment},
            Path(settings.directory),
            silence_s=settings.silence_s,
            enough=enough,
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise RuntimeError(f"{error.filename}: {error.strerror}") from error
    started = time.monotonic()
    program.run()
    if not steps and _speaks(settings, rank):
        raise RuntimeError(
            f"the program ended after {time.monotonic() - started:.0f} s, and no line of its {len(program.log)} bytes "
            f"of log said what a step took{_unmatched(settings, program.log)}"
        )
    return _figures(settings, parameters, rank, reader, steps, bytes(program.log))


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


def _figures(
    settings: CommandSettings,
    parameters: Mapping[str, Scalar],
    rank: Rank,
    reader: LogReader | OwnLog,
    steps: list[Step],
    log: bytes,
) -> Measurement:
    steady = steps[settings.warmup :]
    if steps and not steady:
        raise RuntimeError(f"it ended after {len(steps)} steps, all of them warm-up (command.warmup={settings.warmup})")
    named = {name for step in steady for name in step.figures}
    medians = {n: statistics.median(s.figures[n] for s in steady if n in s.figures) for n in named}
    told, (tokens, length) = reader.told, _tokens(settings, parameters, reader, medians)
    times = tuple(step.figures["step_time_s"] for step in steady if "step_time_s" in step.figures)
    if not times and "tokens_per_s" in medians and tokens:
        times = tuple(tokens / step.figures["tokens_per_s"] for step in steady)
    model, dtype = filled(settings.model, parameters), filled(settings.dtype, parameters)
    flops = per_token(MODELS[model], length) * tokens if model in MODELS else 0.0
    figures = {f"claimed_{name}" if name in CLAIMED else name: value for name, value in medians.items()}
    figures = {name: value for name, value in figures.items() if name not in ("step_time_s", "global_batch")}
    if steady and "loss" in steady[-1].figures:
        figures["loss"] = steady[-1].figures["loss"]
    return Measurement(
        executed={name: told.get(name, value) for name, value in parameters.items()},
        step_times_s=times,
        of_gang=True,
        flops_per_step=flops,
        tokens_per_step=tokens,
        matrix_dtype=dtype,
        figures=figures,
        facts=_facts(rank) | {"program": reader.kind, "device": reader.device},
        files={"log.txt": log} if log else {},
    )


def _tokens(
    settings: CommandSettings,
    parameters: Mapping[str, Scalar],
    reader: LogReader | OwnLog,
    figures: Mapping[str, float],
) -> tuple[int, int]:
    """Of a step and of a sequence; 0 where neither the settings nor the log say."""
    told = reader.told
    batch = _whole(filled(settings.global_batch, parameters), told.get("global_batch"), figures.get("global_batch"))
    length = _whole(filled(settings.sequence_length, parameters), told.get("sequence_length"))
    return batch * length, length


def _with_rate(
    settings: CommandSettings, parameters: Mapping[str, Scalar], reader: LogReader | OwnLog, step: Step
) -> dict[str, float]:
    tokens, _ = _tokens(settings, parameters, reader, step.figures)
    time_s = step.figures.get("step_time_s", 0.0)
    return dict(step.figures) | ({"tokens_per_s": tokens / time_s} if tokens and time_s else {})


def _whole(*said: Any) -> int:
    """The first that says something; 0 where none does."""
    return next((int(float(each)) for each in said if each not in ("", None)), 0)


def _places(rank: Rank, output: Path) -> dict[str, Scalar]:
    host, _, port = rank.meeting.rpartition(":")
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


def _variables(settings: CommandSettings, rank: Rank) -> dict[str, str]:
    """Those of torch.distributed for a process of its own, and for a node's which devices are this gang's."""
    host, _, port = rank.meeting.rpartition(":")
    found = {"MASTER_ADDR": host or "127.0.0.1", "MASTER_PORT": port or "29500", "PYTHONUNBUFFERED": "1"}
    if settings.start == "gpu":
        return found | {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "LOCAL_RANK": "0"}
    return found | {name: rank.node_devices for name in VISIBLE if os.environ.get(name) and rank.node_devices}


def _facts(rank: Rank) -> dict[str, Scalar]:
    return {"rank": rank.rank, "world_size": rank.world_size, "host_cpu": cpu_name()}
