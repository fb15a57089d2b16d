"""The front of several objectives, remeasured: how certain it is that each of its points belongs to it.

The points of the front are measured again, interleaved, as those of one objective are (`finals.py`). For every pair two
hypotheses are tested: that one point dominates the other, and that it does not. At most 5% of fronts have a point that
is wrongly called "on the front", and at most 5% one that is wrongly called "dominated", whatever the number of points
and of noisy objectives (Bonferroni over both). Two points are the same if no objective differs between them:
the difference is within the objective's resolution, or Student's interval of the paired differences contains zero, for
all pairs and objectives at once.

Rounds are paired, so that drift from round to round does not count. The error of a pair's difference is that of all
points together (the residuals of points and rounds), or its own where that is larger. With three rounds its own alone
has two degrees of freedom, too few to decide anything among twelve points; the larger of the two keeps the noise of a
point that is noisier than the others. `tests/sweeper/search/test_dominance.py` simulates how often verdicts are wrong
and how often they are reached.

A difference in an objective counts only above its resolution: a metric that is the same in every round, such as memory,
has no spread there, and would decide by its last digit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from sweeper.common.trials import TrialRecord
from sweeper.metrics.criteria import Criteria
from sweeper.metrics.intervals import Interval, student_interval
from sweeper.search.finals import FAMILY_ERROR, MIN_ROUNDS, find_exceeded, mean_of_rounds, objective_by_round

MAX_POINTS = 12  # of a front that are measured again, unless finals.top is more
MIN_POINTS = 3  # of a smaller front the next best trials are measured too: it may be small by luck
LEAST_ERROR = 1e-9  # of a mean, relative: an objective that is the same in every round differs by rounding only


@dataclass(frozen=True)
class FrontPoint:
    """A point of the front that was measured again."""

    trial: TrialRecord  # as the search measured it
    values: Mapping[str, Interval]  # the mean of each objective over the rounds, by metric
    share: float  # the confidence that no other point dominates it, of this point alone
    is_certain: bool  # no other point dominates it, for all points of the front at once
    is_dominated: bool  # one other point dominates it, for all pairs of the front at once
    is_on_front: bool  # no other point's means dominate its means
    # Numbers of the trials that neither dominate it nor are dominated, and differ significantly in no objective.
    same_as: tuple[int, ...]
    rounds: int  # how many are compared
    # The limits that the median of its rounds is beyond: then it is not on the front and not compared.
    exceeded: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether it is on the front, dominated, or uncertain; or which limit it exceeds."""
        if self.exceeded:
            return f"beyond a limit: {'; '.join(self.exceeded)}"
        return "on the front" if self.is_certain else "dominated" if self.is_dominated else "not sure"

    def to_dict(self) -> dict[str, Any]:
        return {
            "trial": self.trial.number,
            "params": dict(self.trial.params),
            "values": {name: asdict(value) for name, value in self.values.items()},
            "share": self.share,
            "is_on_front": self.is_on_front,
            "same_as": list(self.same_as),
            "rounds": self.rounds,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Front:
    """The front of several objectives, in which the best by the leading objective is first."""

    searched: Sequence[TrialRecord]  # the trials of the search that no other dominates
    certified: Sequence[FrontPoint]  # the points that were measured again; empty if none was in two rounds

    @property
    def measured_once(self) -> list[TrialRecord]:
        """The trials on the front that were not measured again."""
        measured = {point.trial.number for point in self.certified}
        return [trial for trial in self.searched if trial.number not in measured]

    @property
    def trials(self) -> list[TrialRecord]:
        """The trials on the front: of the search, corrected by what was measured again, by number."""
        certain = [point.trial for point in self.certified if point.is_on_front]
        return sorted([*self.measured_once, *certain], key=lambda trial: trial.number)

    @property
    def numbers(self) -> list[int]:
        return [trial.number for trial in self.trials]

    @property
    def leader(self) -> TrialRecord | None:
        """The best trial on the front by the leading objective, of those that were measured again if there are any."""
        certain = [point.trial for point in self.certified if point.is_on_front]
        return next(iter(certain or self.searched), None)


def measure_front(
    ranked: Sequence[TrialRecord], records: Iterable[TrialRecord], criteria: Criteria, top: int
) -> Front | None:
    """Return the front of a search, ranked with the best first; None with one objective, or without a ranked trial.

    `records` has all, among them those of the finals; `top` is `finals.top`.
    """
    if not criteria.has_front or not ranked:
        return None
    leading = criteria.objectives[0]
    points = certify(select_finalists(ranked, criteria, top), records, criteria)
    certified = sorted(points, key=lambda point: leading.loss(point.values[leading.metric].value))
    exceeding = {point.trial.number for point in certified if point.exceeded}  # what they dominated may be on the front
    return Front(criteria.front(trial for trial in ranked if trial.number not in exceeding), certified)


def measured_interval(record: TrialRecord, metric: str) -> Interval:
    """Return a metric of a single trial with its interval, NaN without one."""
    low, high = (record.metrics.get(f"{metric}_ci_{bound}", math.nan) for bound in ("low", "high"))
    return Interval(record.metrics[metric], low, high)


def select_finalists(ranked: Sequence[TrialRecord], criteria: Criteria, top: int) -> Sequence[TrialRecord]:
    """Return the `top` trials to measure again, 0 for none; with several objectives the front, evenly thinned out."""
    if not criteria.has_front or not top:
        return ranked[:top]
    front = criteria.front(ranked)
    if len(front) < MIN_POINTS:
        return ranked[:MIN_POINTS]
    size = min(len(front), max(top, MAX_POINTS))
    return [front[round(place)] for place in np.linspace(0, len(front) - 1, size)]


def certify(finalists: Sequence[TrialRecord], records: Iterable[TrialRecord], criteria: Criteria) -> list[FrontPoint]:
    """Return the points of these finalists that were measured again in at least two rounds, in their order."""
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
    ordered: set[tuple[int, int]] = set()  # of which the first dominates the second
    if len(common) >= MIN_ROUNDS and within:  # fewer certify nothing
        dominates, does_not = p_values_of_dominance(inside, resolutions)
        pairs = max(1, len(within) - 1)  # of a point with the others; one point at least is dominated by none
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
    """Return the losses and the resolution of each objective. Losses of a positive metric are logarithms."""
    losses, resolutions = np.empty_like(values), np.empty(len(criteria.objectives))
    for place, objective in enumerate(criteria.objectives):
        of_metric = values[:, place]
        is_positive = (of_metric > 0).all()
        losses[:, place] = objective.loss(1.0) * (np.log(of_metric) if is_positive else of_metric)
        resolutions[place] = objective.resolution * (1.0 if is_positive else np.abs(of_metric).max())
    return losses, resolutions


def _find_same(losses: np.ndarray, resolutions: np.ndarray, ordered: set[tuple[int, int]]) -> list[list[int]]:
    """Return for each point the others that are the same; of `ordered` pairs one dominates the other."""
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
    """Return p-values of each pair's hypotheses that the first point dominates the second, and that it does not.

    The first is refuted by one objective in which the second point is better; the second by the first point being
    better in one objective and, in each, not worse. A point and itself have 0 and 1. `losses` are those of each point,
    objective and round; `resolutions` the largest differences that do not count.
    """
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
    """Return of each pair whether the first point dominates the second one, by the means of their objectives.

    It does if it is better in an objective by more than the resolution, and in none worse by more than that. Three
    points may dominate each other in a circle where three objectives trade differences of about the resolution; where
    that leaves no point on the front every difference counts.
    """
    # One difference for both: a sum and a difference round apart, and two points might dominate each other.
    differences = means[:, None] - means[None]
    beats = (differences <= resolutions).all(axis=2) & (differences < -resolutions).any(axis=2)
    if beats.any(axis=0).all():
        beats = (differences <= 0).all(axis=2) & (differences < 0).any(axis=2)
    return beats
