"""Rounds at the end of a search, and of the finals, that measure disturbed trials again: how many, and for how long."""

from collections.abc import Sequence

from sweeper.common.trials import TrialRecord

MOST_ROUNDS = 3
HELPED = 0.75  # at most this share of a round's trials is still disturbed; else a third round does not help either
SHORT_S = 60.0  # the rounds of a shorter search may take this long, those of another one as long as it took


class RoundsAgain:
    def __init__(self) -> None:
        self.count, self._first_s, self._measured = 0, 0.0, 0

    def choose(self, disturbed: Sequence[TrialRecord], elapsed_s: float, gangs: int) -> list[TrialRecord]:
        """Return which trials the next round measures. `elapsed_s`: of the search and its rounds so far."""
        has_helped = self.count < MOST_ROUNDS - 1 or len(disturbed) <= HELPED * self._measured
        if not self.count:
            self._first_s = elapsed_s
        left_s = gangs * (max(SHORT_S, self._first_s) - (elapsed_s - self._first_s))
        chosen = list[TrialRecord]()
        for record in disturbed if has_helped else ():
            if (spent_s := record.ended_at_s - record.started_at_s) <= left_s:
                chosen.append(record)
                left_s -= spent_s
        self.count, self._measured = self.count + 1, len(chosen)
        return chosen
