"""Find slow parts among equal parts. The probability that a test as a whole fails a healthy part is at most 1%.

Rates are compared on a log scale. The logarithm of a rate is a common value plus normal deviations for the node, the
device and the single measurement, with the standard deviations in `Spread`. All comparisons in a test share
`FALSE_ALARMS` evenly (Bonferroni 1936), which is valid for correlated comparisons too. `benchmarks/acceptance.py`
measures how often a healthy cluster fails and which losses are found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

FALSE_ALARMS = 0.01  # probability per test, over all comparisons together
FOUND = 0.99  # the probability that a loss of the reported size is found
MEDIAN_VARIANCE = math.pi / 2  # for normal values: the variance of the median divided by the variance of the mean
FEWEST_FOR_SPREAD = 16  # minimum number of parts for using their measured spread; fewer measure it to 40% or worse
MAD_TO_SD = 1.4826  # the standard deviation of a normal distribution divided by the MAD


@dataclass(frozen=True)
class Spread:
    """How much the rates of equal parts differ, as standard deviations of their logarithms."""

    device: float  # between devices of the same node
    node: float  # between nodes
    run: float  # between measurements of the same device
    expected: float  # uncertainty of the expected value from the catalog or the planner
    worth: float  # the smallest loss that fails a part, even if the spreads are small

    @property
    def own(self) -> float:
        """The spread between devices of one node, each measured once."""
        return math.hypot(self.device, self.run)

    @property
    def total(self) -> float:
        return math.hypot(self.own, self.node)

    def of_median(self, devices: int) -> Spread:
        """Return the spread of node medians, each over this many devices."""
        return replace(self, device=self.own * math.sqrt(MEDIAN_VARIANCE / devices), run=0.0)


@dataclass(frozen=True)
class Limit:
    """The lowest rate at which a part passes one comparison."""

    basis: str  # the reference for the comparison
    expected: float  # the rate that the part should reach
    lowest: float  # the lowest rate that passes
    deviation: float  # the standard deviation of log(rate / expected) for a healthy part

    @property
    def found_loss(self) -> float:
        """The smallest loss that is found with probability `FOUND`, as a share of the expected rate."""
        return 1 - self.lowest / self.expected * math.exp(-NormalDist().inv_cdf(FOUND) * self.deviation)


@cache
def allowed_loss(deviation: float, worth: float, comparisons: int) -> float:
    """Return how far below the expected rate a passing rate may be, as a difference of logarithms."""
    quantile = NormalDist().inv_cdf(1 - FALSE_ALARMS / max(1, comparisons))
    return max(quantile * deviation, -math.log1p(-worth))


def set_limit(basis: str, expected: float, deviation: float, worth: float, comparisons: int) -> Limit:
    """Return the limit for one of a test's `comparisons` of a rate with an expected rate."""
    return Limit(basis, expected, expected * math.exp(-allowed_loss(deviation, worth, comparisons)), deviation)


def limits_among(rates: Sequence[float], nodes: Sequence[str], spread: Spread, comparisons: int) -> list[Limit]:
    """Return a limit for each of two or more equal parts, which are compared with the median of the other parts."""
    logs = np.log(np.asarray(rates, dtype=float))
    deviation = fleet_deviation(logs, nodes, spread)
    medians = np.exp(medians_of_others(logs))
    return [set_limit("the others", float(median), deviation, spread.worth, comparisons) for median in medians]


def fleet_deviation(logs: np.ndarray, nodes: Sequence[str], spread: Spread) -> float:
    """Return the standard deviation of log(rate / median): the expected or the measured value, whichever is larger."""
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
    """Return, for each of two or more values, the median of the other values."""
    count = len(values)
    order = np.argsort(values, kind="stable")
    ordered, place = values[order], np.empty(count, dtype=int)
    place[order] = np.arange(count)

    def without_own(position: int) -> np.ndarray:
        return ordered[position + (place <= position)]

    return (without_own((count - 2) // 2) + without_own((count - 1) // 2)) / 2
