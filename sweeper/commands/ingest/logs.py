"""Read a trainer's log into one result per start, batch size and sequence length, and find contradictions."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeper.commands.ingest import imported
from sweeper.commands.ingest.imported import Claims, ImportedResult
from sweeper.common.format import count, format_number
from sweeper.metrics.derivation import MEMORY_METRICS
from workloads.api.errors import UserInputError
from workloads.formats.logs import LONGEST_LINE, STEP_SIZES, LogReader, Step
from workloads.formats.printed import read_model, read_printed_layout

DETECTION_BYTES = 64 * 2**20  # a log must contain a step within this many bytes
CONFIGURATION_BYTES = 2**20  # number of bytes read at the start of a log, where programs print their configuration
MAX_STEPS = 1_000_000
CLAIMS = ("tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu")
MEMORY = (*MEMORY_METRICS, "device_memory_share")
DEGREES = ("tp", "pp", "cp", "dp", "dp_replicate", "dp_shard")
MIN_AGREEING_STEPS = 3  # with at least this many equal steps, longer steps count as pauses
LENGTH_STEP = 128  # in tokens; a sequence length derived from printed rates is rounded to a multiple of this length
MIN_PRECISE_CLAIM = 10.0  # smaller claims have one or two decimals, which is too coarse to compare steps


@dataclass
class Run:
    """The steps from one start of a program at one batch size and sequence length, and the program's other reports."""

    start: int
    log: LogReader  # the reader's state at the first of these steps
    steps: list[Step] = field(default_factory=list)

    @property
    def timed_steps(self) -> list[Step]:
        """The steps with a valid time."""
        return [step for step in self.steps if 0 < step.metrics.get("step_time_s", 0) < math.inf]

    @property
    def times_s(self) -> tuple[float, ...]:
        return tuple(step.metrics["step_time_s"] for step in self.timed_steps)

    @property
    def steady_steps(self) -> list[Step]:
        """The timed steps after the warm-up."""
        return self.timed_steps[-len(imported.drop_warmup(self.times_s)) :]

    def get_size(self, name: str) -> int | None:
        """Return the batch size or sequence length printed with the steps, else the configured one; None if unknown."""
        printed = self.steps[0].metrics.get(name)
        return imported.as_positive_int(self.log.reported_config.get(name) if printed is None else int(printed))

    def count_devices(self) -> int | None:
        """Return the number of devices: as reported, or from Megatron's parallel degrees, or from the printed rates."""
        sizes = {name: imported.as_positive_int(value) for name, value in self.log.reported_config.items()}
        product = math.prod(sizes.get(name) or 0 for name in ("dp", "tp", "pp")) * (sizes.get("cp") or 1)
        known = imported.as_device_count(sizes.get("gpus")) or imported.as_device_count(product)
        if known or self.log.format is None or self.log.format.counts_model_replicas:
            return known
        total, of_one = (self.get_median(name) for name in ("tokens_per_s", "tokens_per_s_per_gpu"))
        ratio = total / of_one if total and of_one else 0.0
        return imported.as_device_count(round(ratio)) if abs(ratio - round(ratio)) < 0.02 * ratio else None

    def get_median(self, name: str) -> float:
        """Return a metric's median over the steady steps. A step that does not print the metric counts as 0."""
        return statistics.median([step.metrics.get(name, 0.0) for step in self.steady_steps])

    def count_tokens(self) -> tuple[int, str]:
        """Return the number of tokens per step (0 if unknown), and a note if it is derived from other values."""
        batch, length = self.get_size("global_batch"), self.get_size("sequence_length")
        if batch and length:
            return batch * length, ""
        if tokens := self.get_size("batch_tokens"):
            return tokens, ""
        tokens = round(self.get_median("tokens_per_s") * self.get_median("step_time_s"))
        if tokens and batch and round(tokens / batch / LENGTH_STEP):
            tokens = batch * LENGTH_STEP * round(tokens / batch / LENGTH_STEP)
        origin = "the tokens of a step are not printed: they are the printed tokens/s x its time"
        return tokens, origin if tokens else ""


def is_log(path: Path) -> bool:
    """Return whether the file is a log of a supported trainer. The log need not contain a usable step."""
    reader = LogReader()
    bytes_read = 0
    with path.open("rb") as file:
        while bytes_read < DETECTION_BYTES and (line := file.readline(LONGEST_LINE)):
            bytes_read += len(line)
            if reader.feed(line.decode(errors="replace")) or reader.has_progress_bar or reader.unnumbered_steps:
                return True
    return reader.feed("") is not None  # the metrics of the last step may be on separate lines


def read_log(path: Path) -> Iterator[ImportedResult]:
    """Yield a log's results: several if the program restarted or its batch size or sequence length changed, else one.

    A truncated last line and steps without a time are ignored.

    Raises UserInputError if the log has more than `MAX_STEPS` steps or no step with a usable time.
    """
    reader = LogReader()
    runs = [run for run in _read_runs(path, reader) if run.timed_steps]
    # A program's first step includes compilation and allocation, so a run with only this step is not usable.
    usable = [run for run in runs if len(run.timed_steps) > 1 or run.timed_steps[0].number > 1]
    times = count(reader.unnumbered_steps, "step time")
    if not usable:
        reason = f"is a log of {reader.kind}, but no line has the time of a step"
        if runs:
            reason = f"is a log of {reader.kind} with the time of one step, the first of the run: it is warm-up"
        elif reader.unnumbered_steps:
            where = "The log of the rank that prints iterations has them"
            reason = f"has {times} without the numbers of the steps: which are warm-up is not known. {where}"
        elif reader.has_progress_bar:
            reason = "has a progress bar, whose time of a step is an average, and no line for each step"
        raise UserInputError(f"{path}: {reason}")
    notes = [f"left out: {times} without a step's number"] if reader.unnumbered_steps else []
    several_starts = len({run.start for run in usable}) > 1
    differing = [name for name in STEP_SIZES if len({run.get_size(name) for run in usable}) > 1]
    model = None
    with path.open("rb") as file:
        text = file.read(CONFIGURATION_BYTES).decode(errors="replace")
    if reader.format and reader.format.log_family == "Megatron":
        try:
            model = read_model(text)
        except UserInputError as error:
            notes.append(f"without TFLOP/s of the model: {error}")
    for run in usable:
        parts = [path.stem, *([f"start {run.start + 1}"] if several_starts else [])]
        parts += [f"{name}={run.get_size(name)}" for name in differing]
        result = replace(_build_result(", ".join(parts), run, reader.kind, notes), model=model)
        if run.start == 0:  # the configuration at the start of the log may contain more layout fields
            try:
                result = replace(result, params=result.params | read_printed_layout(text, result.devices))
            except UserInputError as error:
                result = replace(result, notes=(*result.notes, f"the layout is not read whole: {error}"))
        yield result


def _read_runs(path: Path, reader: LogReader) -> list[Run]:
    runs: dict[tuple[Any, ...], Run] = {}
    steps = 0
    with path.open("rb") as file:
        is_last = False
        while not is_last:
            line = file.readline(LONGEST_LINE)
            is_last = not line
            before, step = reader.format, reader.feed(line.decode(errors="replace"))
            if before and reader.format and before.log_family != reader.format.log_family:
                runs.clear()  # discard steps printed by the library on which the trainer is built
            if step is None or not (is_last or line.endswith(b"\n")):
                continue
            steps += 1
            if steps > MAX_STEPS:
                raise UserInputError(f"{path}: has more than {MAX_STEPS:,} steps")
            key = (step.start, *(step.metrics.get(name) for name in STEP_SIZES))
            if key not in runs:
                runs[key] = Run(step.start, copy(reader))
            runs[key].steps.append(step)
    return list(runs.values())


def _build_result(name: str, run: Run, program: str, notes: Sequence[str]) -> ImportedResult:
    batch, length = run.get_size("global_batch"), run.get_size("sequence_length")
    log, steps, steady_steps, (tokens, origin) = run.log, run.timed_steps, run.steady_steps, run.count_tokens()
    notes = [*notes, origin] if origin else list(notes)
    length = length or (tokens // batch if origin and batch else None)
    printed = {**log.reported_config, **log.mesh}
    params = {name: value for name, value in printed.items() if name not in ("gpus", "batch_tokens")}
    params |= {"sequence_length": length, "global_batch": batch}
    params |= {"model": log.model, "dtype": log.dtype or (log.format.dtype if log.format else "")}
    rates = {name: [step.metrics[name] for step in steady_steps if name in step.metrics] for name in CLAIMS}
    sizes = {name: [step.metrics[name] for step in run.steps if name in step.metrics] for name in MEMORY}
    claims = {name: statistics.median(values) for name, values in rates.items() if values}
    memory = {name: max(values) for name, values in sizes.items() if values}
    losses = [step.metrics["loss"] for step in run.steps if "loss" in step.metrics]
    if bad := [step for step in run.steps if not math.isfinite(step.metrics.get("loss", 0.0))]:
        value, number = bad[0].metrics["loss"], bad[0].number
        notes.append(f"the loss is {value:g} in {count(len(bad), 'step')}, first in step {number}")
    if len(steps) == 1:
        notes.append(f"one timed step, number {steps[0].number}: whether it is warm-up is unknown")
    if rampup := log.reported_config.get("batch_rampup"):
        notes.append(f"the batch ramps up: {rampup}")
    if skipped := sum(step.metrics.get("skipped_iterations", 0) for step in steps):
        notes.append(f"{skipped:.0f} iterations skipped the optimizer, and are shorter than others")
    return ImportedResult(
        name=name,
        params={name: value for name, value in params.items() if value not in (None, "")},
        step_times_s=run.times_s,
        step_resolution_s=statistics.median([step.resolution_s for step in steady_steps]),
        tokens_per_step=tokens,
        devices=run.count_devices(),
        device=log.device,
        claims=Claims(claims, flops=log.format.flops if log.format else "its own"),
        # the maximum over all steps and ranks
        metrics={name: max(memory.get(name, 0.0), log.memory.get(name, 0.0)) for name in log.memory | memory},
        machine_info={"program": program, "loss": f"{losses[-1]:g}" if losses else ""},
        contradictions=tuple(_find_contradictions(run, claims)),
        notes=tuple(notes),
    )


def _find_contradictions(run: Run, claims: Mapping[str, float]) -> Iterator[str]:
    config, mesh = run.log.reported_config, run.log.mesh
    printed, configured = run.steps[0].metrics.get("global_batch"), imported.as_positive_int(config.get("global_batch"))
    if printed and configured and printed != configured and not config.get("batch_rampup"):
        yield f"the configuration has a global batch size of {configured}, the steps print {printed:g}"
    reported = {name: value for name, value in {**config, **mesh}.items() if name in DEGREES}
    degrees = {name: degree for name, value in reported.items() if (degree := imported.as_positive_int(value))}
    gpus, is_whole = imported.as_device_count(config.get("gpus")), bool(mesh) or {"dp", "tp", "pp"} <= degrees.keys()
    if gpus and is_whole and math.prod(degrees.values()) != gpus:
        layout = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        yield f"the parallel degrees {layout} do not give {gpus} GPUs"
    timed = [(step, step.metrics["step_time_s"]) for step in run.steady_steps]
    timed = [(step, time_s) for step, time_s in timed if step.resolution_s < imported.CLAIM_TOLERANCE * time_s]
    if not timed or (run.log.format and not run.log.format.has_equal_steps):
        return
    for name, unit in (("tokens_per_s_per_gpu", "tokens"), ("tflops_per_gpu", "TFLOP")):
        rates = [(step.metrics.get(name, 0), time_s) for step, time_s in timed]
        work = [rate * time_s for rate, time_s in rates if rate >= MIN_PRECISE_CLAIM]
        # Printed rates exclude pauses: a checkpoint or validation only lengthens the time between two log lines. The
        # shortest steps must agree with each other and be the majority.
        agreeing = [amount for amount in work if amount <= (1 + imported.CLAIM_TOLERANCE) * min(work)]
        if all(step.is_by_clock for step, _ in timed) and len(agreeing) >= max(MIN_AGREEING_STEPS, len(work) / 2):
            work = agreeing
        if work and max(work) > (1 + imported.CLAIM_TOLERANCE) * min(work):  # steps of equal size do equal work
            amounts = f"{format_number(min(work))} to {format_number(max(work))} {unit} a step and GPU"
            yield f"the claimed {name} times the step time is {amounts}, though all steps are of the same size"
