"""Every derived figure, once: from raw step times and counts to rates, their spread and utilisations.

Rates count what the model or product needs, on all ranks together; `…_per_gpu` divides by the ranks. A step
of a gang takes as long as its slowest rank. MFU is model FLOP/s over the dense peak of the data type that the
matrix units ran in (Chowdhery et al. 2022, appendix B), a fraction; there is none where no peak is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from workloads.contract import Measurement

# How a metric reads in a table: its name there, its unit, and the factor from the stored value to the shown one.
SHOWN = {
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
    for suffix, value in _spread(times_s * 1e3).items():
        metrics[f"step_time_ms{suffix}"] = value
    if flops := sum(m.flops_per_step for m in measurements):
        metrics |= _figure("tflops", flops / times_s / 1e12)
        if sustained := [m.sustained_step_times_s for m in measurements if m.sustained_step_times_s]:
            # The slowest rank's windows: those of different ranks need not match in number.
            metrics |= _figure("tflops_sustained", flops / np.array(max(sustained, key=np.median)) / 1e12)
        if peak := dense_peak_tflops.get(measurements[0].matrix_dtype):
            for rate, utilisation in (("tflops", "mfu"), ("tflops_sustained", "mfu_sustained")):
                if rate in metrics:
                    metrics[utilisation] = metrics[rate] / (peak * world_size)
    if tokens := sum(m.tokens_per_step for m in measurements):
        metrics |= _figure("tokens_per_s", tokens / times_s)
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


def _figure(name: str, values: np.ndarray) -> dict[str, float]:
    """A rate under its name, with its spread and its interval beside it."""
    return {f"{name}{suffix}": value for suffix, value in {**_spread(values), **_interval(values)}.items()}


def _spread(values: np.ndarray) -> dict[str, float]:
    """The median, under the bare name, and the 10th and 90th percentile where there is more than one value."""
    if len(values) == 1:
        return {"": float(values[0])}
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {"": float(median), "_p10": float(p10), "_p90": float(p90)}


def _interval(values: np.ndarray) -> dict[str, float]:
    """The 95% bootstrap interval of the median (Efron's percentile method, 1000 resamples, always the same ones)."""
    if len(values) < 3:
        return {}
    drawn = np.random.default_rng(0).choice(values, size=(1000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return {"_ci_low": float(low), "_ci_high": float(high)}
