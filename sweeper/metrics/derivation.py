"""Derive all metrics in one place: turn raw step times and counts into rates, spreads and utilizations.

Rates count the operations that the model or GEMM requires, summed over all ranks. `…_per_gpu` divides by the number of
ranks. A gang's step takes as long as the slowest rank's step. MFU is model FLOP/s divided by the dense peak for the
matrix units' dtype (Chowdhery et al. 2022, appendix B). MFU is derived only if the peak is known.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sweeper.common.clock import SECONDS_PER_HOUR
from sweeper.metrics.criteria import DIRECTIONS, Criteria
from sweeper.metrics.intervals import estimate_correlation, interval_of_steps, ratio_interval
from workloads.api.contract import Measurement
from workloads.api.metrics import COST, METRICS, SUFFIXES, find_source

STATISTICS: Mapping[str, Callable[..., Any]] = {"median": np.median, "mean": np.mean, "fastest": np.min}
MEMORY_METRICS = ("peak_device_gib", "peak_memory_gib")  # per device; tables show the first metric that a trial has
JOULES_PER_KWH = 3.6e6
EFFICIENCY = ("joules_per_token", "tflop_per_joule", "tokens_per_joule")  # equivalent for a single trial
LINEAR_BANDS = (0.85, 0.95)  # shares of linear scaling that clusters are commonly assumed to reach


def derive(
    measurements: Sequence[Measurement],
    dense_peak_tflops: Mapping[str, float],
    achieved_tflops: Mapping[str, float] | None = None,
    bandwidth_tb_s: float | None = None,
) -> dict[str, float]:
    """Derive a complete trial's metrics from its measurements, one for each rank.

    If all ranks report the same number of steps, their times are matched step by step. Otherwise rank medians are used.

    Args:
        dense_peak_tflops: the vendor's peak TFLOP/s per device, by dtype.
        achieved_tflops: TFLOP/s of the best GEMM on this device, by dtype.
        bandwidth_tb_s: the memory bandwidth of one device.
    """
    world_size = len(measurements)
    if measurements[0].of_gang:
        measurements = [next((m for m in measurements if m.step_times_s), measurements[0])]
    first, times_s = measurements[0], step_times_s(measurements)
    metrics = {name: float(value) for name, value in first.metrics.items()}
    if not len(times_s):
        return metrics
    step_time = _summarize(times_s, first.statistic, first.step_resolution_s)
    metrics["steps"] = float(len(times_s))
    if first.step_resolution_s:
        metrics["step_resolution_ms"] = 1e3 * first.step_resolution_s
    if first.statistic != "fastest":  # the fastest step has no interval
        metrics["effective_steps"] = len(times_s) / estimate_correlation(times_s, first.statistic).time_steps
    if not first.is_rate:
        metrics |= {f"step_time_ms{suffix}": 1e3 * value for suffix, value in step_time.items() if "_ci" not in suffix}
    metrics |= _flops_metrics(measurements, step_time, dense_peak_tflops.get(first.matrix_dtype), world_size)
    if first.baseline_step_times_s:
        baseline_s, reduce = np.array(first.baseline_step_times_s), STATISTICS[first.statistic]
        metrics["speedup"] = float(reduce(baseline_s) / reduce(times_s))
        above, below = (interval_of_steps(times, first.statistic) for times in (baseline_s, times_s))
        if above and below:
            bounds = ratio_interval(above, below).bounds
            metrics |= dict(zip(("speedup", "speedup_ci_low", "speedup_ci_high"), bounds, strict=True))
    if moved_bytes := sum(m.bytes_per_step for m in measurements):
        metrics |= _rate("gb_per_s", moved_bytes / 1e9, step_time)
        if bandwidth_tb_s:
            metrics["bandwidth_utilization"] = metrics["gb_per_s"] / (1e3 * bandwidth_tb_s * world_size)
    if tokens := sum(m.tokens_per_step for m in measurements):
        metrics |= _rate("tokens_per_s", tokens, step_time)
        if (achieved := (achieved_tflops or {}).get(first.matrix_dtype)) and "tflops" in metrics:
            metrics["mamf_utilization"] = metrics["tflops"] / (achieved * world_size)
    metrics |= energy_metrics(measurements, world_size)
    if world_size > 1:
        if first.independent:  # the ranks' devices were measured separately, at the same time
            rates = [tflops_of(m.flops_per_step, m.step_times_s, m.statistic) for m in measurements]
            metrics |= {"tflops_slowest_gpu": min(rates), "tflops_fastest_gpu": max(rates)}
            metrics["gpu_spread"] = max(rates) / min(rates) - 1
        for name in ("tflops", "tokens_per_s"):
            if name in metrics:
                metrics[f"{name}_per_gpu"] = metrics[name] / world_size
    return metrics


def describe_impossible(metrics: Mapping[str, float], clock_headroom: float = 1.0) -> str:
    """Return why no device can have reached the metrics from `derive`, or an empty string if they are possible.
    `clock_headroom` is the factor by which the device's clock may exceed the clock of the vendor's peak."""
    for name in ("mfu", "mfu_sustained", "hfu"):
        if metrics.get(name, 0.0) > clock_headroom:
            reason = "The operations, the step times or hardware= are wrong"
            return f"impossible: {name} is {metrics[name]:.0%} of the vendor's dense peak. {reason}"
    return ""


def _flops_metrics(
    measurements: Sequence[Measurement], step_time: Mapping[str, float], peak_tflops: float | None, world_size: int
) -> dict[str, float]:
    flops = sum(m.flops_per_step for m in measurements)
    if not flops:
        return {}
    metrics = _rate("tflops", flops / 1e12, step_time)
    if sustained := [m.sustained_step_times_s for m in measurements if m.sustained_step_times_s]:
        # Use the slowest rank's windows because ranks may differ in their number of windows.
        windows = np.array(max(sustained, key=np.median))
        metrics |= _rate("tflops_sustained", flops / 1e12, _summarize(windows, "median"))
    metrics = with_utilization(metrics, peak_tflops, world_size)
    if peak_tflops and (hardware_flops := sum(m.hardware_flops_per_step for m in measurements)):
        metrics["hfu"] = metrics["mfu"] * hardware_flops / flops
    return metrics


def with_utilization(metrics: Mapping[str, float], peak_tflops: float | None, world_size: int) -> dict[str, float]:
    """Return the metrics and, if the peak is known, each rate as a share of all devices' peak."""
    shares = {"mfu": "tflops", "mfu_sustained": "tflops_sustained"}
    known = {name: metrics[rate] for name, rate in shares.items() if peak_tflops and rate in metrics}
    return {**metrics, **{name: rate / ((peak_tflops or 1.0) * world_size) for name, rate in known.items()}}


def tflops_of(flops_per_step: float, times_s: Sequence[float], statistic: str) -> float:
    return flops_per_step / 1e12 / float(STATISTICS[statistic](times_s))


def first_known(values: Iterable[float]) -> float:
    """Return the first value that is not NaN, or NaN if there is none."""
    return next((value for value in values if not math.isnan(value)), math.nan)


def step_times_s(measurements: Sequence[Measurement]) -> np.ndarray:
    """Return the gang's step times: the slowest rank's times or, if ranks wait for each other, each step's slowest."""
    if measurements[0].independent:
        statistic = STATISTICS[measurements[0].statistic]
        return np.array(max((m.step_times_s for m in measurements), key=lambda t: statistic(t) if t else 0.0))
    counts = {len(m.step_times_s) for m in measurements}
    if len(counts) == 1:
        return np.max([m.step_times_s for m in measurements], axis=0)
    return np.array([max(float(np.median(m.step_times_s)) for m in measurements)])


def _rate(name: str, work: float, step_time: Mapping[str, float]) -> dict[str, float]:
    # A longer time means a lower rate, so the lower bound of the time gives the upper bound of the rate.
    mirrored = {"_p10": "_p90", "_p90": "_p10", "_ci_low": "_ci_high", "_ci_high": "_ci_low"}
    return {f"{name}{mirrored.get(suffix, suffix)}": work / value for suffix, value in step_time.items()}


def _summarize(times_s: np.ndarray, statistic: str, resolution_s: float = 0.0) -> dict[str, float]:
    """Return, by suffix, the statistic (no suffix) and, for several times, the percentiles and any interval."""
    if len(times_s) == 1:
        return {"": float(times_s[0])}
    p10, p90 = np.percentile(times_s, [10, 90])
    summary = {"": float(STATISTICS[statistic](times_s)), "_p10": float(p10), "_p90": float(p90)}
    if interval := interval_of_steps(times_s, statistic, resolution=resolution_s):
        summary |= {"_ci_low": interval.low, "_ci_high": interval.high}
    return summary


@dataclass(frozen=True)
class Prices:
    """The price of a device per hour and of electricity per kWh, in one currency. A price of None adds no cost."""

    per_hour: float | None = None
    per_kwh: float | None = None


def energy_metrics(measurements: Sequence[Measurement], world_size: int) -> dict[str, float]:
    """Return the gang's energy per step and derived metrics. The result is empty unless all ranks' energy is known.
    `measurements` has one entry for each rank, or a single entry for the whole gang."""
    if missing_energy(measurements):
        return {}
    energies = [m.energy for m in measurements if m.energy]
    joules = sum(energy.joules / energy.steps for energy in energies)
    power_w = sum(energy.joules / energy.seconds for energy in energies)
    metrics = {"average_power_w": power_w} | ({} if measurements[0].is_rate else {"joules_per_step": joules})
    if world_size > 1:
        metrics["average_power_w_per_gpu"] = power_w / world_size
    if tokens := sum(m.tokens_per_step for m in measurements):
        metrics |= {"joules_per_token": joules / tokens, "tokens_per_joule": tokens / joules}
    if flops := sum(m.flops_per_step for m in measurements):
        metrics["tflop_per_joule"] = flops / 1e12 / joules
    return metrics


def describe_missing(criteria: Criteria, measurements: Sequence[Measurement], metrics: Mapping[str, float]) -> str:
    """Return which objective or limit a trial with these metrics lacks, why, and the remedy; empty if it has all."""
    names = dict.fromkeys([*criteria.metrics, *(limit.metric for limit in criteria.limits)])
    if not (missing := next((name for name in names if not math.isfinite(metrics.get(name, math.nan))), "")):
        return ""
    source, first = find_source(missing), measurements[0]
    why, remedy = "", "Set objective= to" if missing in criteria.metrics else "A limit can be on"
    if missing in metrics:
        return f"{missing} is {metrics[missing]:g}"
    if "energy" in source and (reason := missing_energy(measurements)):
        why = f", since the device's energy is not known: {reason}"
    elif source and first.is_rate:
        why = ", since the log has no size of a step: set command.global_batch= and command.sequence_length="
    elif first.of_gang and not source:
        why = f"; command.log.{missing}='REGEX' reads it from the log"
    own = (name for name in metrics if name not in METRICS and not name.startswith("claimed_"))
    named = [name for name in metrics if name in DIRECTIONS] + [name for name in own if not name.endswith(SUFFIXES)]
    return f"{missing} was not measured{why}. {remedy} one of: {', '.join(named)}"


def missing_energy(measurements: Sequence[Measurement]) -> str:
    """Return why some rank's energy is unknown, or an empty string if every rank's energy is known."""
    reasons = (m.energy.missing if m.energy else "no driver reports it" for m in measurements)
    return next((reason for reason in reasons if reason), "")


def hidden_metrics(trials: Sequence[Mapping[str, float]], objective: str) -> set[str]:
    """Return the energy and cost metrics that a table omits. Keep the objective and one varying metric per kind."""
    first = next((name for name in EFFICIENCY if any(name in metrics for metrics in trials)), "")
    efficiency = objective if objective in EFFICIENCY else first
    constant = {name for name in (efficiency, COST) if len({metrics.get(name) for metrics in trials}) < 2}
    return ({*EFFICIENCY, "average_power_w"} - {efficiency} | constant) - {objective}


def cost_metrics(metrics: Mapping[str, float], world_size: int, prices: Prices) -> dict[str, float]:
    """Return the cost of a million tokens, or nothing if there is no price or a price cannot be applied."""
    has_price = prices.per_hour is not None or prices.per_kwh is not None
    lacks_energy = prices.per_kwh is not None and "joules_per_token" not in metrics
    if "tokens_per_s" not in metrics or lacks_energy or not has_price:
        return {}
    hours = world_size / metrics["tokens_per_s"] / SECONDS_PER_HOUR
    kwh = metrics.get("joules_per_token", 0.0) / JOULES_PER_KWH
    return {COST: 1e6 * (hours * (prices.per_hour or 0.0) + kwh * (prices.per_kwh or 0.0))}
