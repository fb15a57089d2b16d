"""Failures that repeat: a sweep that is broken everywhere stops early."""

from __future__ import annotations

from collections import Counter

from sweeper.common.trials import BAD, TrialRecord, TrialStatus

DESCRIPTIONS = {TrialStatus.FAILED: "failed", TrialStatus.LOST: "were lost", TrialStatus.TIMED_OUT: "timed out"}
SUCCESSES = (TrialStatus.COMPLETE, TrialStatus.PRUNED)  # a pruned trial ran


class RepeatedFailures:
    """Counts the failures of each status and reason since the last trial that ran. Infeasible trials do not count.

    Failures on one node of several do not stop a sweep: that node may be faulty, and is drained for it.
    """

    def __init__(self, limit: int | None, nodes: int = 1) -> None:
        """Start counting.

        Args:
            limit: so many failures of one kind stop the sweep; None: no number does.
            nodes: of the sweep.
        """
        self._limit = limit
        self._nodes = nodes
        self._counts: Counter[tuple[TrialStatus, str]] = Counter()
        self._places: dict[tuple[TrialStatus, str], set[str]] = {}  # the nodes on which each kind happened
        self._last: TrialRecord | None = None
        self._any_success = False

    def add(self, record: TrialRecord) -> None:
        """Count a trial that has ended."""
        if record.status in SUCCESSES:
            self._counts.clear()
            self._places.clear()
            self._last = None
            self._any_success = True
        elif record.status in BAD:
            kind = record.status, record.kind_of_reason
            self._counts[kind] += 1
            places = self._places.setdefault(kind, set())
            places.update(str(record.where.get("node_ids") or "").split())
            is_on_one_node = self._nodes > 1 and len(places) == 1
            if self._limit is not None and self._counts[kind] >= self._limit and not is_on_one_node:
                self._last = record

    @property
    def stop_reason(self) -> str:
        """Why the sweep stops; empty while it goes on. A success of a trial in flight lets it go on again."""
        if self._last is None:
            return ""
        count = self._counts[self._last.status, self._last.kind_of_reason]
        between = " with no success in between" if self._any_success else ""
        return f"{count} trials {DESCRIPTIONS[self._last.status]} for the same reason{between}: {self._last.reason}"
