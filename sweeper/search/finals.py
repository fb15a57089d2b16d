"""The finals: the best trials are remeasured, interleaved, and compared.

The best of many noisy measurements is too high, because it was chosen for its luck. The finalists therefore run again
in a fresh worker, interleaved, for several rounds, so that drift from round to round (heat, clocks, neighbors) affects
all of them. The value of a finalist is the geometric mean of its rounds with Student's 95% interval. Both are computed
from logarithms, so that the ratio of two values is the mean of their ratios. Two finalists are compared by their paired
differences, round by round. They are tied if the interval of the difference contains zero. Any of them may lead by
chance, so the intervals hold for all pairs of finalists at once (Bonferroni): at most 5% of finals of equally fast
finalists find a difference. Each pair has its own spread, so a noisy finalist widens only its own intervals.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sweeper.common.format import DOUBTFUL
from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.metrics.criteria import Criteria
from sweeper.metrics.intervals import Interval, student_interval
from workloads.api.contract import Workload

DEFAULT_FINALISTS = Workload.finalists
MIN_ROUNDS = 3  # needed for an interval: with two rounds Student's extends nine standard deviations to both sides
MAX_ROUND_RATIO = 1.5  # of the fastest to the slowest round: 1.3 on a CPU that other processes kept busy
FAMILY_ERROR = 0.05  # the share of finals of equally fast finalists that may find a difference


@dataclass(frozen=True)
class FinalistResult:
    """The result of one finalist in the finals; `trial` is its measurement in the search."""

    trial: TrialRecord
    value: Interval  # the mean of the objective over its rounds
    behind: Interval  # the fraction by which it is worse than the leader (zero for the leader), for all pairs at once
    rounds: int  # how many are compared
    exceeded: tuple[str, ...] = ()  # the limits that the median of its rounds exceeds; with any of them it cannot win
    round_ratio: float = 1.0  # of its largest to its smallest round

    @property
    def tied(self) -> bool:
        """Whether it keeps the limits and its difference from the leader is not significant."""
        return self.behind.low <= 0 and not self.exceeded

    def to_dict(self) -> dict[str, Any]:
        return {
            "trial": self.trial.number,
            "params": dict(self.trial.params),
            "value": asdict(self.value),
            "behind": asdict(self.behind),
            "rounds": self.rounds,
            **({"exceeded": list(self.exceeded)} if self.exceeded else {}),
        }


def pending_remeasurements(
    finalists: Sequence[TrialRecord], rounds: int, records: Iterable[TrialRecord]
) -> list[tuple[TrialRecord, Remeasurement]]:
    """Return the trials to remeasure, in order: every finalist once per round.

    Each round starts with the next finalist. `finalists` has the best first; `records` includes those of the finals.
    """
    group = tuple(sorted(finalist.number for finalist in finalists))
    measured = {
        (record.remeasurement.trial, record.remeasurement.round)
        for record in records
        if record.remeasurement and record.remeasurement.group == group and record.status is not TrialStatus.CANCELLED
    }
    return [
        (finalist, Remeasurement(finalist.number, number, group))
        for number in range(rounds)
        for turn in range(len(finalists))
        for finalist in [finalists[(turn + number) % len(finalists)]]
        if (finalist.number, number) not in measured
    ]


def finalist_results(
    ranked: Sequence[TrialRecord],
    top: int,
    records: Iterable[TrialRecord],
    objective: str,
    direction: str,
    exceeded: Mapping[int, tuple[str, ...]] | None = None,
) -> list[FinalistResult]:
    """Return the finalists' results, best first, from the rounds that all of them completed.

    A finalist with fewer than two complete rounds is omitted. The result is empty if fewer than two rounds are common
    to all. Finalists with `exceeded` limits, by number, come after the others. `ranked` has the complete trials of the
    search, best first; `records` has all records, including those of the finals.
    """
    finalists = {record.number: record for record in ranked[:top]}
    if not finalists:
        return []
    by_round = objective_by_round(ranked[:top], records, objective)
    measured = {number: rounds for number, rounds in by_round.items() if len(rounds) > 1}
    common = sorted(set.intersection(*map(set, measured.values()))) if measured else []
    if len(common) < 2:
        return []
    values = {number: np.array([rounds[n] for n in common]) for number, rounds in measured.items()}
    beyond = {number: limits for number, limits in (exceeded or {}).items() if limits}
    compared = compare_rounds(values, 1 if direction == "maximize" else -1, beyond)
    ratios = {number: float(rounds.max()) / (float(rounds.min()) or math.inf) for number, rounds in values.items()}
    return [
        FinalistResult(finalists[number], value, behind, len(common), beyond.get(number, ()), ratios[number])
        for number, (value, behind) in compared.items()
    ]


def compare_rounds(
    rounds: Mapping[int, np.ndarray], sign: int, last: Collection[int] = ()
) -> dict[int, tuple[Interval, Interval]]:
    """Return each finalist's value and the fraction by which it is behind the first, best first.

    `rounds` has each finalist's objective in the rounds that all of them completed. `sign` is 1 if higher is better,
    else -1. Finalists in `last` come after all others, whatever their values.
    """
    values = {number: mean_of_rounds(of_rounds) for number, of_rounds in rounds.items()}
    order = sorted(values, key=lambda number: (number in last, -sign * values[number].value))
    level = 1 - FAMILY_ERROR / max(1, math.comb(len(order), 2))
    leader = rounds[order[0]]
    behind = {order[0]: Interval(0.0, 0.0, 0.0)}
    for number in order[1:]:
        if (leader > 0).all() and (rounds[number] > 0).all():
            ratio = student_interval(sign * np.log(leader / rounds[number]), level)
            behind[number] = Interval(*(-math.expm1(-x) for x in ratio.bounds))
        else:
            behind[number] = Interval(math.nan, -math.inf, math.inf)  # values around zero have no ratio
    return {number: (values[number], behind[number]) for number in order}


def objective_by_round(
    finalists: Sequence[TrialRecord], records: Iterable[TrialRecord], objective: str
) -> dict[int, dict[int, float]]:
    """Return the objective of each complete round of each finalist, by the finalist's number and the round."""
    group = tuple(sorted(finalist.number for finalist in finalists))
    values: dict[int, dict[int, float]] = {finalist.number: {} for finalist in finalists}
    for record in records:
        round_of = record.remeasurement
        is_complete = record.status is TrialStatus.COMPLETE and objective in record.metrics
        if is_complete and round_of and round_of.group == group:
            values[round_of.trial][round_of.round] = record.metrics[objective]
    return values


def mean_of_rounds(rounds: np.ndarray) -> Interval:
    """Return the mean of rounds, geometric if all are positive, with an interval if there are `MIN_ROUNDS` or more."""
    is_positive = bool((rounds > 0).all())
    interval = student_interval(np.log(rounds) if is_positive else rounds)
    bounds = interval.bounds if len(rounds) >= MIN_ROUNDS else (interval.value,)
    return Interval(*(math.exp(x) if is_positive else x for x in bounds))


def lack_of_rounds(rounds: int) -> str:
    """Return why values of this many rounds have no interval; empty if they have one."""
    return f"; too few for an interval, which takes finals.rounds={MIN_ROUNDS}" if rounds < MIN_ROUNDS else ""


def describe_disturbed(finalists: Sequence[FinalistResult]) -> str:
    """Return the finalists whose rounds differ by more than noise explains, and what to do; empty if there is none."""
    disturbed = [finalist for finalist in finalists if finalist.round_ratio > MAX_ROUND_RATIO]
    ratios = ", ".join(f"trial {finalist.trial.number} {finalist.round_ratio:.1f} times" for finalist in disturbed)
    advice = "more than noise: was the machine used by another process? A new name= measures again"
    return f"{DOUBTFUL}the rounds of a trial differ, {ratios}, {advice}" if disturbed else ""


def find_exceeded(
    finalists: Sequence[TrialRecord], records: Iterable[TrialRecord], criteria: Criteria
) -> dict[int, tuple[str, ...]]:
    """Return the limits that the median of each finalist's rounds exceeds, as text by the finalist's number.

    A single measurement near a limit is within it about half of the time, and no single round decides the median.
    """
    records = list(records)
    exceeded: dict[int, tuple[str, ...]] = {finalist.number: () for finalist in finalists}
    for limit in criteria.limits:
        for number, rounds in objective_by_round(finalists, records, limit.metric).items():
            median = statistics.median(rounds.values()) if len(rounds) > 1 else math.nan
            if limit.excess({limit.metric: median}) > 0:
                exceeded[number] += (f"{limit.metric} {median:.6g}, not {limit.sign} {limit.bound:g}",)
    return exceeded
