"""A trainer's log as one result: its steps, what it says it was told, and what of that does not fit together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from sweeper.common.errors import UserInputError
from sweeper.config.hardware import find_hardware
from sweeper.ingest.imported import NOT_THE_SAME, Imported, whole
from workloads.api.logs import LONGEST_LINE, LogReader, Step

LOOKED_AT = 64 * 2**20  # bytes in which a log has to show a step
MOST_STEPS = 1_000_000
CLAIMS = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
STEADY_FROM = 0.5  # claims are medians of the second half: the first has the warm-up


def is_log(path: Path) -> bool:
    """Whether it shows a step of a trainer that is known."""
    reader, read = LogReader(), 0
    with path.open("rb") as file:
        while read < LOOKED_AT and (line := file.readline(LONGEST_LINE)):
            read += len(line)
            if reader.feed(line.decode(errors="replace")):
                return True
    return False


def read_log(path: Path) -> Iterator[Imported]:
    """One result. A last line that is cut off, or a step without a time, is left out."""
    reader, steps, batches = LogReader(), list[Step](), set[float]()
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            if (step := reader.feed(line.decode(errors="replace"))) and line.endswith(b"\n"):
                steps.append(step)
                batches |= {step.metrics["global_batch"]} if "global_batch" in step.metrics else set()
            if len(steps) > MOST_STEPS:
                raise UserInputError(f"{path}: has more than {MOST_STEPS:,} steps")
    times = tuple(s.metrics["step_time_s"] for s in steps if s.metrics.get("step_time_s", 0) > 0)
    if not times:
        raise UserInputError(f"{path}: is a log of {reader.kind}, but no line says how long a step took")
    told = dict(reader.reported_config)
    if len(batches) == 1:
        told.setdefault("global_batch", int(next(iter(batches))))
    batch, length, gpus = (whole(told.get(name)) for name in ("global_batch", "sequence_length", "gpus"))
    claims = _claims(steps)
    yield Imported(
        name=path.stem,
        params={name: value for name, value in told.items() if name != "gpus"},
        step_times_s=times,
        tokens_per_step=(batch or 0) * (length or 0),
        devices=gpus,
        device=reader.device,
        claims=claims,
        machine_info={"program": reader.kind, "loss": _last(steps, "loss")},
        contradictions=tuple(_contradictions(reader.device, claims, batches, batch)),
    )


def _claims(steps: list[Step]) -> dict[str, float]:
    later = steps[int(STEADY_FROM * len(steps)) :]
    found = {name: [s.metrics[name] for s in later if name in s.metrics] for name in CLAIMS}
    return {name: statistics.median(values) for name, values in found.items() if values}


def _contradictions(
    device: str,
    claims: dict[str, float],
    batches: set[float],
    batch: int | None,
) -> Iterator[str]:
    if len(batches) > 1:
        yield f"the global batch changes, from {min(batches):g} to {max(batches):g}"
    if batch and batches and batch not in batches:
        yield f"a global batch of {batch} was told, {next(iter(batches)):g} is printed"
    hardware = find_hardware(device) if device else None
    peak = hardware.dense_peak_tflops.get("bf16") if hardware else None
    if peak and (mfu := claims.get("mfu")) and (tflops := claims.get("tflops_per_gpu")):
        own = tflops / peak
        if abs(mfu / own - 1) > NOT_THE_SAME:
            yield f"an MFU of {mfu:.1%} is stated; of the dense bf16 peak its {tflops:,.4g} TFLOP/s are {own:.1%}"


def _last(steps: list[Step], name: str) -> str:
    return next((f"{step.metrics[name]:g}" for step in reversed(steps) if name in step.metrics), "")
