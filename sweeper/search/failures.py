"""Failures that repeat: a sweep that is broken everywhere stops early."""

from __future__ import annotations

from collections import Counter

from sweeper.common.trials import BAD, TrialRecord, TrialStatus

DESCRIPTIONS = {TrialStatus.FAILED: "failed", TrialStatus.LOST: "were lost", TrialStatus.TIMED_OUT: "timed out"}
SUCCESSES = (TrialStatus.COMPLETE, TrialStatus.PRUNED)  # a pruned trial ran


class RepeatedFailures:
    """Counts the failures of each status and reason since the last trial that ran. Infeasible trials do not count.

    Attributes:
        limit: so many failures of one kind stop the sweep; None: no number does.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._counts: Counter[tuple[TrialStatus, str]] = Counter()
        self._last: TrialRecord | None = None
        self._any_success = False

    def add(self, record: TrialRecord) -> None:
        """Count a trial that has ended."""
        if record.status in SUCCESSES:
            self._counts.clear()
            self._last = None
            self._any_success = True
        elif record.status in BAD:
            kind = record.status, record.kind_of_reason
            self._counts[kind] += 1
            if self.limit is not None and self._counts[kind] >= self.limit:
                self._last = record

    @property
    def stop_reason(self) -> str:
        """Why the sweep stops; empty while it goes on. A success of a trial in flight lets it go on again."""
        if self._last is None:
            return ""
        count = self._counts[self._last.status, self._last.kind_of_reason]
        between = " with no success in between" if self._any_success else ""
        return f"{count} trials {DESCRIPTIONS[self._last.status]} for the same reason{between}: {self._last.reason}"
