"""An imported result's figures by this project's definitions, and where they disagree with the tool's own."""

from __future__ import annotations

import math
import statistics

from sweeper.common import metrics
from sweeper.config.hardware import find_hardware
from sweeper.ingest.imported import NOT_THE_SAME, Imported
from workloads.api.contract import Measurement

ABOUT = 0.1  # warm-up may be in a claim
MOST_TIMES = 1024  # that a stated length may be off
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
    if not result.step_times_s or not all(0 < time_s < math.inf for time_s in result.step_times_s):
        return {}
    times = steady(result.step_times_s)
    hardware = find_hardware(result.device) if result.device else None
    measurement = Measurement(executed={}, step_times_s=times, tokens_per_step=result.tokens_per_step)
    found = metrics.derive([measurement], hardware.dense_peak_tflops if hardware else {})
    found["warmup_steps"] = float(len(result.step_times_s) - len(times))
    if result.devices and "tokens_per_s" in found:
        found["tokens_per_s_per_gpu"] = found["tokens_per_s"] / result.devices
    return found


def disagreements(result: Imported, found: dict[str, float]) -> list[str]:
    """Where a claim is more than 2% from what its own tokens and times give; a rate and its share of each GPU once."""
    times = {name: claim / found[name] for name, claim in result.claims.items() if found.get(name)}
    odd = {name: ratio for name, ratio in times.items() if abs(ratio - 1) > NOT_THE_SAME}
    whole, share = odd.get("tokens_per_s"), odd.get("tokens_per_s_per_gpu")
    if whole is not None and share is not None and abs(share - whole) <= NOT_THE_SAME * whole:
        del odd["tokens_per_s_per_gpu"]
    return [
        f"{name} {_short(result.claims[name])} is claimed, its steps after warm-up give {_short(found[name])}"
        + (_unless(result, ratio) if name.startswith("tokens_per_s") else "")
        for name, ratio in odd.items()
    ]


def _unless(result: Imported, ratio: float) -> str:
    """With which length of a sequence a rate would be right, where it is off by about a power of two."""
    length = result.params.get("sequence_length")
    if not isinstance(length, (int, float)) or not 1 / MOST_TIMES < ratio < MOST_TIMES:
        return ""
    power = 2.0 ** round(math.log2(ratio))
    if power == 1 or abs(ratio / power - 1) > ABOUT:
        return ""
    return f", unless a sequence has {length * power:,.0f} tokens"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
