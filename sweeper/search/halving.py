"""Asynchronous successive halving (ASHA, Li et al. 2020, "A system for massively parallel hyperparameter tuning")."""

from __future__ import annotations

import math

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

REPORTING_STATES = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)


class SuccessiveHalving(optuna.pruners.BasePruner):
    """Ends a trial at a rung unless it is among the best there; rungs are at steps that grow by a factor.

    The rule is that of Ray Tune's ASHAScheduler and of Optuna's SuccessiveHalvingPruner: of the trials that have
    reached a rung, the best one in `factor` goes on, and nobody waits for others. Optuna's keeps what trials had at a
    rung in attributes that a resumed sweep does not have; here it follows from their steps alone.

    Args:
        first: the step of the first rung.
        factor: from one rung to the next, and the number of trials of which one goes on.
    """

    def __init__(self, first: int, factor: int) -> None:
        self._first, self._factor = first, factor

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether the trial ends at the rung that its last step has reached."""
        if trial.last_step is None or (rung := self._rung_of(trial.last_step)) is None:
            return False
        value = trial.intermediate_values[trial.last_step]
        if math.isnan(value):
            return True
        if _step_at(trial, rung) != trial.last_step:  # it was judged there before
            return False
        trials = study.get_trials(deepcopy=False, states=REPORTING_STATES)
        values = [value_at for other in trials if (value_at := _value_at(other, rung)) is not None]
        values.sort(reverse=study.direction is StudyDirection.MAXIMIZE)
        worst_kept = values[max(1, len(values) // self._factor) - 1]
        return value < worst_kept if study.direction is StudyDirection.MAXIMIZE else value > worst_kept

    def _rung_of(self, step: int) -> int | None:
        """Return the highest rung up to this step; None below the first one."""
        if step < self._first:
            return None
        rung = self._first
        while rung * self._factor <= step:
            rung *= self._factor
        return rung


def _step_at(trial: FrozenTrial, rung: int) -> int | None:
    """Return the first step of a trial from the rung on."""
    return min((step for step in trial.intermediate_values if step >= rung), default=None)


def _value_at(trial: FrozenTrial, rung: int) -> float | None:
    """Return what a trial had when it reached the rung; None if it did not, or had no number."""
    step = _step_at(trial, rung)
    value = math.nan if step is None else trial.intermediate_values[step]
    return None if math.isnan(value) else value
