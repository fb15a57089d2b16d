"""An imported result's figures by this project's definitions, and where they disagree with the tool's own."""

from __future__ import annotations

import statistics

from sweeper import metrics
from sweeper.hardware import named
from sweeper.ingest.imported import NOT_THE_SAME, Imported
from workloads.contract import Measurement

WARMUP_RULE = "leading steps of more than 1.2 times the median of the second half are warm-up"


def steady(times_s: tuple[float, ...]) -> tuple[float, ...]:
    """The steps after warm-up, by `WARMUP_RULE`."""
    if len(times_s) < 4:
        return times_s
    limit = 1.2 * statistics.median(times_s[len(times_s) // 2 :])
    first = next(n for n, seconds in enumerate(times_s) if seconds <= limit)
    return times_s[first:]


def figures(result: Imported) -> dict[str, float]:
    """What `sweeper.metrics` makes of its tokens and times; nothing of one that did not work."""
    if not result.step_times_s:
        return {}
    times = steady(result.step_times_s)
    hardware = named(result.device) if result.device else None
    measurement = Measurement(executed={}, step_times_s=times, tokens_per_step=result.tokens_per_step)
    found = metrics.derive([measurement], hardware.dense_peak_tflops if hardware else {})
    found["warmup_steps"] = float(len(result.step_times_s) - len(times))
    if result.devices and "tokens_per_s" in found:
        found["tokens_per_s_per_gpu"] = found["tokens_per_s"] / result.devices
    return found


def disagreements(result: Imported, found: dict[str, float]) -> list[str]:
    """Where a claim is more than 2% from what its own tokens and times give."""
    both = [(name, claim, found[name]) for name, claim in result.claims.items() if name in found]
    return [
        f"{name} {claim:,.4g} is claimed, its steps after warm-up give {value:,.4g}"
        for name, claim, value in both
        if abs(claim / value - 1) > NOT_THE_SAME
    ]
