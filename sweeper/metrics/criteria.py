"""Rank trials by one or several objectives. A trial that exceeds a limit is not ranked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sweeper.common.format import format_number
from sweeper.common.trials import TrialRecord, TrialStatus
from workloads.api.metrics import ROWS, get_metric

MAX_OBJECTIVES = 3  # with four or more objectives, most points of a random sample are on the front
UNKNOWN_EXCESS = 1.0  # for a trial without the limit's metric, which cannot show that the trial meets the limit
DIRECTIONS = {row.name: row.direction for row in ROWS if row.direction}


@dataclass(frozen=True)
class Objective:
    """A metric to optimize. `direction` is maximize or minimize."""

    metric: str
    direction: str

    @property
    def resolution(self) -> float:
        """The largest relative difference that is ignored when points of a front are compared."""
        return get_metric(self.metric).resolution

    def loss(self, value: float) -> float:
        """Return the value with its sign chosen so that lower is better."""
        return -value if self.direction == "maximize" else value


@dataclass(frozen=True)
class Limit:
    """A bound on a metric: an upper bound if lower is better, otherwise a lower bound."""

    metric: str
    bound: float
    direction: str

    def excess(self, metrics: Mapping[str, float]) -> float:
        """Return how far the metric exceeds the bound, as a fraction of it (zero or negative if within the bound)."""
        if self.metric not in metrics:
            return UNKNOWN_EXCESS
        beyond = metrics[self.metric] - self.bound
        return (-beyond if self.direction == "maximize" else beyond) / (abs(self.bound) or 1.0)

    def describe_problem(self) -> str:
        """Return why the bound excludes no trial or every trial, or an empty string if neither is certain."""
        unit = get_metric(self.metric).unit
        if unit == "%" and self.bound > 1:
            return f"must be a fraction. Write {self.bound / 100:g}"
        if unit in ("", "dB") or self.bound > 0 or (self.bound == 0 and self.direction == "minimize"):
            return ""  # a metric without a unit, such as a loss, may be negative
        return f"{'every' if self.direction == 'maximize' else 'no'} trial keeps {self}. Must be above 0"

    @property
    def sign(self) -> str:
        return "≥" if self.direction == "maximize" else "≤"

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.bound:g}"


@dataclass(frozen=True)
class Criteria:
    """A sweep's objectives, the leading objective first, and limits. Trials that exceed a limit are not ranked."""

    objectives: tuple[Objective, ...]
    limits: tuple[Limit, ...] = ()

    @staticmethod
    def of(objectives: Mapping[str, str], limits: Mapping[str, Any] | None = None) -> Criteria:
        """Build criteria from each metric's direction or bound. Raises KeyError if a limit has no direction."""
        pairs = {name: bound if isinstance(bound, list) else [bound, ""] for name, bound in (limits or {}).items()}
        return Criteria(
            tuple(Objective(metric, direction) for metric, direction in objectives.items()),
            tuple(Limit(name, bound, direction or DIRECTIONS[name]) for name, (bound, direction) in pairs.items()),
        )

    @property
    def objective(self) -> str:
        return self.objectives[0].metric

    @property
    def direction(self) -> str:
        return self.objectives[0].direction

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return tuple(objective.metric for objective in self.objectives)

    @cached_property
    def directions(self) -> tuple[str, ...]:
        return tuple(objective.direction for objective in self.objectives)

    @property
    def has_front(self) -> bool:
        """Whether there are several objectives, in which case trials are ranked by dominance."""
        return len(self.objectives) > 1

    def values(self, record: TrialRecord) -> tuple[float, ...] | None:
        """Return a trial's objective values, or None if the trial is incomplete or lacks a value."""
        if record.status is not TrialStatus.COMPLETE or any(name not in record.metrics for name in self.metrics):
            return None
        return tuple(record.metrics[name] for name in self.metrics)

    def losses(self, values: Iterable[float]) -> tuple[float, ...]:
        return tuple(objective.loss(value) for objective, value in zip(self.objectives, values, strict=True))

    def excess(self, record: TrialRecord) -> dict[str, float]:
        """Return the fraction by which a complete trial exceeds each limit (zero or negative if within the limit)."""
        return {limit.metric: limit.excess(record.metrics) for limit in self.limits}

    def ranked_losses(self, record: TrialRecord) -> tuple[float, ...] | None:
        """Return a trial's losses, or None if the trial has no rank because it is incomplete or exceeds a limit."""
        values = self.values(record)
        return None if values is None or self.exceeded(record) else self.losses(values)

    def exceeded(self, record: TrialRecord) -> list[Limit]:
        """Return the limits that a complete trial exceeds. A trial that exceeds any limit is not ranked."""
        return [limit for limit in self.limits if limit.excess(record.metrics) > 0]

    def describe_unmet(self, records: Iterable[TrialRecord]) -> str:
        """Describe the limits that no single trial meets, and the nearest trial, or return "" if a trial meets all."""
        complete = [record for record in records if self.values(record) is not None]
        if not complete or any(self.ranked_losses(record) is not None for record in complete):
            return ""
        metrics = {limit.metric for limit in self.limits}
        # A trial that lacks a limit's metric counts as farther away than any other trial.
        nearest = min(complete, key=lambda r: (not metrics <= r.metrics.keys(), max(self.excess(r).values())))
        beyond = [limit for limit in self.limits if any(limit in self.exceeded(record) for record in complete)]
        values = {limit.metric: nearest.metrics.get(limit.metric, math.nan) for limit in beyond}
        has = [f"{metric} {format_number(value) or 'unknown'}" for metric, value in values.items()]
        kept = " and ".join(f"limits.{limit}" for limit in beyond)
        return f"no trial keeps {kept}; the nearest, trial {nearest.number}, has {' and '.join(has)}"

    def rank(self, records: Iterable[TrialRecord]) -> list[TrialRecord]:
        """Return the trials that have a rank, best first, sorted by dominance layer, then by the leading objective."""
        return [record for _, record in self._layered(records)]

    def front(self, records: Iterable[TrialRecord]) -> list[TrialRecord]:
        """Return the trials that no other trial dominates, sorted by the leading objective, best first."""
        return [record for layer, record in self._layered(records) if layer == 0]

    def _layered(self, records: Iterable[TrialRecord]) -> list[tuple[int, TrialRecord]]:
        ranked = [(losses, record) for record in records if (losses := self.ranked_losses(record)) is not None]
        # With one objective, layers are not needed, only the order.
        layers = find_layers([losses for losses, _ in ranked]) if self.has_front else [0] * len(ranked)
        ordered = sorted(zip(layers, ranked, strict=True), key=lambda entry: (entry[0], entry[1][0]))
        return [(layer, record) for layer, (_, record) in ordered]


def dominates(losses: Sequence[float], others: Sequence[float]) -> bool:
    pairs = list(zip(losses, others, strict=True))
    return all(loss <= other for loss, other in pairs) and any(loss < other for loss, other in pairs)


def find_layers(losses: Sequence[Sequence[float]]) -> list[int]:
    """Return the dominance layer of each point, starting at 0 for points that are not dominated.

    Points are processed in lexicographic order, so no point is dominated by a later one. Each point goes into the first
    layer that has no point dominating it. Bisection finds it because every earlier layer has a point that dominates
    this one (Zhang, Tian, Cheng and Jin 2015, efficient non-dominated sort with binary search)."""
    import numpy as np  # takes 0.1 s, and every command imports this module, but few need layers

    points = np.array(losses, dtype=float)
    assigned = [0] * len(points)
    layers: list[list[np.ndarray]] = []
    for position in np.lexsort(points.T[::-1]) if len(points) else ():
        point = points[position]
        low, high = 0, len(layers)
        while low < high:
            middle = (low + high) // 2
            members = np.array(layers[middle])
            is_dominated = ((members <= point).all(axis=1) & (members < point).any(axis=1)).any()
            low, high = (middle + 1, high) if is_dominated else (low, middle)
        if low == len(layers):
            layers.append([])
        layers[low].append(point)
        assigned[position] = low
    return assigned
