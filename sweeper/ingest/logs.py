"""Read a trainer's log as one result: its steps, its configuration, and contradictions between them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from sweeper.common.errors import UserInputError
from sweeper.config.hardware import find_hardware
from sweeper.ingest.imported import CLAIM_TOLERANCE, ImportedResult, as_positive_int
from sweeper.ui.format import format_number
from workloads.api.logs import LONGEST_LINE, LogReader, Step

DETECTION_BYTES = 64 * 2**20  # a log has to show a step within them
MAX_STEPS = 1_000_000
CLAIMS = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
STEADY_FROM = 0.5  # claims are medians of the second half: the first contains the warm-up


def is_log(path: Path) -> bool:
    """Return whether the file has a step of a supported trainer."""
    reader = LogReader()
    bytes_read = 0
    with path.open("rb") as file:
        while bytes_read < DETECTION_BYTES and (line := file.readline(LONGEST_LINE)):
            bytes_read += len(line)
            if reader.feed(line.decode(errors="replace")):
                return True
    return False


def read_log(path: Path) -> Iterator[ImportedResult]:
    """Yield the one result of a log. A last line that is cut off and a step without a time are left out.

    Raises:
        UserInputError: the log has more than `MAX_STEPS` steps, or none with a step time.
    """
    reader = LogReader()
    steps: list[Step] = []
    printed_batches: set[float] = set()
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            if (step := reader.feed(line.decode(errors="replace"))) and line.endswith(b"\n"):
                steps.append(step)
                printed_batches |= {step.metrics["global_batch"]} if "global_batch" in step.metrics else set()
            if len(steps) > MAX_STEPS:
                raise UserInputError(f"{path}: has more than {MAX_STEPS:,} steps")
    times_s = tuple(step.metrics["step_time_s"] for step in steps if step.metrics.get("step_time_s", 0) > 0)
    if not times_s:
        raise UserInputError(f"{path}: is a log of {reader.kind}, but no line has the time of a step")
    config = dict(reader.reported_config)
    if len(printed_batches) == 1:
        config.setdefault("global_batch", int(next(iter(printed_batches))))
    batch = as_positive_int(config.get("global_batch"))
    length = as_positive_int(config.get("sequence_length"))
    claims = _median_claims(steps)
    yield ImportedResult(
        name=path.stem,
        params={name: value for name, value in config.items() if name != "gpus"},
        step_times_s=times_s,
        tokens_per_step=(batch or 0) * (length or 0),
        devices=as_positive_int(config.get("gpus")),
        device=reader.device,
        claims=claims,
        machine_info={"program": reader.kind, "loss": _last_value(steps, "loss")},
        contradictions=tuple(_find_contradictions(reader.device, claims, printed_batches, batch)),
    )


def _median_claims(steps: list[Step]) -> dict[str, float]:
    later_steps = steps[int(STEADY_FROM * len(steps)) :]
    values = {name: [step.metrics[name] for step in later_steps if name in step.metrics] for name in CLAIMS}
    return {name: statistics.median(claimed) for name, claimed in values.items() if claimed}


def _find_contradictions(
    device: str, claims: dict[str, float], printed_batches: set[float], configured_batch: int | None
) -> Iterator[str]:
    if len(printed_batches) > 1:
        yield f"the global batch size changes from {min(printed_batches):g} to {max(printed_batches):g}"
    if configured_batch and printed_batches and configured_batch not in printed_batches:
        printed = next(iter(printed_batches))
        yield f"the configuration has a global batch size of {configured_batch}, the steps print {printed:g}"
    hardware = find_hardware(device) if device else None
    peak_tflops = hardware.dense_peak_tflops.get("bf16") if hardware else None
    if peak_tflops and (mfu := claims.get("mfu")) and (tflops := claims.get("tflops_per_gpu")):
        derived_mfu = tflops / peak_tflops
        if abs(mfu / derived_mfu - 1) > CLAIM_TOLERANCE:
            yield (
                f"the stated MFU is {mfu:.1%}, but {format_number(tflops)} TFLOP/s are {derived_mfu:.1%} of the dense "
                "bf16 peak"
            )


def _last_value(steps: list[Step], name: str) -> str:
    return next((f"{step.metrics[name]:g}" for step in reversed(steps) if name in step.metrics), "")
