"""The best trials measured again beside each other, and what can be said of them then.

The best of many noisy figures is too high: it was chosen for its luck. So the finalists run again, in a fresh worker,
in turns, several rounds; what drifts from round to round (heat, clocks, neighbours) then falls on all of them. Each
finalist's figure is the geometric mean of its rounds with Student's 95% interval (all of it of the logarithms, so that
the ratio of two figures is the mean of their ratios), and two of them are told apart by their paired differences, round
by round. Where that interval holds zero, they are tied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus


@dataclass(frozen=True)
class Interval:
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class FinalistResult:
    """One finalist. `behind`: by which fraction its figure is worse than the leader's; zero for the leader itself."""

    trial: TrialRecord
    figure: Interval
    behind: Interval
    rounds: int

    @property
    def tied(self) -> bool:
        """Whether it cannot be told from the leader."""
        return self.behind.low <= 0

    def plain(self) -> dict[str, Any]:
        """For programs."""
        return {
            "trial": self.trial.number,
            "params": dict(self.trial.params),
            "figure": asdict(self.figure),
            "behind": asdict(self.behind),
            "rounds": self.rounds,
        }


def still_wanted(
    best_first: Sequence[TrialRecord], top: int, rounds: int, records: Iterable[TrialRecord]
) -> list[tuple[TrialRecord, Remeasurement]]:
    """What is to be measured again, in order: every finalist once a round, each round beginning with another one.

    Nothing where there was nothing to choose from.
    """
    finalists = best_first[:top] if len(best_first) > 1 else []
    among = tuple(sorted(record.number for record in finalists))
    done = {
        (record.remeasurement.trial, record.remeasurement.round)
        for record in records
        if record.remeasurement and record.remeasurement.group == among and record.status is not TrialStatus.CANCELLED
    }
    turns = [
        (finalists[(place + turn) % len(finalists)], turn) for turn in range(rounds) for place in range(len(finalists))
    ]
    return [
        (record, Remeasurement(record.number, turn, among))
        for record, turn in turns
        if (record.number, turn) not in done
    ]


def finalist_results(
    best_first: Sequence[TrialRecord], top: int, records: Iterable[TrialRecord], objective: str, direction: str
) -> list[FinalistResult]:
    """The finalists, the best first, from the rounds that all of them completed. Empty with fewer than two rounds."""
    finalists = {record.number: record for record in best_first[:top]}
    if not finalists:
        return []
    among = tuple(sorted(finalists))
    figures: dict[int, dict[int, float]] = {number: {} for number in finalists}
    for record in records:
        remeasurement = record.remeasurement
        if (
            remeasurement
            and remeasurement.group == among
            and record.status is TrialStatus.COMPLETE
            and objective in record.metrics
        ):
            figures[remeasurement.trial][remeasurement.round] = record.metrics[objective]
    measured = {number: rounds for number, rounds in figures.items() if len(rounds) > 1}
    common = sorted(set.intersection(*map(set, measured.values()))) if measured else []
    if len(common) < 2:
        return []
    by_trial = {number: np.array([rounds[turn] for turn in common]) for number, rounds in measured.items()}
    sign = 1 if direction == "maximize" else -1
    order = sorted(by_trial, key=lambda number: -sign * _figure(by_trial[number]).value)
    leader = by_trial[order[0]]
    return [
        FinalistResult(
            finalists[number],
            _figure(by_trial[number]),
            _behind(leader, by_trial[number], sign) if number != order[0] else Interval(0.0, 0.0, 0.0),
            len(common),
        )
        for number in order
    ]


def _behind(leader: np.ndarray, other: np.ndarray, sign: int) -> Interval:
    if not ((leader > 0).all() and (other > 0).all()):
        return Interval(math.nan, -math.inf, math.inf)  # of figures around zero there is no ratio
    ratio = _mean(sign * np.log(leader / other))
    return Interval(*(-math.expm1(-x) for x in (ratio.value, ratio.low, ratio.high)))


def _figure(rounds: np.ndarray) -> Interval:
    """The geometric mean with its interval; of figures around zero the arithmetic one."""
    if not (rounds > 0).all():
        return _mean(rounds)
    logarithms = _mean(np.log(rounds))
    return Interval(*(math.exp(x) for x in (logarithms.value, logarithms.low, logarithms.high)))


def _mean(values: np.ndarray) -> Interval:
    """The mean and Student's 95% interval of it."""
    from scipy.stats import t  # a second to import, at the end of a sweep only

    mean = float(values.mean())
    half = float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)
