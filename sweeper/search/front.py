"""Remeasure the front of several objectives to find out how certain it is that each point is on the front.

The points of the front are remeasured, interleaved, like the finalists for one objective (`finals.py`). For each pair,
two hypotheses are tested: that one point dominates the other, and that it does not. At most 5% of fronts have a point
that is wrongly called "on the front", and at most 5% have a point that is wrongly called "dominated", whatever the
number of points and noisy objectives (Bonferroni over both). Two points are the same if they differ in no objective:
each difference is within the objective's resolution, or the Student's t interval of the paired differences contains
zero. This interval holds for all pairs and objectives at once.

Rounds are paired, so drift between rounds has no effect. The error of a pair's difference is the larger of two: the
error pooled over all points (from the residuals of points and rounds), and the pair's own error. With three rounds, the
pair's own error has only two degrees of freedom, too few for any decision among twelve points. Taking the larger error
allows for a point that is noisier than the rest. `tests/sweeper/search/test_dominance.py` simulates how often verdicts
are wrong and how often they are reached.

A difference in an objective counts only if it exceeds the objective's resolution. Otherwise a metric that is the same
in every round, such as memory, would decide by its last digit because it has no spread."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from sweeper.common.trials import TrialRecord
from sweeper.metrics.criteria import Criteria
from sweeper.metrics.intervals import Interval, student_interval
from sweeper.search.finals import FAMILY_ERROR, MIN_ROUNDS, find_exceeded, mean_of_rounds, objective_by_round

MAX_POINTS = 12  # the number of points to remeasure on a front, unless finals.top is larger
MIN_POINTS = 3  # a smaller front may be small by chance, so the next best trials are remeasured too
LEAST_ERROR = 1e-9  # relative error of a mean; objectives that are equal in every round still have rounding errors


@dataclass(frozen=True)
class FrontPoint:
    """A remeasured point of the front."""

    trial: TrialRecord  # the trial from the search
    values: Mapping[str, Interval]  # the mean of each objective over the rounds, by metric
    share: float  # the confidence that no other point dominates this point, for this point alone
    is_certain: bool  # undominated, with confidence for all points of the front at once
    is_dominated: bool  # dominated, with confidence for all pairs of the front at once
    is_on_front: bool  # no other point's means dominate this point's means
    # Numbers of the trials that neither differ significantly from this point nor dominate it nor are dominated by it.
    same_as: tuple[int, ...]
    rounds: int  # the number of rounds that are compared
    # Limits that the median over the rounds exceeds. With any of them, a point is not compared and not on the front.
    exceeded: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether the point is on the front, dominated or uncertain, or else the limits that it exceeds."""
        if self.exceeded:
            return f"beyond a limit: {'; '.join(self.exceeded)}"
        return "on the front" if self.is_certain else "dominated" if self.is_dominated else "not sure"


@dataclass(frozen=True)
class Front:
    """The front of several objectives, sorted by the leading objective, best first."""

    searched: Sequence[TrialRecord]  # trials of the search that no other trial dominates
    certified: Sequence[FrontPoint]  # remeasured points; empty if no point completed two rounds

    @property
    def measured_once(self) -> list[TrialRecord]:
        """Trials on the front that were not remeasured."""
        measured = {point.trial.number for point in self.certified}
        return [trial for trial in self.searched if trial.number not in measured]

    @property
    def trials(self) -> list[TrialRecord]:
        """The trials on the search's front after correction by the remeasurements, sorted by number."""
        certain = [point.trial for point in self.certified if point.is_on_front]
        return sorted([*self.measured_once, *certain], key=lambda trial: trial.number)

    @property
    def numbers(self) -> list[int]:
        return [trial.number for trial in self.trials]

    @property
    def leader(self) -> TrialRecord | None:
        """The trial on the front that is best by the leading objective. Remeasured trials take precedence."""
        certain = [point.trial for point in self.certified if point.is_on_front]
        return next(iter(certain or self.searched), None)


def measure_front(
    ranked: Sequence[TrialRecord], records: Iterable[TrialRecord], criteria: Criteria, top: int
) -> Front | None:
    """Return the front of a search, or None if there is only one objective or no ranked trial. `ranked` lists the best
    trial first, `records` includes the finals, and `top` is `finals.top`."""
    if not criteria.has_front or not ranked:
        return None
    leading = criteria.objectives[0]
    points = certify(select_finalists(ranked, criteria, top), records, criteria)
    certified = sorted(points, key=lambda point: leading.loss(point.values[leading.metric].value))
    exceeding = {point.trial.number for point in certified if point.exceeded}  # these must not dominate other points
    return Front(criteria.front(trial for trial in ranked if trial.number not in exceeding), certified)


def select_finalists(ranked: Sequence[TrialRecord], criteria: Criteria, top: int) -> Sequence[TrialRecord]:
    """Return the trials to remeasure: the best `top` or, with several objectives, the front, evenly thinned out."""
    if not criteria.has_front or not top:
        return ranked[:top]
    front = criteria.front(ranked)
    if len(front) < MIN_POINTS:
        return ranked[:MIN_POINTS]
    size = min(len(front), max(top, MAX_POINTS))
    return [front[round(place)] for place in np.linspace(0, len(front) - 1, size)]


def certify(finalists: Sequence[TrialRecord], records: Iterable[TrialRecord], criteria: Criteria) -> list[FrontPoint]:
    """Return a point for each finalist that was remeasured in at least two rounds, in the same order."""
    records = list(records)
    by_metric = [objective_by_round(finalists, records, metric) for metric in criteria.metrics]
    measured = [point for point in finalists if all(len(rounds[point.number]) > 1 for rounds in by_metric)]
    common = set.intersection(*(set(rounds[p.number]) for p in measured for rounds in by_metric)) if measured else set()
    if len(common) < 2:
        return []
    values = np.array(
        [[[rounds[p.number][n] for n in sorted(common)] for rounds in by_metric] for p in measured], float
    )
    losses, resolutions = _to_losses(values, criteria)
    exceeded = find_exceeded(measured, records, criteria)
    within = [n for n, point in enumerate(measured) if not exceeded[point.number]]
    inside = losses[within]
    front = {within[place] for place in np.flatnonzero(~find_dominated(inside.mean(axis=2), resolutions).any(axis=0))}
    shares = np.zeros(len(measured))
    certain: set[int] = set()
    ordered: set[tuple[int, int]] = set()  # pairs in which the first point dominates the second
    if len(common) >= MIN_ROUNDS and within:  # fewer rounds certify nothing
        dominates, does_not = p_values_of_dominance(inside, resolutions)
        pairs = max(1, len(within) - 1)  # pairs per point; at least one point is not dominated
        shares[within] = 1 - dominates.max(axis=0)
        certain = {n for n in within if shares[n] >= 1 - FAMILY_ERROR / pairs}
        sure = np.argwhere(does_not <= FAMILY_ERROR / (pairs * len(within)))
        ordered = {(within[one], within[other]) for one, other in sure}
    dominated = {other for _, other in ordered}
    same = _find_same(losses, resolutions, ordered)
    return [
        FrontPoint(
            trial=point,
            values={metric: mean_of_rounds(values[n, k]) for k, metric in enumerate(criteria.metrics)},
            share=float(shares[n]),
            is_certain=n in certain,
            is_dominated=n in dominated,
            is_on_front=n in front,
            same_as=tuple(measured[other].number for other in same[n]),
            rounds=len(common),
            exceeded=exceeded[point.number],
        )
        for n, point in enumerate(measured)
    ]


def _to_losses(values: np.ndarray, criteria: Criteria) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses and the resolution for each objective. For positive metrics, losses are logarithms."""
    losses, resolutions = np.empty_like(values), np.empty(len(criteria.objectives))
    for place, objective in enumerate(criteria.objectives):
        of_metric = values[:, place]
        is_positive = (of_metric > 0).all()
        losses[:, place] = objective.loss(1.0) * (np.log(of_metric) if is_positive else of_metric)
        resolutions[place] = objective.resolution * (1.0 if is_positive else np.abs(of_metric).max())
    return losses, resolutions


def _find_same(losses: np.ndarray, resolutions: np.ndarray, ordered: set[tuple[int, int]]) -> list[list[int]]:
    """Return, for each point, the points that count as the same. In `ordered` pairs, one point dominates the other."""
    count, objectives, _ = losses.shape
    level = 1 - FAMILY_ERROR / max(1, math.comb(count, 2) * objectives)
    same: list[list[int]] = [[] for _ in range(count)]
    for one, other in combinations(range(count), 2):
        is_ordered = (one, other) in ordered or (other, one) in ordered
        for difference, resolution in zip(losses[one] - losses[other], resolutions, strict=True):
            interval = student_interval(difference, level)
            is_ordered |= abs(interval.value) > resolution and not interval.low <= 0 <= interval.high
        if not is_ordered:
            same[one].append(other)
            same[other].append(one)
    return same


def p_values_of_dominance(losses: np.ndarray, resolutions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each pair, the p-values of two hypotheses: the first point dominates the second, and it does not.

    The first hypothesis is refuted if the second point is better in some objective. The second is refuted if the first
    point is better in some objective and worse in none. A point paired with itself has the p-values 0 and 1. `losses`
    is indexed by point, objective and round. `resolutions` contains the largest differences that are ignored."""
    from scipy.special import stdtr

    points, _, rounds = losses.shape
    differences = losses[:, None] - losses[None]
    residuals = losses - losses.mean(axis=2, keepdims=True) - losses.mean(axis=0) + losses.mean(axis=(0, 2))[:, None]
    freedom = max(1, points - 1) * (rounds - 1)
    pooled = 2 * (residuals**2).sum(axis=(0, 2)) / freedom
    errors = np.sqrt(np.maximum(differences.var(axis=3, ddof=1), pooled) / rounds)
    noisy = max(1, np.count_nonzero(errors.max(axis=(0, 1)) > LEAST_ERROR))
    errors, means = np.maximum(errors, LEAST_ERROR), differences.mean(axis=3)
    second_is_better = stdtr(freedom, (resolutions - means) / errors)
    first_is_better = stdtr(freedom, (resolutions + means) / errors)
    first_is_not_worse = stdtr(freedom, (means - resolutions) / errors)
    dominates = np.minimum(1, noisy * second_is_better.min(axis=2))
    does_not = np.maximum(first_is_not_worse.max(axis=2), np.minimum(1, noisy * first_is_better.min(axis=2)))
    np.fill_diagonal(dominates, 0)
    np.fill_diagonal(does_not, 1)
    return dominates, does_not


def find_dominated(means: np.ndarray, resolutions: np.ndarray) -> np.ndarray:
    """Return, for each pair, whether the first point dominates the second, judging by the means of the objectives.

    A point dominates another if it is better in some objective by more than the resolution, and worse in none by more
    than the resolution. Points that differ by about the resolution may dominate each other in a cycle. If no point
    would be left on the front, every difference counts.
    """
    # Both tests use the same difference. Rounding of separate sums could let two points dominate each other.
    differences = means[:, None] - means[None]
    beats = (differences <= resolutions).all(axis=2) & (differences < -resolutions).any(axis=2)
    if beats.any(axis=0).all():
        beats = (differences <= 0).all(axis=2) & (differences < 0).any(axis=2)
    return beats
