"""Where a sweep stands: what has ended and how, the best so far, and whether the budget is used up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.schema import Budget
from sweeper.ui.tables import best_first

FEW = 5  # trials that end alike at first: no chance any more


class SweepProgress:
    """Kept up to date trial by trial, so that looking at it costs nothing. `records` are what ended before."""

    def __init__(self, objective: str, direction: str, budget: Budget, records: Iterable[TrialRecord]) -> None:
        self._objective, self._direction, self._budget = objective, direction, budget
        self._records: list[TrialRecord] = []
        self.counts: Counter[TrialStatus] = Counter()
        self.best: TrialRecord | None = None
        self._since_best = 0
        for record in sorted(records, key=lambda record: record.elapsed_s):
            self.add(record)
        self._before_s = max((record.elapsed_s for record in self._records), default=0.0)
        self._ended_before, self._records_before = self.ended, len(self._records)
        self._started_s: float | None = None

    def start(self) -> None:
        """The search begins, or goes on."""
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds of searching, summed over all runs of this sweep."""
        return self._before_s + (time.monotonic() - self._started_s if self._started_s is not None else 0.0)

    @property
    def ended(self) -> int:
        """Trials that count towards the budget: all but cancelled ones, which are tried again."""
        return self.counts.total() - self.counts[TrialStatus.CANCELLED]

    def add(self, record: TrialRecord) -> bool:
        """A trial has ended; whether it is better than all before."""
        self._records.append(record)
        self.counts[record.status] += 1
        if record.status is TrialStatus.COMPLETE and self._objective in record.metrics and self._is_better(record):
            self.best, self._since_best = record, 0
            return True
        self._since_best += record.status is not TrialStatus.CANCELLED
        return False

    def _is_better(self, record: TrialRecord) -> bool:
        if self.best is None:
            return True
        new, old = record.metrics[self._objective], self.best.metrics[self._objective]
        return new > old if self._direction == "maximize" else new < old

    def best_first(self) -> list[TrialRecord]:
        """The complete trials, the best of them first."""
        return best_first(self._records, self._objective, self._direction)

    def wants_more(self, in_flight: int) -> bool:
        """Whether the budget has room for another trial beside those in flight."""
        trials, time_s, patience = self._budget.trials, self._budget.time_s, self._budget.patience
        return (
            (trials is None or self.ended + in_flight < trials)
            and (time_s is None or self.elapsed_s < time_s)
            and (patience is None or self._since_best < patience)
        )

    def used_up(self) -> dict[str, int | float]:
        """The limits that were reached, by their names in the budget."""
        came_to = {"trials": self.ended, "time_s": self.elapsed_s, "patience": self._since_best}
        limits = {name: getattr(self._budget, name) for name in came_to}
        return {name: limit for name, limit in limits.items() if limit is not None and came_to[name] >= limit}

    def ended_alike(self) -> str:
        """Why the trials of this run have all come to nothing, just when the first few have, and all for one kind of
        reason; else nothing."""
        if len(self._records) - self._records_before != FEW:
            return ""
        first = self._records[-FEW:]
        reasons = {"" if each.status is TrialStatus.COMPLETE else each.kind_of_reason for each in first}
        return first[-1].reason if len(reasons) == 1 else ""

    def left_s(self, trials: int | None) -> float | None:
        """A guess at the seconds left until so many trials; None while this run has none to guess from."""
        guesses = []
        done = self.ended - self._ended_before
        if trials is not None and done > 0:
            guesses.append((self.elapsed_s - self._before_s) / done * (trials - self.ended))
        if self._budget.time_s is not None:
            guesses.append(self._budget.time_s - self.elapsed_s)
        return max(0.0, min(guesses)) if guesses else None
