"""The finals: remeasure the best trials, interleaved, and compare them.

The best of many noisy measurements owes its place partly to luck, so its value is too high. The finalists therefore run
again in a fresh worker for several rounds. Each round measures every finalist once, so drift between rounds (heat,
clocks, neighbors) affects all finalists. A finalist's value is the geometric mean over rounds. The mean and its 95%
Student's t interval are computed from logarithms, so the ratio of two values equals the mean ratio. Finalists are
compared in pairs, round by round, and are tied if the interval of the difference contains zero. Any finalist may lead
by chance, so the intervals hold for all pairs at once (Bonferroni): if all finalists are equally fast, at most 5% of
finals find a difference. Each pair has its own spread, so a noisy finalist widens only its own intervals.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sweeper.common.format import DOUBTFUL
from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.metrics.criteria import Criteria
from sweeper.metrics.intervals import Interval, student_interval
from workloads.api.contract import Workload

DEFAULT_FINALISTS = Workload.finalists
MIN_ROUNDS = 3  # for an interval; with two rounds, Student's t extends nine standard deviations to each side
MAX_ROUND_RATIO = 1.5  # largest to smallest round; a CPU kept busy by other processes reached 1.3
FAMILY_ERROR = 0.05  # the share of finals that may find a difference between equally fast finalists


@dataclass(frozen=True)
class FinalistResult:
    """The result of one finalist in the finals. `trial` is the measurement from the search."""

    trial: TrialRecord
    value: Interval  # the mean of the objective over the rounds
    behind: Interval  # the gap to the leader, as a fraction (zero for the leader); holds for all pairs at once
    rounds: int  # the number of rounds that are compared
    exceeded: tuple[str, ...] = ()  # limits that the median over the rounds exceeds; any of them prevents a win
    round_ratio: float = 1.0  # the largest round divided by the smallest

    @property
    def tied(self) -> bool:
        """Whether the finalist is within the limits and does not differ significantly from the leader."""
        return self.behind.low <= 0 and not self.exceeded


def pending_remeasurements(
    finalists: Sequence[TrialRecord], rounds: int, records: Iterable[TrialRecord]
) -> list[tuple[TrialRecord, Remeasurement]]:
    """Return the trials to remeasure, in order: every finalist once per round. Each round starts with a different
    finalist. `finalists` is sorted, best first. `records` includes the finals."""
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
    ranked: Sequence[TrialRecord], top: int, records: Iterable[TrialRecord], criteria: Criteria
) -> list[FinalistResult]:
    """Return the finalists' results, best first, from the rounds that all finalists completed.

    Finalists with fewer than two complete rounds are left out. The result is empty if the rest have fewer than two
    rounds in common. Finalists beyond a limit come last. `ranked` lists the complete trials of the search, best first.
    `records` includes the finals.
    """
    records = list(records)
    finalists = {record.number: record for record in ranked[:top]}
    if not finalists:
        return []
    by_round = objective_by_round(ranked[:top], records, criteria.objective)
    measured = {number: rounds for number, rounds in by_round.items() if len(rounds) > 1}
    common = sorted(set.intersection(*map(set, measured.values()))) if measured else []
    if len(common) < 2:
        return []
    values = {number: np.array([rounds[n] for n in common]) for number, rounds in measured.items()}
    exceeded = find_exceeded(ranked[:top], records, criteria)
    beyond = [number for number, limits in exceeded.items() if limits]
    compared = compare_rounds(values, 1 if criteria.direction == "maximize" else -1, beyond)
    ratios = {number: float(rounds.max()) / (float(rounds.min()) or math.inf) for number, rounds in values.items()}
    return [
        FinalistResult(finalists[number], value, behind, len(common), exceeded[number], ratios[number])
        for number, (value, behind) in compared.items()
    ]


def compare_rounds(
    rounds: Mapping[int, np.ndarray], sign: int, last: Collection[int] = ()
) -> dict[int, tuple[Interval, Interval]]:
    """Return each finalist's value and the fraction by which the finalist is behind the leader, best first.

    `rounds` contains each finalist's objective in the rounds that all finalists completed. `sign` is 1 if higher is
    better, else -1. Finalists in `last` come after all others, whatever their values.
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
            # Values of zero or below have no ratio, so the difference is divided by the leader's size.
            difference = student_interval(sign * (leader - rounds[number]), level)
            behind[number] = difference.scaled(1 / (abs(values[order[0]].value) or 1.0))
    return {number: (values[number], behind[number]) for number in order}


def objective_by_round(
    finalists: Sequence[TrialRecord], records: Iterable[TrialRecord], objective: str
) -> dict[int, dict[int, float]]:
    """Return the objective in each complete round, by the finalist's trial number and by round."""
    group = tuple(sorted(finalist.number for finalist in finalists))
    values: dict[int, dict[int, float]] = {finalist.number: {} for finalist in finalists}
    for record in records:
        round_of = record.remeasurement
        is_complete = record.status is TrialStatus.COMPLETE and objective in record.metrics
        if is_complete and round_of and round_of.group == group:
            values[round_of.trial][round_of.round] = record.metrics[objective]
    return values


def mean_of_rounds(rounds: np.ndarray) -> Interval:
    """Return the mean over rounds (geometric if all are positive), with an interval for `MIN_ROUNDS` or more rounds."""
    is_positive = bool((rounds > 0).all())
    interval = student_interval(np.log(rounds) if is_positive else rounds)
    bounds = interval.bounds if len(rounds) >= MIN_ROUNDS else (interval.value,)
    return Interval(*(math.exp(x) if is_positive else x for x in bounds))


def lack_of_rounds(rounds: int) -> str:
    """Return why this many rounds give no interval, or an empty string if they give one."""
    return f"; too few for an interval, which takes finals.rounds={MIN_ROUNDS}" if rounds < MIN_ROUNDS else ""


def describe_disturbed(finalists: Sequence[FinalistResult]) -> str:
    """Describe finalists whose rounds differ by more than noise, with advice, or return "" if there are none."""
    disturbed = [finalist for finalist in finalists if finalist.round_ratio > MAX_ROUND_RATIO]
    ratios = ", ".join(f"trial {finalist.trial.number} {finalist.round_ratio:.1f} times" for finalist in disturbed)
    advice = "more than noise: was the machine used by another process? A new name= measures again"
    return f"{DOUBTFUL}the rounds of a trial differ, {ratios}, {advice}" if disturbed else ""


def find_exceeded(
    finalists: Sequence[TrialRecord], records: Iterable[TrialRecord], criteria: Criteria
) -> dict[int, tuple[str, ...]]:
    """Return, by trial number, the limits (as text) that the median over a finalist's rounds exceeds. A single
    measurement near a limit is within the limit about half of the time. No single round determines the median."""
    records = list(records)
    exceeded: dict[int, tuple[str, ...]] = {finalist.number: () for finalist in finalists}
    for limit in criteria.limits:
        for number, rounds in objective_by_round(finalists, records, limit.metric).items():
            median = statistics.median(rounds.values()) if len(rounds) > 1 else math.nan
            if limit.excess({limit.metric: median}) > 0:
                exceeded[number] += (f"{limit.metric} {median:.6g}, not {limit.sign} {limit.bound:g}",)
    return exceeded
