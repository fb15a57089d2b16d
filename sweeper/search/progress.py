"""The progress of a sweep: how trials have ended, the best so far, and what is left of the budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from sweeper.common.trials import TrialRecord, TrialStatus, rank_trials
from sweeper.config.schema import Budget

EARLY_TRIALS = 5  # a failure that so many trials share at first is not a coincidence


class SweepProgress:
    """The trials that have ended, summarized as they end so that reading the summary costs nothing.

    Attributes:
        counts: how many trials have ended with each status.
        best: the best complete trial; None before the first.
    """

    def __init__(self, objective: str, direction: str, budget: Budget, records: Iterable[TrialRecord]) -> None:
        """Start from the records of earlier runs of the sweep.

        Args:
            objective: the metric that is optimized.
            direction: maximize or minimize.
            budget: when the search ends.
            records: trials of the search that ended in earlier runs.
        """
        self._objective = objective
        self._direction = direction
        self._budget = budget
        self._records: list[TrialRecord] = []
        self.counts: Counter[TrialStatus] = Counter()
        self.best: TrialRecord | None = None
        self._trials_since_best = 0
        for record in sorted(records, key=lambda record: record.elapsed_s):
            self.add(record)
        self._earlier_elapsed_s = max((record.elapsed_s for record in self._records), default=0.0)
        self._earlier_finished = self.finished_trials
        self._earlier_records = len(self._records)
        self._started_s: float | None = None

    def start(self) -> None:
        """Start the clock of this run."""
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds of searching, summed over all runs of this sweep."""
        this_run_s = time.monotonic() - self._started_s if self._started_s is not None else 0.0
        return self._earlier_elapsed_s + this_run_s

    @property
    def finished_trials(self) -> int:
        """The number of trials that count towards the budget: all but cancelled ones, which are tried again."""
        return self.counts.total() - self.counts[TrialStatus.CANCELLED]

    def add(self, record: TrialRecord) -> bool:
        """Add a trial that has ended. Return whether it is better than all before."""
        self._records.append(record)
        self.counts[record.status] += 1
        if record.status is TrialStatus.COMPLETE and self._objective in record.metrics and self._is_better(record):
            self.best = record
            self._trials_since_best = 0
            return True
        self._trials_since_best += record.status is not TrialStatus.CANCELLED
        return False

    def _is_better(self, record: TrialRecord) -> bool:
        if self.best is None:
            return True
        new, old = record.metrics[self._objective], self.best.metrics[self._objective]
        return new > old if self._direction == "maximize" else new < old

    def ranked_trials(self) -> list[TrialRecord]:
        """Return the complete trials, the best first."""
        return rank_trials(self._records, self._objective, self._direction)

    def has_budget_for_more(self, in_flight: int) -> bool:
        """Return whether the budget allows another trial beside those in flight."""
        trials, time_s, patience = self._budget.trials, self._budget.time_s, self._budget.patience
        return (
            (trials is None or self.finished_trials + in_flight < trials)
            and (time_s is None or self.elapsed_s < time_s)
            and (patience is None or self._trials_since_best < patience)
        )

    def exhausted_limits(self) -> dict[str, int | float]:
        """Return the limits that were reached, by their names in the budget."""
        used = {"trials": self.finished_trials, "time_s": self.elapsed_s, "patience": self._trials_since_best}
        limits = {name: getattr(self._budget, name) for name in used}
        return {name: limit for name, limit in limits.items() if limit is not None and used[name] >= limit}

    def common_failure_reason(self) -> str:
        """Return the reason of the last trial if the first `EARLY_TRIALS` of this run all ended for one kind of reason.

        Empty otherwise, and empty again after the next trial, so that it is reported once.
        """
        if len(self._records) - self._earlier_records != EARLY_TRIALS:
            return ""
        early = self._records[-EARLY_TRIALS:]
        kinds = {"" if record.status is TrialStatus.COMPLETE else record.kind_of_reason for record in early}
        return early[-1].reason if len(kinds) == 1 else ""

    def estimated_remaining_s(self, trials: int | None) -> float | None:
        """Return the estimated seconds until so many trials have ended, or None before there is anything to go by."""
        estimates_s = []
        finished = self.finished_trials - self._earlier_finished
        if trials is not None and finished > 0:
            seconds_per_trial = (self.elapsed_s - self._earlier_elapsed_s) / finished
            estimates_s.append(seconds_per_trial * (trials - self.finished_trials))
        if self._budget.time_s is not None:
            estimates_s.append(self._budget.time_s - self.elapsed_s)
        return max(0.0, min(estimates_s)) if estimates_s else None
