"""Parameters as axes of the unit cube, for samplers that compute on arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Axis:
    """A parameter, by the values that its Optuna distribution has internally.

    A number is a position from 0 to 1, with half a step of room at both ends. A choice is its index.

    Attributes:
        low, high: of the range, with that room.
        step: between the values of a range; 0 for a continuous one.
        is_log: whether equal ratios are equal distances.
        choices: their number; 0 for a range.
    """

    low: float = 0.0
    high: float = 1.0
    step: float = 0.0
    is_log: bool = False
    choices: int = 0

    @staticmethod
    def of(distribution: BaseDistribution) -> Axis:
        if isinstance(distribution, CategoricalDistribution):
            return Axis(choices=len(distribution.choices))
        assert isinstance(distribution, FloatDistribution | IntDistribution)
        step = float(distribution.step or 0.0)
        return Axis(distribution.low - step / 2, distribution.high + step / 2, step, distribution.log)

    def positions(self, values: Floats) -> Floats:
        """Return the positions of values."""
        if self.choices:
            return values
        low, high = self._scaled(np.array([self.low, self.high]))
        return np.asarray((self._scaled(values) - low) / (high - low))

    def values(self, positions: Floats) -> Floats:
        """Return the nearest values to positions."""
        if self.choices:
            return positions
        low, high = self._scaled(np.array([self.low, self.high]))
        values = low + positions * (high - low)
        values = np.exp(values) if self.is_log else values
        if self.step:
            first, last = self.low + self.step / 2, self.high - self.step / 2
            values = first + self.step * np.round((values - first) / self.step)
            return np.clip(values, first, last)
        return np.clip(values, self.low, self.high)

    def _scaled(self, values: Floats) -> Floats:
        return np.log(values) if self.is_log else values
