"""Which gang takes a trial: one with the trial's environment variables, the least loaded of them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from sweeper.execution.gang import TRIALS_PER_GANG, Environment, Gang


class GangsByLoad:
    """Heaps of the gangs that can take a trial, one heap for each environment.

    An entry has the gang's load when it was pushed. Entries whose load has changed are skipped: searching thousands of
    gangs takes longer than all other work of the driver for a trial.
    """

    def __init__(self) -> None:
        self._heaps: dict[Environment, list[tuple[int, int, Gang]]] = {}
        self._pushes = 0

    def push(self, gang: Gang) -> None:
        """Add a gang with its present load, unless it is full."""
        if len(gang.trials) < TRIALS_PER_GANG:
            self._pushes += 1
            heapq.heappush(self._heaps.setdefault(gang.environment, []), (len(gang.trials), self._pushes, gang))

    def pop(self, environment: Environment) -> Gang | None:
        """Return the gang of this environment that reaches a new trial first, or None if all are full."""
        heap = self._heaps.get(environment, [])
        while heap:
            load, _, gang = heapq.heappop(heap)
            if gang.accepts_trials and not gang.killed and load == len(gang.trials):
                return gang
        return None


def find_unserved(waiting: Sequence[Environment], gangs: Sequence[Gang], trials_per_gang: int) -> list[Environment]:
    """Return for each gang that has to be started the environment it needs, in the order of the waiting trials.

    Args:
        waiting: the environment of each waiting trial.
        gangs: those that are starting take waiting trials, too.
        trials_per_gang: how many of them each takes.
    """
    starting = [gang.environment for gang in gangs if not gang.ready and not gang.draining]
    places = Counter({environment: trials_per_gang * count for environment, count in Counter(starting).items()})
    unserved = []
    for environment in waiting:
        if not places[environment]:
            unserved.append(environment)
            places[environment] += trials_per_gang
        places[environment] -= 1
    return unserved


def choose_retiring(environment: Environment, gangs: Sequence[Gang]) -> Gang | None:
    """Return the gang with the fewest trials that makes room for one with this environment; None if there is none."""
    others = [gang for gang in gangs if gang.accepts_trials and gang.environment != environment]
    return min(others, key=lambda gang: len(gang.trials), default=None)
