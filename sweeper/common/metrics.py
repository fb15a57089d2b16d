"""Every derived figure, once: from raw step times and counts to rates, their spread and utilisations.

Rates count what the model or product needs, on all ranks together; `…_per_gpu` divides by the ranks. A step
of a gang takes as long as its slowest rank. MFU is model FLOP/s over the dense peak of the data type that the
matrix units ran in (Chowdhery et al. 2022, appendix B), a fraction; there is none where no peak is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from workloads.api.contract import Measurement

LINEAR_BANDS = (0.85, 0.95)  # what clusters are often assumed to reach of linear scaling
# How a metric reads in a table: its name there, its unit, and the factor from the stored value to the shown one.
SHOWN = {
    "m": ("m", "", 1.0),
    "n": ("n", "", 1.0),
    "k": ("k", "", 1.0),
    "tflops": ("rate", "TFLOP/s", 1.0),
    "tflops_slowest_gpu": ("slowest", "TFLOP/s", 1.0),
    "tflops_fastest_gpu": ("fastest", "TFLOP/s", 1.0),
    "gpu_spread": ("apart", "%", 100.0),
    "tflops_ci_low": ("95% from", "", 1.0),
    "tflops_ci_high": ("to", "", 1.0),
    "tflops_sustained": ("sustained", "TFLOP/s", 1.0),
    "sustained_sm_clock_mhz": ("at", "MHz", 1.0),
    "tokens_per_s": ("speed", "tokens/s", 1.0),
    "mfu": ("MFU", "%", 100.0),
    "hfu": ("HFU", "%", 100.0),
    "mamf_utilization": ("of reached", "%", 100.0),
    "speedup": ("over bf16", "x", 1.0),
    "speedup_ci_low": ("95% from", "", 1.0),
    "speedup_ci_high": ("to", "", 1.0),
    "predicted_speedup": ("predicted", "x", 1.0),
    "gb_per_s": ("moves", "GB/s", 1.0),
    "bus_gb_s": ("bus", "GB/s", 1.0),
    "bandwidth_utilization": ("of memory", "%", 100.0),
    "sqnr_db": ("SQNR", "dB", 1.0),
    "sqnr_input_gradient_db": ("of dx", "dB", 1.0),
    "sqnr_weight_gradient_db": ("of dW", "dB", 1.0),
    "predicted_tokens_per_s": ("predicted", "tokens/s", 1.0),
    "peak_device_gib": ("device", "GiB", 1.0),
    "peak_host_gib": ("host", "GiB", 1.0),
    "loss": ("loss", "", 1.0),
    "step_time_ms": ("step", "ms", 1.0),
    "sm_clock_mhz": ("clock", "MHz", 1.0),
    "power_w": ("power", "W", 1.0),
    "score": ("score", "", 1.0),
}


def derive(
    measurements: Sequence[Measurement],
    dense_peak_tflops: Mapping[str, float],
    reached_tflops: Mapping[str, float] | None = None,
    bandwidth_tb_s: float | None = None,
) -> dict[str, float]:
    """The metrics of one complete trial.

    `measurements` has one entry a rank; `dense_peak_tflops` gives TFLOP/s of one device by data type, as the vendor
    has it, and `reached_tflops` as the best matrix product on such a device had it; `bandwidth_tb_s` is its memory's.
    Step times of ranks are matched step by step where their counts agree, else each rank's median is taken.
    """
    world_size = len(measurements)
    if measurements[0].of_gang:
        measurements = [next((m for m in measurements if m.step_times_s), measurements[0])]
    times_s = step_times_s(measurements)
    metrics = {name: float(value) for m in measurements[:1] for name, value in m.metrics.items()}
    if not len(times_s):
        return metrics
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
            if done := sum(m.hardware_flops_per_step for m in measurements):
                metrics["hfu"] = metrics["mfu"] * done / flops
    if baseline := measurements[0].baseline_step_times_s:
        metrics |= _ratio("speedup", np.array(baseline), times_s, statistic)
    if moved := sum(m.bytes_per_step for m in measurements):
        metrics |= _rate("gb_per_s", moved / 1e9, times_s, statistic)
        if bandwidth_tb_s:
            metrics["bandwidth_utilization"] = metrics["gb_per_s"] / (1e3 * bandwidth_tb_s * world_size)
    if tokens := sum(m.tokens_per_step for m in measurements):
        metrics |= _rate("tokens_per_s", tokens, times_s, statistic)
        if (reached := (reached_tflops or {}).get(measurements[0].matrix_dtype)) and "tflops" in metrics:
            metrics["mamf_utilization"] = metrics["tflops"] / (reached * world_size)
    if world_size > 1 and measurements[0].independent:
        metrics |= _over_devices(measurements, statistic)
    if world_size > 1:
        for name in ("tflops", "tokens_per_s"):
            if name in metrics:
                metrics[f"{name}_per_gpu"] = metrics[name] / world_size
    return metrics


def _over_devices(measurements: Sequence[Measurement], statistic: str) -> dict[str, float]:
    """The slowest and the fastest of devices that were measured at once, each by itself."""
    each = [tflops_of(m.flops_per_step, m.step_times_s, statistic) for m in measurements]
    return {
        "tflops_slowest_gpu": min(each),
        "tflops_fastest_gpu": max(each),
        "gpu_spread": max(each) / min(each) - 1,
    }


def tflops_of(flops_per_step: float, times_s: Sequence[float], statistic: str) -> float:
    """The rate of one rank."""
    return flops_per_step / 1e12 / float(STATISTICS[statistic](times_s))


def unit_of(metric: str) -> str:
    """The unit that a metric is shown in, empty where it has none."""
    return SHOWN.get(metric, (metric, "", 1.0))[1]


def step_times_s(measurements: Sequence[Measurement]) -> np.ndarray:
    """Seconds of each step of the gang: the slowest rank's, step by step where they wait for one another."""
    if measurements[0].independent:
        statistic = STATISTICS[measurements[0].statistic]
        return np.array(max((m.step_times_s for m in measurements), key=lambda t: statistic(t) if t else 0.0))
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


def _ratio(name: str, above: np.ndarray, below: np.ndarray, statistic: str) -> dict[str, float]:
    """One statistic over another, with the 95% bootstrap interval of their ratio: both are drawn anew each time."""
    over = STATISTICS[statistic]
    found = {name: float(over(above) / over(below))}
    if min(len(above), len(below)) < 3 or statistic == "fastest":
        return found
    random = np.random.default_rng(0)
    drawn = [over(random.choice(times, size=(1000, len(times))), axis=1) for times in (above, below)]
    low, high = np.percentile(drawn[0] / drawn[1], [2.5, 97.5])
    return found | {f"{name}_ci_low": float(low), f"{name}_ci_high": float(high)}


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
