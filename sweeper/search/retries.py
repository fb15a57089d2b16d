"""Trials that run again on request, and what has changed since their earlier attempts.

The earlier attempt stays in the journal. It is replaced once the retry has ended in any way but cancelled: from then on
no count, ranking or sampler sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from sweeper.common.trials import Retry, TrialRecord, TrialStatus
from sweeper.search.identity import describe_differences

RUNS = "runs"  # the study's attribute with the states of the runs, each with the number of its first trial


def retry_of(trial: FrozenTrial) -> Retry | None:
    """Return which trial a trial of the journal runs again, if any."""
    return Retry.from_dict(attr) if (attr := trial.user_attrs.get("retry")) else None


def replaced_numbers(trials: Iterable[FrozenTrial]) -> set[int]:
    """Return the trials of the journal that a later one has replaced."""
    return {
        retry.trial
        for trial in trials
        if (retry := retry_of(trial)) and (text := trial.user_attrs.get("record")) and replaces(text)
    }


def replaces(record: TrialRecord | str) -> bool:
    """Return whether a retry with this record replaces the earlier attempt."""
    status = (TrialRecord.from_json(record) if isinstance(record, str) else record).status
    return status is not TrialStatus.CANCELLED


class RunStates:
    """The states of a study's runs: versions, git state and settings that may change from one to the next."""

    def __init__(self, study: optuna.Study, first_trial: int, state: Mapping[str, Any]) -> None:
        """Store the state of this run, unless it is the one of the last run.

        Args:
            study: the study on disk.
            first_trial: the number of the first trial that this run may ask for.
            state: plain values by name.
        """
        self._state = dict(state)
        self._earlier: list[dict[str, Any]] = list(study.user_attrs.get(RUNS, []))
        if not self._earlier or self._earlier[-1]["state"] != self._state:
            study.set_user_attr(RUNS, [*self._earlier, {"first_trial": first_trial, "state": self._state}])

    def changes_since(self, trial: int) -> tuple[str, ...]:
        """Return a phrase for each value that differs from the run that asked for this trial."""
        states = [run["state"] for run in self._earlier if run["first_trial"] <= trial]
        return tuple(describe_differences(states[-1], self._state)) if states else ()
