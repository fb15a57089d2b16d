"""Compute 95% intervals for the median or mean of step times, even if successive steps are correlated.

The median's interval is bounded by order statistics, interpolated between the two nearest ranks (Hettmansperger and
Sheather 1986). It assumes no particular distribution and requires at least five steps. With five steps, it extends from
the fastest to the slowest step and covers the median in 93.75% of cases. The mean's interval is Student's t interval.

Clocks and caches make successive steps correlated, so n steps have an effective sample size of n / tau. The integrated
autocorrelation time tau is estimated with Geyer's initial monotone sequence (1992) and corrected for the bias from
subtracting the mean. If there are too few effective steps, there is no interval. `benchmarks/coverage.py` measures how
often the intervals contain the true value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from sweeper.common.format import format_number
from workloads.api.metrics import find_source

BOUNDS = ("", "_ci_low", "_ci_high")  # the suffixes of a metric's value and of the bounds of its interval
MIN_STEPS = 5  # minimum number of steps for an interval of the median
TOO_FEW = f"fewer than {MIN_STEPS} steps"
TOO_SHORT = "correlated, too short"
TOO_COARSE = "times printed too coarsely"

Z = 1.959964  # 95% of a normal distribution lies within this many standard deviations
LEVEL = 0.95
EXACT_UP_TO = 300  # steps; for more, the normal approximation of the rank is accurate to 0.02
# For a one-sided 5% test of the ranks' lag-1 autocorrelation. Without the test, noise in tau would widen all intervals.
SIGNIFICANT_Z = 1.645
# With fewer effective steps or crossings of the midpoint, the estimate of tau is too noisy. Chosen by simulation: AR(1)
# with coefficient 0.9 crosses 29 times in 200 steps, and a clock that sticks for 20 steps crosses 25 times in 500.
MIN_EFFECTIVE_STEPS = 6.0
MIN_CROSSINGS = 14


@dataclass(frozen=True)
class Interval:
    """A value and the bounds of its 95% interval. The bounds are NaN if there is no interval."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @staticmethod
    def read(metrics: Any, name: str) -> Interval:
        """Return the interval of a metric in a mapping or a row of a table. Missing values are NaN."""
        return Interval(*(float(metrics.get(f"{name}{end}", math.nan)) for end in BOUNDS))

    def to_metrics(self, name: str) -> dict[str, float]:
        return {f"{name}{end}": bound for end, bound in zip(BOUNDS, self.bounds, strict=True)}

    @property
    def bounds(self) -> tuple[float, float, float]:
        return self.value, self.low, self.high

    @property
    def has_interval(self) -> bool:
        return not (math.isnan(self.low) or math.isnan(self.high))

    @property
    def errors(self) -> tuple[float, float]:
        """The distances from the value to the lower and to the upper bound."""
        return self.value - self.low, self.high - self.value

    def scaled(self, factor: float) -> Interval:
        return Interval(factor * self.value, factor * self.low, factor * self.high)

    @property
    def change(self) -> str:
        """A ratio and its interval as percentage changes: `-3.0% (95% -4.1% to -1.9%)`."""
        bounds = f"95% {self.low - 1:+.1%} to {self.high - 1:+.1%}" if self.has_interval else "no interval"
        return f"{self.value - 1:+.1%} ({bounds})"

    def __str__(self) -> str:
        interval = f" ({format_number(self.low)} to {format_number(self.high)})" if self.has_interval else ""
        return format_number(self.value) + interval


@dataclass(frozen=True)
class Correlation:
    """The correlation of successive steps."""

    time_steps: float = 1.0  # the integrated autocorrelation time; 1 for independent steps
    degrees_of_freedom: float = math.inf  # degrees of freedom of the estimate; infinite for independent steps
    is_too_short: bool = False  # too few steps to estimate the correlation


def interval_of_steps(
    times: np.ndarray, statistic: str, correlation: Correlation | None = None, resolution: float = 0.0
) -> Interval | None:
    """Return the median or the mean with its 95% interval, or None if there are too few steps.

    If times were rounded to a multiple of `resolution`, the interval is extended by half of that at both ends. The
    fastest step has no interval because it has no lower bound.
    """
    correlation = correlation or estimate_correlation(times, statistic)
    if len(times) < MIN_STEPS or correlation.is_too_short or statistic == "fastest":
        return None
    is_median = statistic == "median"
    found = _median_interval(times, correlation) if is_median else student_interval(times, correlation=correlation)
    low, high = max(found.low, float(times.min())) - resolution / 2, found.high + resolution / 2
    return Interval(found.value, low, high) if low > 0 else None  # a time of zero has no rate


def level_of_median(count: float) -> str:
    """Return the confidence level of the median's interval from this many values, as text."""
    return f"{1 - 2 * 0.5**count:.2%}" if count == MIN_STEPS else f"{LEVEL:.0%}"


def missing_reason(metrics: Mapping[str, float], name: str) -> str:
    """Return why a metric lacks a 95% interval, or an empty string if it has one or is not derived from steps."""
    source = find_source(name)
    if not source or "energy" in source or f"{name}_ci_low" in metrics or "effective_steps" not in metrics:
        return ""  # energy is a single reading for all steps
    if metrics["steps"] < MIN_STEPS:
        return TOO_FEW
    return TOO_COARSE if metrics.get("step_resolution_ms", 0.0) >= metrics.get("step_time_ms", math.inf) else TOO_SHORT


def student_interval(values: np.ndarray, level: float = LEVEL, correlation: Correlation | None = None) -> Interval:
    """Return the mean of values, by default independent ones, with Student's t interval."""
    correlation = correlation or Correlation()
    mean, effective_count = float(values.mean()), len(values) / correlation.time_steps
    quantile = student_quantile((1 + level) / 2, min(effective_count - 1, correlation.degrees_of_freedom))
    half_width = quantile * float(values.std(ddof=1)) / math.sqrt(effective_count)
    return Interval(mean, mean - half_width, mean + half_width)


def student_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return a quantile of Student's t distribution, which is normal for infinite degrees of freedom."""
    from scipy.special import stdtrit  # takes 0.2 s to import; scipy.stats would take 0.9 s

    return float(stdtrit(degrees_of_freedom, probability))


def ratio_interval(above: Interval, below: Interval) -> Interval:
    """Return the ratio of two values with its interval (Zou and Donner 2008, applied on a log scale)."""
    value = math.log(above.value / below.value)
    low = math.hypot(math.log(above.value / above.low), math.log(below.high / below.value))
    high = math.hypot(math.log(above.high / above.value), math.log(below.value / below.low))
    return Interval(math.exp(value), math.exp(value - low), math.exp(value + high))


def estimate_correlation(times: np.ndarray, statistic: str) -> Correlation:
    """Estimate how strongly the correlation of successive steps affects their median or mean.

    Steps are treated as independent unless the lag-1 autocorrelation of their ranks is significant. With fewer than 20
    steps, even a strong correlation is often not significant.
    """
    count = len(times)
    if count < MIN_STEPS or times.min() == times.max():
        return Correlation()
    # The rank of each value. Equal values, which are common because logs print few digits, share their mean rank.
    _, inverse, counts = np.unique(times, return_inverse=True, return_counts=True)
    ranks = _autocorrelations((np.cumsum(counts) - (counts + 1) / 2)[inverse])
    if ranks[1] * math.sqrt(count) + 1 / math.sqrt(count) < SIGNIFICANT_Z:
        return Correlation()
    # The error of a median depends on the signs of the deviations, which are less correlated than the ranks.
    signs = np.sign(times - np.median(times))
    time_steps, lags = _sum_autocorrelations(_autocorrelations(signs) if statistic == "median" else ranks)
    # The estimate is too low as often as too high, so add its relative variance (Madras and Sokal 1988).
    time_steps *= 1 + 4 * lags / count
    is_above = times > np.percentile(times, [10, 90]).mean()
    crossings = int((is_above[1:] != is_above[:-1]).sum())
    is_too_short = count / time_steps < MIN_EFFECTIVE_STEPS or crossings < MIN_CROSSINGS
    return Correlation(time_steps, max(2.0, count / lags), is_too_short)


def _autocorrelations(values: np.ndarray) -> np.ndarray:
    centered = values - values.mean()
    spectrum = np.fft.rfft(centered, 2 * len(values))
    covariances = np.fft.irfft(spectrum * spectrum.conj())[: len(values)]
    return covariances / covariances[0] if covariances[0] > 0 else np.zeros(len(values))


def _sum_autocorrelations(autocorrelations: np.ndarray) -> tuple[float, int]:
    """Return the integrated autocorrelation time and the number of lags in its sum, each at least 1."""
    count = len(autocorrelations)
    pairs = autocorrelations[1 : count - 1 : 2] + autocorrelations[2::2]
    decreasing = np.minimum.accumulate(pairs)
    positive = decreasing[: np.argmax(decreasing <= 0)] if (decreasing <= 0).any() else decreasing
    total, lags = float(positive.sum()), 2 * len(positive)
    # Subtracting the mean lowers each autocorrelation by about time / count. Solve this equation for the time.
    remaining = 1 + 2 * (total - lags) / count
    time_steps = (1 + 2 * total) / remaining if remaining > 0 else math.inf
    return max(1.0, time_steps), max(1, lags)


def _median_interval(times: np.ndarray, correlation: Correlation) -> Interval:
    count, time_steps = len(times), correlation.time_steps
    rank = _rank_of_bound(count)
    if time_steps > 1:
        quantile = student_quantile((1 + LEVEL) / 2, correlation.degrees_of_freedom)
        rank = min(rank, count / 2 + 0.5 - quantile * math.sqrt(count * time_steps) / 2)
    rank = max(1.0, rank)
    low, high = np.interp([rank, count + 1 - rank], np.arange(1, count + 1), np.sort(times))
    return Interval(float(np.median(times)), float(low), float(high))


@cache
def _rank_of_bound(count: int) -> float:
    """Return the fractional rank, starting at 1, of the median's lower bound (Hettmansperger and Sheather 1986)."""
    if count > EXACT_UP_TO:
        return count / 2 + 0.5 - Z * math.sqrt(count) / 2
    below, covered, rank = 0.0, 1.0, 0
    while True:
        below += math.comb(count, rank) * 0.5**count
        covered_next = 1 - 2 * below  # coverage between order statistics rank + 1 and count - rank
        if covered_next < LEVEL:
            break
        covered, rank = covered_next, rank + 1
    if rank == 0:
        return 1.0
    excess = (covered - LEVEL) / (covered - covered_next)
    return rank + (count - rank) * excess / (rank + (count - 2 * rank) * excess)
