"""Every derived figure, once: from raw step times and counts to rates, their spread and utilisations.

Rates count what the model or product needs, on all ranks together; `…_per_gpu` divides by the ranks. A step
of a gang takes as long as its slowest rank. MFU is model FLOP/s over the dense peak of the data type that the
matrix units ran in (Chowdhery et al. 2022, appendix B), a fraction; there is none where no peak is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from workloads.contract import Measurement

# How a metric reads in a table: its name there, its unit, and the factor from the stored value to the shown one.
SHOWN = {
    "m": ("m", "", 1.0),
    "n": ("n", "", 1.0),
    "k": ("k", "", 1.0),
    "tflops": ("rate", "TFLOP/s", 1.0),
    "tflops_ci_low": ("95% from", "", 1.0),
    "tflops_ci_high": ("to", "", 1.0),
    "tflops_sustained": ("sustained", "TFLOP/s", 1.0),
    "sustained_sm_clock_mhz": ("at", "MHz", 1.0),
    "tokens_per_s": ("tokens", "1/s", 1.0),
    "mfu": ("MFU", "%", 100.0),
    "step_time_ms": ("step", "ms", 1.0),
    "sm_clock_mhz": ("clock", "MHz", 1.0),
    "power_w": ("power", "W", 1.0),
    "score": ("score", "", 1.0),
}


def derive(measurements: Sequence[Measurement], dense_peak_tflops: Mapping[str, float]) -> dict[str, float]:
    """The metrics of one complete trial.

    `measurements` has one entry a rank; `dense_peak_tflops` gives TFLOP/s of one device by data type.
    Step times of ranks are matched step by step where their counts agree, else each rank's median is taken.
    """
    world_size = len(measurements)
    times_s = step_times_s(measurements)
    metrics = {name: float(value) for m in measurements[:1] for name, value in m.figures.items()}
    metrics["steps"] = float(len(times_s))
    statistic = measurements[0].statistic
    for suffix, value in _spread(times_s * 1e3, statistic).items():
        metrics[f"step_time_ms{suffix}"] = value
    if flops := sum(m.flops_per_step for m in measurements):
        metrics |= _rate("tflops", flops / 1e12, times_s, statistic)
        if sustained := [m.sustained_step_times_s for m in measurements if m.sustained_step_times_s]:
            # The slowest rank's windows: those of different ranks need not match in number.
            metrics |= _rate("tflops_sustained", flops / 1e12, np.array(max(sustained, key=np.median)), "median")
        if peak := dense_peak_tflops.get(measurements[0].matrix_dtype):
            for rate, utilisation in (("tflops", "mfu"), ("tflops_sustained", "mfu_sustained")):
                if rate in metrics:
                    metrics[utilisation] = metrics[rate] / (peak * world_size)
    if tokens := sum(m.tokens_per_step for m in measurements):
        metrics |= _rate("tokens_per_s", tokens, times_s, statistic)
    if world_size > 1:
        for name in ("tflops", "tokens_per_s"):
            if name in metrics:
                metrics[f"{name}_per_gpu"] = metrics[name] / world_size
    return metrics


def unit_of(metric: str) -> str:
    """The unit that a metric is shown in, empty where it has none."""
    return SHOWN.get(metric, (metric, "", 1.0))[1]


def step_times_s(measurements: Sequence[Measurement]) -> np.ndarray:
    """Seconds of each step of the gang: the slowest rank's."""
    counts = {len(m.step_times_s) for m in measurements}
    if len(counts) == 1:
        return np.max([m.step_times_s for m in measurements], axis=0)
    return np.array([max(float(np.median(m.step_times_s)) for m in measurements)])


def _rate(name: str, work: float, times_s: np.ndarray, statistic: str) -> dict[str, float]:
    """Work over time under its name, with its spread and its interval beside it."""
    values = _spread(times_s, statistic) | _interval(times_s, statistic)
    # A longer time is a lower rate: what bounds one from below bounds the other from above.
    mirrored = {"_p10": "_p90", "_p90": "_p10", "_ci_low": "_ci_high", "_ci_high": "_ci_low"}
    return {f"{name}{mirrored.get(suffix, suffix)}": work / value for suffix, value in values.items()}


STATISTICS: Mapping[str, Callable[..., Any]] = {"median": np.median, "mean": np.mean, "fastest": np.min}


def _spread(times: np.ndarray, statistic: str) -> dict[str, float]:
    """The statistic, under the bare name, and the 10th and 90th percentile where there is more than one value."""
    if len(times) == 1:
        return {"": float(times[0])}
    p10, p90 = np.percentile(times, [10, 90])
    return {"": float(STATISTICS[statistic](times)), "_p10": float(p10), "_p90": float(p90)}


def _interval(times: np.ndarray, statistic: str) -> dict[str, float]:
    """The 95% bootstrap interval of the statistic (Efron's percentile method, 1000 resamples, always the same ones).

    There is none of the fastest: a resample never holds anything faster.
    """
    if len(times) < 3 or statistic == "fastest":
        return {}
    drawn = np.random.default_rng(0).choice(times, size=(1000, len(times)))
    low, high = np.percentile(STATISTICS[statistic](drawn, axis=1), [2.5, 97.5])
    return {"_ci_low": float(low), "_ci_high": float(high)}
