"""Run one trial of a command: start the program on its ranks, read its log, and measure its steps."""

from __future__ import annotations

import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
)
from workloads.api.host import cpu_name
from workloads.api.trial import describe_mismatches
from workloads.command import CommandSettings
from workloads.command.claims import find_contradictions
from workloads.command.energy import EnergyMeter
from workloads.command.invocation import Invocation, build_invocation, placeholder_values
from workloads.command.log import ProgramLog, RegexLogReader
from workloads.command.process import Program, ProgramSpec
from workloads.command.work import SIZES, DeclaredWork, mark_claims, read_declared_work
from workloads.formats.logs import STEP_SIZES, LogReader, Step
from workloads.models.flops import model_flops_per_token
from workloads.models.model import MODELS


def measure(settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank) -> Measurement:
    """Run the program on this rank, or nothing where another rank of this node runs it.

    Raises:
        Infeasible: the ranks are not spread evenly over the nodes, or a value of the settings is not allowed.
        OutOfMemory, ProgramFailed, TrialTimeout: see `Program.run`; ProgramFailed also if the program could not be
            started, or printed no step after warm-up. All have the program's output (`ProgramOutput`).
        Pruned: other trials were better at the same step.
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
    invocation = build_invocation(settings, parameters, rank, str(output))
    for name, text in invocation.files.items():
        (output / name).write_text(text)
    work = read_declared_work(settings, parameters, placeholder_values(settings, parameters, rank, str(output)))
    log = ProgramLog(RegexLogReader(settings.log) if settings.log else LogReader(), settings.warmup)
    meter = EnergyMeter(rank)
    program = _start(settings, invocation, rank, output, _stop_on_line(settings, rank, work, log, meter))
    try:
        with meter:
            program.run()
        _check_work(work, log, rank)
        if len(log.steps) <= settings.warmup and rank.reporter and rank.reporter.is_finished():
            measurement = _empty_measurement(parameters, rank)
        else:
            _check_steps(settings, rank, log, program)
            measurement = _build_measurement(settings, parameters, rank, work, log)
            energy = meter.energy(statistics.mean(measurement.step_times_s or [0.0]))
            measurement = replace(measurement, energy=energy)
        if mismatches := describe_mismatches(measurement, parameters):
            raise ParameterMismatch(f"rank {rank.rank} executed {mismatches}")
    except Exception as error:
        error.args = tuple(invocation.mask(arg) if isinstance(arg, str) else arg for arg in error.args)
        last_lines = invocation.mask("\n".join(program.last_lines))
        attach_output(error, ProgramOutput(last_lines, _kept_files(invocation, program)))
        raise
    return replace(measurement, files=_kept_files(invocation, program))


def _kept_files(invocation: Invocation, program: Program) -> dict[str, bytes]:
    """Return the files of the trial: the command, its rendered files and its output, secrets masked."""
    last_lines, log = "\n".join(program.last_lines), program.log.decode(errors="replace")
    texts = {"last_lines.txt": last_lines, "log.txt": log}
    return invocation.kept_files() | {name: invocation.mask(text).encode() for name, text in texts.items() if text}


def _stop_on_line(
    settings: CommandSettings, rank: Rank, work: DeclaredWork, log: ProgramLog, meter: EnergyMeter
) -> Callable[[str], bool]:
    """Return a function that reads a line of the log and returns whether enough steps were measured."""
    reporter = rank.reporter

    def stop_on_line(line: str) -> bool:
        step = log.feed(line)
        if step:
            meter.mark_step(len(log.steps) - settings.warmup)
            _check_work(work, log, rank)
        rates = work.with_rate(step, log.reported_config) if step else {}
        if step and reporter and reporter.report(len(log.steps), rates):
            raise Pruned
        if len(log.steps) < settings.warmup + settings.steps:
            return False
        if reporter:
            reporter.finish()  # before the program is terminated, which other ranks may take for a failure
        return True

    return stop_on_line


def _start(
    settings: CommandSettings, invocation: Invocation, rank: Rank, output: Path, stop_on_line: Callable[[str], bool]
) -> Program:
    reporter = rank.reporter
    spec = ProgramSpec(
        invocation.arguments,
        invocation.environment,
        invocation.directory,
        output,
        silence_s=settings.silence_s,
        timeout_s=rank.timeout_s,
    )
    try:
        return Program(spec, stop_on_line=stop_on_line, should_stop=lambda: bool(reporter and reporter.is_finished()))
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        failure = ProgramFailed(f"{error.filename}: {error.strerror}")
        attach_output(failure, ProgramOutput(files=invocation.kept_files()))
        raise failure from error


def _check_work(work: DeclaredWork, log: ProgramLog, rank: Rank) -> None:
    """Raise ParameterMismatch if the program prints another batch, model, layout or data type than is declared."""
    if differences := work.find_differences(log.config.values, log.config_of_steps.values):
        raise ParameterMismatch(f"rank {rank.rank} executed {'; '.join(differences)}, as its program prints")
    batches = log.config_of_steps.values.get("global_batch", ())
    if len(batches) > 1:
        raise ParameterMismatch(
            f"rank {rank.rank} executed measured steps with batches of {' and '.join(map(str, batches))}: raise "
            "command.warmup above the ramp of the batch"
        )


def _check_steps(settings: CommandSettings, rank: Rank, log: ProgramLog, program: Program) -> None:
    """Raise ProgramFailed if the program printed no step after warm-up, unless another one may have printed them."""
    if log.steps and len(log.steps) <= settings.warmup:
        raise ProgramFailed(
            f"the program ended after {len(log.steps)} steps, all of them warm-up (command.warmup={settings.warmup})"
        )
    if not log.steps and _must_print_steps(settings, rank):
        raise ProgramFailed(
            f"the program ended after {program.elapsed_s:.0f} s, and no line of its {len(program.log)} bytes of log "
            f"has the time of a step{_describe_unmatched(settings, bytes(program.log))}"
        )


def _must_print_steps(settings: CommandSettings, rank: Rank) -> bool:
    """Return whether this rank runs the only program. Of several programs, some may print no steps."""
    return rank.world_size == 1 or (settings.start == "node" and rank.nodes == 1)


def _describe_unmatched(settings: CommandSettings, log: bytes) -> str:
    text = log.decode(errors="replace")
    unmatched = [name for name, expression in settings.log.items() if not re.search(expression, text)]
    return f"; nothing in it matches log.{unmatched[0]}" if unmatched else ""


def _build_measurement(
    settings: CommandSettings, parameters: Mapping[str, Scalar], rank: Rank, work: DeclaredWork, log: ProgramLog
) -> Measurement:
    timed_steps = log.steps[settings.warmup :]
    metrics = _summarize(timed_steps)
    tokens, length = work.tokens(metrics, log.reported_config)
    contradictions = find_contradictions(timed_steps, work, tokens, length, rank.world_size, log.reader.kind)
    if contradictions and settings.claims == "fail":
        raise ProgramFailed("; ".join(contradictions))
    raw = {name: value for name, value in metrics.items() if name not in ("step_time_s", *STEP_SIZES)}
    reported = log.reader.reported_config
    return Measurement(
        executed={name: value if name in SIZES else reported.get(name, value) for name, value in parameters.items()},
        step_times_s=_step_times_s(timed_steps, tokens),
        of_gang=True,
        unranked="; ".join(contradictions),
        flops_per_step=model_flops_per_token(MODELS[work.model], length) * tokens if work.model else 0.0,
        tokens_per_step=tokens,
        matrix_dtype=work.dtype,
        metrics=mark_claims(raw),
        machine_info=_machine_info(rank) | {"program": log.reader.kind, "device": log.reader.device},
    )


def _summarize(steps: Sequence[Step]) -> dict[str, float]:
    """Return the metrics of measured steps: the last loss, the highest peak, and the median of any other."""
    samples: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.metrics.items():
            samples.setdefault(name, []).append(value)
    metrics = {
        name: max(values) if name.startswith("peak_") else statistics.median(values) for name, values in samples.items()
    }
    return metrics | {name: values[-1] for name, values in samples.items() if name == "loss"}


def _step_times_s(steps: Sequence[Step], tokens: int) -> tuple[float, ...]:
    """Return the printed times of the steps, or those that follow from their tokens/s.

    Raises:
        ProgramFailed: tokens/s are printed and no times, and the tokens of a step are unknown.
    """
    times_s = [time_s for step in steps if (time_s := step.metrics.get("step_time_s", 0.0)) > 0]
    rates = [rate for step in steps if (rate := step.metrics.get("tokens_per_s", 0.0)) > 0]
    if rates and not times_s and not tokens:
        raise ProgramFailed(
            "the log has tokens_per_s and no time of a step, and the tokens of a step are unknown: set "
            "command.global_batch and command.sequence_length"
        )
    return tuple(times_s or [tokens / rate for rate in rates])


def _machine_info(rank: Rank) -> dict[str, Scalar]:
    return {"rank": rank.rank, "world_size": rank.world_size, "host_cpu": cpu_name()}
