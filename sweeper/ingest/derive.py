"""Derive the metrics of imported results by this project's definitions, and compare them with the tool's claims."""

from __future__ import annotations

import math
import statistics

from sweeper.common import metrics
from sweeper.config.hardware import find_hardware
from sweeper.ingest.imported import CLAIM_TOLERANCE, ImportedResult
from sweeper.ui.format import format_number
from workloads.api.contract import Measurement

POWER_OF_TWO_TOLERANCE = 0.1  # a claimed rate may include the warm-up
MAX_LENGTH_FACTOR = 1024  # between the stated sequence length and one that explains a claim
WARMUP_RULE = "leading steps of more than 1.2 times the median of the second half are warm-up"


def drop_warmup(times_s: tuple[float, ...]) -> tuple[float, ...]:
    """Return the step times after the warm-up, by `WARMUP_RULE`; all of them if there are fewer than four."""
    if len(times_s) < 4:
        return times_s
    limit_s = 1.2 * statistics.median(times_s[len(times_s) // 2 :])
    first = next(step for step, time_s in enumerate(times_s) if time_s <= limit_s)
    return times_s[first:]


def derive_metrics(result: ImportedResult) -> dict[str, float]:
    """Return what `sweeper.common.metrics` derives from the tokens and step times; empty for an infeasible result."""
    if not result.step_times_s or not all(0 < time_s < math.inf for time_s in result.step_times_s):
        return {}
    times_s = drop_warmup(result.step_times_s)
    hardware = find_hardware(result.device) if result.device else None
    measurement = Measurement(executed={}, step_times_s=times_s, tokens_per_step=result.tokens_per_step)
    derived = metrics.derive([measurement], hardware.dense_peak_tflops if hardware else {})
    derived["warmup_steps"] = float(len(result.step_times_s) - len(times_s))
    if result.devices and "tokens_per_s" in derived:
        derived["tokens_per_s_per_gpu"] = derived["tokens_per_s"] / result.devices
    return derived


def find_disagreements(result: ImportedResult, derived: dict[str, float]) -> list[str]:
    """Return a message for each claim that differs by more than 2% from the derived metric.

    A rate and its value per GPU that differ by the same ratio give one message.
    """
    ratios = {name: claim / derived[name] for name, claim in result.claims.items() if derived.get(name)}
    contradicted = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > CLAIM_TOLERANCE}
    total = contradicted.get("tokens_per_s")
    per_gpu = contradicted.get("tokens_per_s_per_gpu")
    if total is not None and per_gpu is not None and abs(per_gpu - total) <= CLAIM_TOLERANCE * total:
        del contradicted["tokens_per_s_per_gpu"]
    return [
        f"claimed {name} {format_number(result.claims[name])}, but the steps after warm-up give "
        f"{format_number(derived[name])}"
        + (_suggest_sequence_length(result, ratio) if name.startswith("tokens_per_s") else "")
        for name, ratio in contradicted.items()
    ]


def _suggest_sequence_length(result: ImportedResult, ratio: float) -> str:
    """Return the sequence length that would explain a claim which is off by about a power of two."""
    length = result.params.get("sequence_length")
    if not isinstance(length, (int, float)) or not 1 / MAX_LENGTH_FACTOR < ratio < MAX_LENGTH_FACTOR:
        return ""
    power = 2.0 ** round(math.log2(ratio))
    if power == 1 or abs(ratio / power - 1) > POWER_OF_TWO_TOLERANCE:
        return ""
    return f" (a sequence length of {length * power:,.0f} tokens would explain it)"
