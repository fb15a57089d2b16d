"""The idle share that a schedule alone causes, without any time to start or to record a trial."""

import heapq
import random
import statistics
from collections.abc import Callable, Sequence

from benchmarks.peers.table import make_table

Schedule = Callable[[Sequence[float], int], float]


def batch_length_s(durations_s: Sequence[float], workers: int) -> float:
    """Return how long trials take in batches, each of which starts when the one before has ended."""
    return sum(max(durations_s[first : first + workers]) for first in range(0, len(durations_s), workers))


def queue_length_s(durations_s: Sequence[float], workers: int) -> float:
    """Return how long trials take if each worker starts the next one as soon as it is free."""
    free_at_s = [0.0] * workers
    for duration_s in durations_s:
        heapq.heapreplace(free_at_s, free_at_s[0] + duration_s)
    return max(free_at_s)


def scheduled_idle_share(schedule: Schedule, seed: int, workers: int, orders: int = 200) -> float:
    """Return the median idle share of a schedule over random orders of one table's trials."""
    durations_s = [point.duration_s for point in make_table(seed).values()]
    rng = random.Random(seed)
    shuffled = [rng.sample(durations_s, len(durations_s)) for _ in range(orders)]
    return statistics.median(1 - sum(durations_s) / (workers * schedule(order, workers)) for order in shuffled)
