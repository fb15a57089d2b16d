"""Trials that run again on request, and what has changed since their earlier attempts.

The earlier attempt stays in the journal. It is replaced once the retry has ended in any way but cancelled: from then on
no count, ranking or sampler sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import optuna

from sweeper.common.trials import Remeasurement, Retry, TrialRecord, TrialStatus
from sweeper.config.space import Parameters, point_key
from sweeper.search.journal import StoredTrial, describe_differences

RUNS = "runs"  # the study's attribute with the states of the runs, each with the number of its first trial


def retry_of(trial: StoredTrial) -> Retry | None:
    """Return which trial a trial of the journal runs again, if any."""
    return Retry.from_dict(attr) if (attr := trial.user_attrs.get("retry")) else None


def replaced_numbers(records: Iterable[TrialRecord | None]) -> set[int]:
    """Return the trials that a later one of these records has replaced."""
    return {record.retry.trial for record in records if record and record.retry and replaces(record)}


def replaces(record: TrialRecord) -> bool:
    """Return whether a retry with this record replaces the earlier attempt."""
    return record.status is not TrialStatus.CANCELLED


class RunStates:
    """The states of a study's runs: versions, git state and settings that may change from one to the next."""

    def __init__(self, study: optuna.Study, first_trial: int, state: Mapping[str, Any]) -> None:
        """Store the state of this run in the study on disk, unless it is the one of the last run.

        `first_trial` is the number of the first trial that this run may create.
        """
        self._state = dict(state)
        self._earlier: list[dict[str, Any]] = list(study.user_attrs.get(RUNS, []))
        if not self._earlier or self._earlier[-1]["state"] != self._state:
            study.set_user_attr(RUNS, [*self._earlier, {"first_trial": first_trial, "state": self._state}])

    def changes_since(self, trial: int) -> tuple[str, ...]:
        """Return a phrase for each value that differs from the run that created this trial."""
        states = [run["state"] for run in self._earlier if run["first_trial"] <= trial]
        return tuple(describe_differences(states[-1], self._state)) if states else ()


class RetryQueue:
    """The trials of earlier runs that this run tries again: those that ended with one of `statuses`.

    Attributes:
        numbers: the numbers of these trials.
        points: those of their points that have no new trial yet.
    """

    def __init__(self, statuses: Collection[TrialStatus]) -> None:
        self._statuses = statuses
        self._marks: dict[str | Remeasurement, Retry] = {}  # by the key of the point, or by the round of the finals
        self.numbers: set[int] = set()
        self.points: list[Parameters] = []

    @property
    def marks(self) -> list[Retry]:
        return list(self._marks.values())

    def selects(self, record: TrialRecord) -> bool:
        """Return whether this run tries such a trial again. Node comparisons are not."""
        is_comparison = record.remeasurement is not None and not record.remeasurement.group
        return record.status in self._statuses and not is_comparison

    def fill(
        self, records: Iterable[TrialRecord], changes_since: Callable[[int], tuple[str, ...]], allowed: set[str] | None
    ) -> None:
        """Queue the selected trials, unless an earlier run created their retry and did not finish it.

        `records` are of trials that no retry has replaced, `allowed` the keys of points that may be tried; None: all.
        """
        for record in records:
            if not self.selects(record) or record.number in self.numbers:
                continue
            key = record.remeasurement or point_key(record.params)
            if not (isinstance(key, Remeasurement) or allowed is None or key in allowed):
                continue
            self._marks[key] = Retry(record.number, changes_since(record.number))
            self.numbers.add(record.number)
            if not record.remeasurement:
                self.points.append(dict(record.params))

    def mark_of(self, key: str | Remeasurement) -> Retry | None:
        """Return the mark of a new trial of this point or round, if it is a retry."""
        return self._marks.get(key)
