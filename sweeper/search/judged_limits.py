"""The limits of a sweep, judged by its finals: the median of a finalist's rounds instead of the search's one trial.

A single measurement near a limit keeps it by luck as often as not. No single round decides the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from sweeper.common.trials import TrialRecord
from sweeper.metrics.criteria import Criteria
from sweeper.search.finals import objective_by_round

MIN_ROUNDS = 2  # as few as a finalist's result needs


def find_exceeded(
    finalists: Sequence[TrialRecord], records: Iterable[TrialRecord], criteria: Criteria
) -> dict[int, tuple[str, ...]]:
    """Return of each finalist, by its number, the limits that the median of its rounds is beyond, as text.

    Args:
        finalists: the trials that were measured again, as the search measured them.
        records: all records, among them those of the finals.
        criteria: with the limits.
    """
    records = list(records)
    exceeded: dict[int, tuple[str, ...]] = {finalist.number: () for finalist in finalists}
    for limit in criteria.limits:
        for number, rounds in objective_by_round(finalists, records, limit.metric).items():
            if len(rounds) < MIN_ROUNDS:
                continue
            median = statistics.median(rounds.values())
            if limit.excess({limit.metric: median}) > 0:
                exceeded[number] += (f"{limit.metric} {median:.6g}, not {limit.sign} {limit.bound:g}",)
    return exceeded
