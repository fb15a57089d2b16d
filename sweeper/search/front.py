"""The front of several objectives, measured again: how sure it is that each of its points belongs to it.

The points of the front are measured again, interleaved, as those of one objective are (`finals.py`). A point's share
is the part of draws of the rounds' means in which no other point is at least as good in all objectives and better in
one (`share_points`). A point is dominated if the same other point dominates it so often that a point of the front is
called dominated in at most 5% of fronts, however many points there are (Bonferroni). Two points cannot be told apart
if no objective differs between them: the difference is within the objective's resolution, or Student's interval of the
paired differences contains zero, for all pairs and objectives at once (Bonferroni).

The means of the rounds are drawn again: each draw adds the rounds' deviations from their mean with normal weights, the
same ones for all points and objectives, so that drift from round to round does not count, and widens them as Student's
distribution does (a multiplier bootstrap, Liu 1988; the weights are such that every difference of two points follows
Student's distribution around the measured one). Rounds drawn with replacement are too narrow: of five rounds of equal
points all favour the same one in 6% of cases, of three in 25%, and every such draw agrees.

A difference in an objective counts only above its resolution: a metric that is the same in every round, such as memory,
has no spread there, and would decide by its last digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from sweeper.common.trials import TrialRecord
from sweeper.metrics.criteria import Criteria
from sweeper.metrics.intervals import Interval, student_interval
from sweeper.search.finals import FAMILY_ERROR, find_exceeded, mean_of_rounds, objective_by_round

MAX_POINTS = 12  # of a front that are measured again, unless finals.top is more
MIN_POINTS = 3  # of a smaller front the next best trials are measured too: it may be small by luck
SURE = 0.95  # the share from which a point is on the front
SAMPLES = 2000  # a share of 95% is known to within 1%


@dataclass(frozen=True)
class FrontPoint:
    """A point of the front that was measured again."""

    trial: TrialRecord  # as the search measured it
    values: Mapping[str, Interval]  # the mean of each objective over the rounds, by metric
    share: float  # of the draws in which no other point dominates it
    is_dominated: bool  # one other point dominates it for sure
    is_on_front: bool  # no other point's means dominate its means
    # Numbers of the trials that cannot be told apart from it in any objective, none dominating the other for sure.
    same_as: tuple[int, ...]
    rounds: int  # how many are compared
    # The limits that the median of its rounds is beyond: then it is not on the front and not compared.
    exceeded: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether it is on the front, dominated, or neither is sure; or which limit it is beyond."""
        if self.exceeded:
            return f"beyond a limit: {'; '.join(self.exceeded)}"
        return "on the front" if self.share >= SURE else "dominated" if self.is_dominated else "not sure"

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
    values = np.array([[[rounds[p.number][n] for n in sorted(common)] for rounds in by_metric] for p in measured])
    losses, resolutions = _to_losses(values, criteria)
    exceeded = find_exceeded(measured, records, criteria)
    within = [n for n, point in enumerate(measured) if not exceeded[point.number]]
    undominated, beaten = share_points(losses[within], resolutions) if within else (np.empty(0), np.empty((0, 0)))
    nominal = find_dominated(losses[within].mean(axis=2, keepdims=True), resolutions) if within else np.empty((0, 0, 1))
    front = {n for place, n in enumerate(within) if not nominal[:, place, 0].any()}
    sure = 1 - FAMILY_ERROR / max(1, len(within) - 1)
    ordered = {(within[one], within[other]) for one, other in zip(*np.nonzero(beaten >= sure), strict=True)}
    dominated, shares = {other for _, other in ordered}, dict(zip(within, undominated.tolist(), strict=True))
    same = _find_same(losses, resolutions, ordered)
    return [
        FrontPoint(
            trial=point,
            values={metric: mean_of_rounds(values[n, k]) for k, metric in enumerate(criteria.metrics)},
            share=shares.get(n, 0.0),
            is_dominated=n in dominated,
            is_on_front=n in front,
            same_as=tuple(measured[other].number for other in same[n]),
            rounds=len(common),
            exceeded=exceeded[point.number],
        )
        for n, point in enumerate(measured)
    ]


def _to_losses(values: np.ndarray, criteria: Criteria) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses and the resolution of each objective.

    Of a metric that is positive the losses are logarithms, so that their mean is the geometric one.
    """
    losses, resolutions = np.empty_like(values), np.empty(len(criteria.objectives))
    for place, objective in enumerate(criteria.objectives):
        of_metric = values[:, place]
        is_positive = (of_metric > 0).all()
        losses[:, place] = objective.loss(1.0) * (np.log(of_metric) if is_positive else of_metric)
        resolutions[place] = objective.resolution * (1.0 if is_positive else np.abs(of_metric).max())
    return losses, resolutions


def _find_same(losses: np.ndarray, resolutions: np.ndarray, ordered: set[tuple[int, int]]) -> list[list[int]]:
    """Return of each point the others that cannot be told apart from it; of `ordered` pairs one dominates the other."""
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


def share_points(losses: np.ndarray, resolutions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each point's share of draws in which no other dominates it, and each pair's in which the first does.

    `losses` are of each point, objective and round, the lower the better; `resolutions` are of each objective, the
    largest difference that does not count.
    """
    beats = find_dominated(draw_means(losses), resolutions)
    return 1.0 - beats.any(axis=0).mean(axis=1), beats.mean(axis=2)


def draw_means(losses: np.ndarray) -> np.ndarray:
    """Return draws of the means: of each point, objective and draw. The same result in every run."""
    rounds, generator = losses.shape[2], np.random.default_rng(0)
    means = losses.mean(axis=2, keepdims=True)
    weights = generator.standard_normal((rounds, SAMPLES))
    weights /= np.sqrt(rounds * generator.chisquare(rounds - 1, SAMPLES))  # variance of a mean, and Student's factor
    return means + (losses - means) @ weights


def find_dominated(means: np.ndarray, resolutions: np.ndarray) -> np.ndarray:
    """Return whether the first point dominates the second one: of each pair of points and each draw.

    It does if it is better in an objective by more than the resolution, and in none worse by more than that. Three
    points may dominate each other in a circle where three objectives trade differences of about the resolution; in a
    draw that leaves no point on the front every difference counts.
    """

    def compare_all(means: np.ndarray, resolution: np.ndarray) -> np.ndarray:
        # One difference for both: a sum and a difference round apart, and two points might dominate each other.
        differences = (mean - means for mean in means)
        return np.stack([(d <= resolution).all(axis=1) & (d < -resolution).any(axis=1) for d in differences])

    beats = compare_all(means, resolutions[:, None])
    is_circle = beats.any(axis=0).all(axis=0)
    if is_circle.any():
        beats[:, :, is_circle] = compare_all(means[:, :, is_circle], np.zeros(()))
    return beats
