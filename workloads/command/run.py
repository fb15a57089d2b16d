"""Run one trial of a command: start the program on its ranks, read the log, and measure the steps."""

from __future__ import annotations

import math
import re
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from workloads.api.contract import (
    Infeasible,
    Measurement,
    ParameterMismatch,
    ProgramFailed,
    ProgramOutput,
    Pruned,
    Rank,
    Scalar,
    attach_output,
    output_of,
)
from workloads.api.host import cpu_name
from workloads.api.metrics import choose_summary
from workloads.api.trial import describe_mismatches
from workloads.command import STEP_TIME_UNITS_S, CommandSettings
from workloads.command.energy import EnergyMeter
from workloads.command.invocation import Invocation, build_invocation, placeholder_values
from workloads.command.process import Program
from workloads.command.work import SIZES, DeclaredWork, find_contradictions, mark_claims, read_declared_work
from workloads.formats.logs import STEP_SIZES, LogReader, Step, parse_number
from workloads.formats.printed import NUMBERS, Printed, add_printed, read_printed
from workloads.formats.rate_lines import WHOLE_NUMBER, CommonLogReader
from workloads.models.flops import model_flops_per_token
from workloads.models.model import MODELS

# A non-finite training loss, as trainers print it: `lm loss: NAN |`, `loss:      nan`, `'loss': nan`,
# `train_loss=-inf`. An evaluation loss does not end training.
_BAD_LOSS = re.compile(
    r"(?<![\w-])(?<!eval )(?<!val )(?<!test )(?<!validation )"
    r"(?:reduced_train_|train(?:ing)?[_ ])?loss['\"]?(?:\s*[:=]\s*|\s+)(?:tensor\()?[-+]?(nan|inf(?:inity)?)\b",
    re.IGNORECASE,
)
FIRST_STEPS = 3  # number of steps that a plan shows
RATE_UNIT = 1000  # tokens or samples that represent a step if the log has only their rate
SAMPLES = "samples_per_s"
STEP_NAMES = ("global_step", "step", "iteration", "iter")
SUMMARIES: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[-1],
    "median": statistics.median,
    "highest": max,
}
_EXPONENT = re.compile(r"[eE][-+]?\d+\b")
_STEP_NUMBER = re.compile(
    rf"(?<!/)(?<!per )\b(?:{'|'.join(STEP_NAMES)})['\"]?[\s:=]{{1,12}}{WHOLE_NUMBER}", re.IGNORECASE
)


def measure(settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank) -> Measurement:
    """Run the program on this rank, or do nothing if another rank on this node runs the program.

    Raises:
        Infeasible: the ranks are not spread evenly over the nodes, or a value in the settings is not allowed.
        OutOfMemory, ProgramFailed, TrialTimeout: see `Program.run`; ProgramFailed also if the program could not be
            started, or printed no step after warm-up. All of these carry the program's output (`ProgramOutput`).
        Pruned: other trials were better at the same step.
    """
    if settings.start == "node":
        if rank.ranks_per_node * rank.nodes != rank.world_size:
            raise Infeasible(
                f"{rank.world_size} ranks are not spread evenly over {rank.nodes} nodes, as command.start=node requires"
            )
        if rank.local_rank:
            return _empty_measurement(parameters, rank)
    output = Path(tempfile.mkdtemp(prefix="sweeper-command-"))
    try:
        return _measure_program(settings, parameters, rank, output)
    finally:
        shutil.rmtree(output, ignore_errors=True)


def read_first_steps(settings: CommandSettings, parameters: Mapping[str, Scalar]) -> tuple[str, Measurement]:
    """Run the program on this machine for its first steps. Return a line per step with the values read, and the trial.

    Raises ProgramFailed with these lines, the program's last lines and the reason if the program ends earlier.
    """
    steps = _FirstSteps()
    try:
        measured = measure(replace(settings, warmup=0, steps=FIRST_STEPS), parameters, Rank(reporter=steps))
    except Exception as error:
        last = [line for line in output_of(error).last_lines.splitlines()[-FIRST_STEPS:] if line not in str(error)]
        raise ProgramFailed("\n".join([*steps.lines, *last, str(error)])) from error
    return "\n".join(steps.lines), measured


@dataclass
class _FirstSteps:
    """A `StepReporter` that keeps one line per step."""

    lines: list[str] = field(default_factory=list)

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        values = [f"{name}={value:.6g}" for name, value in metrics.items() if not name.startswith("claimed_")]
        self.lines.append(f"step {step}: {' '.join(values)}")
        return False

    def finish(self) -> None: ...

    def is_finished(self) -> bool:
        return False


def _empty_measurement(parameters: Mapping[str, Scalar], rank: Rank) -> Measurement:
    return Measurement(executed=dict(parameters), step_times_s=(), of_gang=True, machine_info=_machine_info(rank))


def _measure_program(
    settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, output: Path
) -> Measurement:
    invocation = build_invocation(settings, parameters, rank, str(output))
    for name, text in invocation.files.items():
        (output / name).write_text(text)
    work = read_declared_work(settings, parameters, placeholder_values(settings, parameters, rank, str(output)))
    log = ProgramLog(
        RegexLogReader(settings.log) if settings.log else CommonLogReader(), settings.warmup, rank.world_size
    )
    meter, reporter, number = EnergyMeter(rank), rank.reporter, 0

    def stop_on_line(line: str) -> bool:
        nonlocal number
        if step := log.feed(line):
            number = max(step.number, number + 1)  # a restarted program counts from 0
            meter.mark_step(len(log.steps) - settings.warmup)
            _check_work(work, log, rank)
            if reporter and reporter.report(number, work.with_rate(step, log.reported_config)):
                raise Pruned
        if len(log.steps) < settings.warmup + settings.steps:
            return False
        if reporter:
            reporter.finish()  # before terminating the program, which other ranks may see as a failure
        return True

    def should_stop() -> bool:
        return bool(reporter and reporter.is_finished())

    try:
        program = Program(
            invocation, output, settings.silence_s, rank.timeout_s, stop_on_line=stop_on_line, should_stop=should_stop
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        failure = ProgramFailed(f"{error.filename}: {error.strerror}")
        attach_output(failure, ProgramOutput(files=invocation.kept_files()))
        raise failure from error
    try:
        with meter:
            program.run()
        _check_work(work, log, rank)
        if len(log.steps) <= settings.warmup and should_stop():
            measurement = _empty_measurement(parameters, rank)
        else:
            measurement = _build_measurement(settings, parameters, rank, work, log, program)
            energy = meter.energy(statistics.mean(measurement.step_times_s or [0.0]))
            measurement = replace(measurement, energy=energy)
        if mismatches := describe_mismatches(measurement, parameters):
            raise ParameterMismatch(f"rank {rank.rank} executed {mismatches}")
    except Exception as error:
        error.args = tuple(invocation.mask(arg) if isinstance(arg, str) else arg for arg in error.args)
        attach_output(error, _read_output(invocation, program))
        raise
    return replace(measurement, files=_read_output(invocation, program).files)


def _read_output(invocation: Invocation, program: Program) -> ProgramOutput:
    last_lines = invocation.mask("\n".join(program.last_lines))
    texts = {"last_lines.txt": last_lines, "log.txt": invocation.mask(program.log.decode(errors="replace"))}
    files = invocation.kept_files() | {name: text.encode() for name, text in texts.items() if text}
    return ProgramOutput(last_lines, files)


def _check_work(work: DeclaredWork, log: ProgramLog, rank: Rank) -> None:
    if differences := work.find_differences(log.config, log.config_of_steps):
        raise ParameterMismatch(f"rank {rank.rank} executed {'; '.join(differences)}, as its program prints")
    if len(batches := log.config_of_steps.get("global_batch", ())) > 1:
        raise ParameterMismatch(
            f"rank {rank.rank} executed measured steps with batches of {' and '.join(map(str, batches))}: raise "
            "command.warmup above the ramp of the batch"
        )


def _build_measurement(
    settings: CommandSettings,
    parameters: Mapping[str, Scalar],
    rank: Rank,
    work: DeclaredWork,
    log: ProgramLog,
    program: Program,
) -> Measurement:
    if log.steps and len(log.steps) <= settings.warmup:
        raise ProgramFailed(
            f"the program ended after {len(log.steps)} steps, all of them warm-up (command.warmup={settings.warmup})"
        )
    is_only_program = rank.world_size == 1 or (settings.start == "node" and rank.nodes == 1)
    if not log.steps and is_only_program:
        text = program.log.decode(errors="replace")
        unmatched = [name for name, expression in settings.log.items() if not re.search(expression, text)]
        hint = f"; nothing in it matches log.{unmatched[0]}" if unmatched else ""
        raise ProgramFailed(
            f"the program ended after {program.elapsed_s:.0f} s, and no line of its {len(program.log)} bytes of log "
            f"has the time of a step or a rate, such as 1234 tok/s (no spaces), 2 it/s, 5 samples/s, 80 ms/step. "
            f"command.log reads other formats{hint}"
        )
    timed_steps = log.steps[settings.warmup :]
    samples: dict[str, list[float]] = defaultdict(list)
    for step in timed_steps:
        for name, value in step.metrics.items():
            samples[name].append(value)
    metrics = {name: SUMMARIES[choose_summary(name)](values) for name, values in samples.items()}
    tokens, length = work.tokens(metrics, log.reported_config)
    contradictions = find_contradictions(timed_steps, work, tokens, length, rank.world_size, log.reader.kind)
    if contradictions and settings.claims == "fail":
        raise ProgramFailed("; ".join(contradictions))
    times_s, tokens, is_rate = _time_steps(samples, tokens, work.global_batch)
    reported = log.reader.reported_config
    return Measurement(
        executed={name: value if name in SIZES else reported.get(name, value) for name, value in parameters.items()},
        step_times_s=tuple(times_s),
        is_rate=is_rate,
        step_resolution_s=statistics.median([step.resolution_s for step in timed_steps]) if times_s else 0.0,
        of_gang=True,
        unranked="; ".join(contradictions),
        flops_per_step=model_flops_per_token(MODELS[work.model], length) * tokens if work.model and length else 0.0,
        tokens_per_step=tokens,
        matrix_dtype=work.dtype,
        metrics=mark_claims({name: metrics[name] for name in metrics if name not in ("step_time_s", *STEP_SIZES)}),
        machine_info=_machine_info(rank) | {"program": log.reader.kind, "device": log.reader.device},
    )


def _time_steps(samples: Mapping[str, list[float]], tokens: int, batch: int) -> tuple[list[float], int, bool]:
    """Return the step times, the tokens per step, and whether only a rate is known, but not a step's size. `tokens` and
    `batch` are per step, or 0 if unknown; a printed rate then replaces them."""
    times_s, rates, samples_per_s = (
        [value for value in samples.get(name, ()) if value > 0] for name in ("step_time_s", "tokens_per_s", SAMPLES)
    )
    if times_s:
        return times_s, tokens or round(statistics.median(rates or [0.0]) * statistics.median(times_s)), False
    if rates:
        return [(tokens or RATE_UNIT) / rate for rate in rates], tokens or RATE_UNIT, not tokens
    return [(batch or RATE_UNIT) / rate for rate in samples_per_s], tokens, not batch and bool(samples_per_s)


def _machine_info(rank: Rank) -> dict[str, Scalar]:
    return {"rank": rank.rank, "world_size": rank.world_size, "host_cpu": cpu_name()}


@dataclass
class RegexLogReader:
    """Reads a log using the expressions in `command.log`. A step is complete when all expressions have matched."""

    expressions: Mapping[str, str]
    reported_config: dict[str, Scalar] = field(default_factory=dict)
    kind: str = "command.log"
    device: str = ""
    _pending: dict[str, float] = field(default_factory=dict)
    _count: int = 0
    _resolution_s: float = 0.0  # resolution of the last step's time

    def feed(self, line: str) -> Step | None:
        read = set[int]()  # positions of metrics, which are not the step number
        for name, expression in self.expressions.items():
            try:
                match = re.search(expression, line)
                # An expression such as `loss=([\d.]+)` stops before the exponent of 3.6e-02.
                rest = _EXPONENT.match(line, match.end(1)) if match and "e" not in (match[1] or "e").lower() else None
                text = (match[1] or "") + (rest[0] if rest else "") if match else ""
                value, resolution = parse_number(text) if match else (math.nan, 0.0)
            except ValueError:
                continue
            if match and (math.isfinite(value) or name == "loss"):
                metric = "step_time_s" if name in STEP_TIME_UNITS_S else name
                self._pending[metric] = value * STEP_TIME_UNITS_S.get(name, 1.0)
                if name not in STEP_NAMES:
                    read.add(match.start(1))
                if metric == "step_time_s":
                    self._resolution_s = resolution * STEP_TIME_UNITS_S[name]
        if len(self._pending) < len(self.expressions):
            return None
        printed = (
            int(match[1].replace(",", "")) for match in _STEP_NUMBER.finditer(line) if match.start(1) not in read
        )
        metrics, self._pending, self._count = self._pending, {}, next(printed, self._count + 1)
        return Step(self._count, metrics, resolution_s=self._resolution_s)


@dataclass
class ProgramLog:
    """The steps and the configuration read from a program's log."""

    reader: LogReader | RegexLogReader
    warmup: int  # number of unmeasured steps at the start
    gpus: int = 1
    steps: list[Step] = field(default_factory=list)
    # All printed values by name: those of any line except warm-up steps', and those of measured step lines.
    config: dict[str, list[Printed]] = field(default_factory=dict)
    config_of_steps: dict[str, list[Printed]] = field(default_factory=dict)

    @property
    def reported_config(self) -> dict[str, Scalar]:
        """The printed configuration. If a name has several values, the last value is used."""
        return {name: values[-1] for name, values in self.config.items()} | self.reader.reported_config

    def feed(self, line: str) -> Step | None:
        """Return the step that the line completes. Raises ProgramFailed if the training loss is not a number."""
        step = self.reader.feed(line)
        of_one = step.metrics.get("tokens_per_s_per_gpu") if step and not self.reader.kind else None
        if step and of_one and "tokens_per_s" not in step.metrics:
            step = replace(step, metrics={**step.metrics, "tokens_per_s": of_one * self.gpus})
        if step is None:
            add_printed(self.config, read_printed(line))
        else:
            self.steps.append(step)
            if len(self.steps) > self.warmup:  # batches may ramp up during warm-up
                sizes = {name: int(step.metrics[name]) for name in NUMBERS if name in step.metrics}
                add_printed(self.config, printed := read_printed(line))
                add_printed(self.config_of_steps, {**printed, **sizes})
        match = _BAD_LOSS.search(line)
        loss = float(match[1]) if match else step.metrics.get("loss", 0.0) if step else 0.0
        if not math.isfinite(loss):
            # The step number of a known format, else a printed number, else the number of steps so far.
            number = step.number if step else len(self.steps) + 1
            counted = _STEP_NUMBER.search(line)
            if counted and not (step and isinstance(self.reader, LogReader)):
                number = int(counted[1].replace(",", ""))
            raise ProgramFailed(f"loss is {'nan' if math.isnan(loss) else 'infinite'} at step {number}")
        return step
