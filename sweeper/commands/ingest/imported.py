"""One imported result, with the values of its file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

CLAIM_TOLERANCE = 0.05  # relative difference from which a claim contradicts the value that it is compared with
MAX_COUNT = 10**15  # no batch and no sequence has more
MAX_DEVICES = 10**6
WARMUP_RULE = "leading steps of more than 1.2 times the median of the second half are warm-up"
OUR_FLOPS = "causal"  # how this project counts a model's FLOPs: see docs/metrics.md


@dataclass(frozen=True)
class Claims:
    """The metrics that a tool reports itself.

    Attributes:
        values: under this project's names.
        step_times_s: the steps that the values are of; empty for the steps after the warm-up.
        statistic: the statistic over these steps, median or mean.
        flops: how the tool counts the FLOPs of its rates and shares. They compare only with the same count.
    """

    values: dict[str, float] = field(default_factory=dict)
    step_times_s: tuple[float, ...] = ()
    statistic: str = "median"
    flops: str = OUR_FLOPS


@dataclass(frozen=True)
class ImportedResult:
    """One result of another tool.

    Attributes:
        params: the configuration, with `model`, `dtype` and `sequence_length` where the file names them.
        step_times_s, tokens_per_step: what the metrics are derived from.
        devices: number of devices; None means unknown.
        device: name of one device; empty means unknown.
        feasible: the configuration worked.
        metrics: what the tool measured beside its speed, such as memory.
        contradictions: messages about values of the file that contradict each other.
        notes: what a reader of the figures should know and no contradiction is.
    """

    name: str
    params: dict[str, Any]
    step_times_s: tuple[float, ...] = ()
    tokens_per_step: int = 0
    devices: int | None = None
    device: str = ""
    feasible: bool = True
    claims: Claims = field(default_factory=Claims)
    metrics: dict[str, float] = field(default_factory=dict)
    machine_info: dict[str, Any] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def drop_warmup(times_s: tuple[float, ...]) -> tuple[float, ...]:
    """Return the step times after the warm-up, by `WARMUP_RULE`. At least one is left."""
    if len(times_s) < 2:
        return times_s
    limit_s = 1.2 * statistics.median(times_s[len(times_s) // 2 :])
    first = next(step for step, time_s in enumerate(times_s) if time_s <= limit_s)
    return times_s[first:]


def as_positive_int(value: object) -> int | None:
    """Return `value` if it is an integer from 1 to `MAX_COUNT`, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT else None


def as_device_count(value: object) -> int | None:
    """Return `value` if it is an integer from 1 to `MAX_DEVICES`, else None."""
    devices = as_positive_int(value)
    return devices if devices and devices <= MAX_DEVICES else None
