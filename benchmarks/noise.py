"""Series of step times with a known median and mean: six kinds of noise, vectorized over simulations."""

import math
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

SPREAD = 0.01  # standard deviation of the log-normal noise and of the AR(1) processes
SLOW_SHARE = 0.05  # of the steps, which are slower by half on average
FAST_SHARE = 0.6  # of the time spent at the faster of two clocks
SLOWER_BY = 0.03  # relative slowdown of the slower clock
SPREAD_AT_A_CLOCK = 0.003
STICKS_FOR = 20  # average number of steps for which a clock keeps its level

Noise = Callable[[int, int, np.random.Generator], np.ndarray]


def lognormal(series: int, steps: int, random: np.random.Generator) -> np.ndarray:
    """Return [series, steps] independent step times around 1."""
    return np.exp(SPREAD * random.standard_normal((series, steps)))


def slow_outliers(series: int, steps: int, random: np.random.Generator) -> np.ndarray:
    """Return log-normal step times, one in twenty slower by an exponential delay."""
    slow = random.random((series, steps)) < SLOW_SHARE
    return lognormal(series, steps, random) * (1 + slow * random.exponential(0.5, (series, steps)))


def autoregressive(correlation: float, spread: float = SPREAD) -> Noise:
    """Return a generator of step times with Gaussian AR(1) logarithms, stationary from the first step."""

    def draw(series: int, steps: int, random: np.random.Generator) -> np.ndarray:
        shocks = random.standard_normal((steps, series))
        shocks[1:] *= math.sqrt(1 - correlation**2)
        for step in range(1, steps):
            shocks[step] += correlation * shocks[step - 1]
        return np.exp(spread * shocks.T)

    return draw


def two_clocks(series: int, steps: int, random: np.random.Generator) -> np.ndarray:
    """Return step times at one of two clocks, chosen anew for each step."""
    return _at_clocks(random.random((series, steps)) > FAST_SHARE, random)


def sticking_clock(series: int, steps: int, random: np.random.Generator) -> np.ndarray:
    """Return step times at one of two clocks; the clock changes after STICKS_FOR steps on average."""
    leaves_fast, leaves_slow = (1 / (2 * STICKS_FOR * share) for share in (FAST_SHARE, 1 - FAST_SHARE))
    is_slow = np.empty((steps, series), bool)
    is_slow[0] = random.random(series) > FAST_SHARE
    for step in range(1, steps):
        changes = random.random(series) < np.where(is_slow[step - 1], leaves_slow, leaves_fast)
        is_slow[step] = is_slow[step - 1] ^ changes
    return _at_clocks(is_slow.T, random)


def _at_clocks(is_slow: np.ndarray, random: np.random.Generator) -> np.ndarray:
    noise = np.exp(SPREAD_AT_A_CLOCK * random.standard_normal(is_slow.shape))
    return (1 + SLOWER_BY * is_slow) * noise


KINDS: Mapping[str, Noise] = {
    "log-normal 1%": lognormal,
    "5% slow outliers": slow_outliers,
    "bimodal clock 60/40": two_clocks,
    "AR(1) 0.5": autoregressive(0.5),
    "AR(1) 0.9": autoregressive(0.9),
    "clock that sticks for about 20 steps": sticking_clock,
}
# The distribution of a single step, for its median and mean.
INDEPENDENT = {"AR(1) 0.5": lognormal, "AR(1) 0.9": lognormal, "clock that sticks for about 20 steps": two_clocks}


@cache
def true_value(kind: str, statistic: str) -> float:
    """Return the median or the mean of the distribution, from a million independent steps."""
    draw = INDEPENDENT.get(kind, KINDS[kind])
    steps = draw(1, 1_000_000, np.random.default_rng(0))
    return float(np.median(steps) if statistic == "median" else steps.mean())
