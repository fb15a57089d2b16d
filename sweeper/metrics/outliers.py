"""Find slow parts among equal ones: at most 1% of whole tests put a healthy part below its limit by chance.

Rates are compared as logarithms. A rate is the sum of a common value, the deviations of its node and its device, and
the error of one measurement. Each is normal, with the standard deviation in `Spread`. The limits of all comparisons in
a test share `FALSE_ALARMS` evenly (Bonferroni 1936), which also holds for correlated comparisons.
`benchmarks/acceptance.py` measures how often a healthy cluster fails, and which losses are found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

FALSE_ALARMS = 0.01  # for a whole test, over all comparisons
FOUND = 0.99  # how often a loss of the stated size is found
MEDIAN_VARIANCE = math.pi / 2  # the variance of the median of normal values, divided by that of their mean
FEWEST_FOR_SPREAD = 16  # with at least this many parts their own spread counts too: fewer measure it to 40% or worse
MAD_TO_SD = 1.4826  # for a normal distribution


@dataclass(frozen=True)
class Spread:
    """How the rates of equal parts differ, as standard deviations of their logarithms."""

    device: float  # between the devices of a node
    node: float  # between nodes
    run: float  # between two measurements of one device
    expected: float  # of the expected value from the catalog or the planner
    worth: float  # the smallest loss that fails a part, however small the spreads are

    @property
    def own(self) -> float:
        """The spread of a device within its node, measured once."""
        return math.hypot(self.device, self.run)

    @property
    def total(self) -> float:
        return math.hypot(self.own, self.node)

    def of_median(self, devices: int) -> Spread:
        """Return the spread of the medians of a node's devices."""
        return replace(self, device=self.own * math.sqrt(MEDIAN_VARIANCE / devices), run=0.0)


@dataclass(frozen=True)
class Limit:
    """The lowest rate of a part that passes one comparison."""

    basis: str  # what the part is compared with
    expected: float  # the rate with which it is compared
    lowest: float  # a lower rate fails
    deviation: float  # the standard deviation of log(rate / expected) for a healthy part

    @property
    def found_loss(self) -> float:
        """The smallest loss that is found in `FOUND` of all cases, as a share of the expected rate."""
        return 1 - self.lowest / self.expected * math.exp(-NormalDist().inv_cdf(FOUND) * self.deviation)


@cache
def allowed_loss(deviation: float, worth: float, comparisons: int) -> float:
    """Return how far the logarithm of a passing rate may be below the logarithm of the expected rate."""
    quantile = NormalDist().inv_cdf(1 - FALSE_ALARMS / max(1, comparisons))
    return max(quantile * deviation, -math.log1p(-worth))


def set_limit(basis: str, expected: float, deviation: float, worth: float, comparisons: int) -> Limit:
    """Return the limit for comparing a rate with an expected one, as one of `comparisons` comparisons in a test."""
    return Limit(basis, expected, expected * math.exp(-allowed_loss(deviation, worth, comparisons)), deviation)


def limits_among(rates: Sequence[float], nodes: Sequence[str], spread: Spread, comparisons: int) -> list[Limit]:
    """Return the limit of each of two or more equal parts, whose rates are compared with the median of the others."""
    logs = np.log(np.asarray(rates, dtype=float))
    deviation = fleet_deviation(logs, nodes, spread)
    medians = np.exp(medians_of_others(logs))
    return [set_limit("the others", float(median), deviation, spread.worth, comparisons) for median in medians]


def fleet_deviation(logs: np.ndarray, nodes: Sequence[str], spread: Spread) -> float:
    """Return the standard deviation of a part's logarithm minus the median's, or the measured one if it is larger."""
    count, groups = len(logs), len(set(nodes))
    variance = spread.own**2 * (1 + MEDIAN_VARIANCE / (count - 1))
    if groups > 1:
        variance += spread.node**2 * (1 + MEDIAN_VARIANCE / (groups - 1))
    if count < FEWEST_FOR_SPREAD:
        return math.sqrt(variance)
    return max(math.sqrt(variance), robust_deviation(logs))


def robust_deviation(values: np.ndarray) -> float:
    """Estimate the standard deviation of normal values from their median absolute deviation, which resists outliers."""
    return MAD_TO_SD * float(np.median(np.abs(values - np.median(values))))


def medians_of_others(values: np.ndarray) -> np.ndarray:
    """Return, for each of two or more values, the median of the others."""
    count = len(values)
    order = np.argsort(values, kind="stable")
    ordered, place = values[order], np.empty(count, dtype=int)
    place[order] = np.arange(count)

    def without_own(position: int) -> np.ndarray:
        return ordered[position + (place <= position)]

    return (without_own((count - 2) // 2) + without_own((count - 1) // 2)) / 2
