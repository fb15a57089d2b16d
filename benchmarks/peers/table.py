"""The trials that every tool runs: a table of durations and scores by two parameters, and a trial that sleeps.

It needs the standard library only, because each tool imports it in an environment of its own.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

A = range(10)
B = range(6)
STEPS = 20  # of a trial, each of the same duration
MEDIAN_S, SIGMA = 0.8, 0.8  # of the log-normal durations
SHORTEST_S, LONGEST_S = 0.2, 4.0
NOISE = 0.03  # standard deviation of a step's score, relative to the score
SEED, RECORDS = "PEERS_SEED", "PEERS_RECORDS"  # environment variables: the table's seed, the file of the records


@dataclass(frozen=True)
class Point:
    """How long a trial of one point takes, and its score after each step, the last of which is the result."""

    duration_s: float
    scores: tuple[float, ...]


@cache
def make_table(seed: int) -> dict[tuple[int, int], Point]:
    """Return the 60 points by their parameters. Duration and score are drawn independently of each other.

    The score is between 100 and 1000. It rises towards the result as 1 - exp(-3 step / STEPS).
    """
    rng = random.Random(seed)
    table = {}
    for a in A:
        for b in B:
            duration_s = min(LONGEST_S, max(SHORTEST_S, rng.lognormvariate(math.log(MEDIAN_S), SIGMA)))
            result = rng.uniform(100, 1000)
            rise = [(1 - math.exp(-3 * step / STEPS)) / (1 - math.exp(-3)) for step in range(1, STEPS)]
            table[a, b] = Point(duration_s, (*(result * share * rng.gauss(1, NOISE) for share in rise), result))
    return table


def run_trial(a: int, b: int, report: Callable[[float], None] | None = None) -> float:
    """Sleep through the steps of one trial, record them, give the score of each to `report`, and return the last."""
    point = make_table(int(os.environ[SEED]))[int(a), int(b)]
    identity = f"{os.getpid()}-{time.monotonic_ns()}"
    _record(identity, a, b, "start")
    for score in point.scores:
        time.sleep(point.duration_s / STEPS)
        _record(identity, a, b, "step")
        if report:
            report(score)
    return point.scores[-1]


def _record(identity: str, a: int, b: int, event: str) -> None:
    """Append one line to the file of the records; so short a write to a local file is not mixed with another's."""
    line = json.dumps({"trial": identity, "a": int(a), "b": int(b), "event": event, "at_s": time.time()})
    with open(os.environ[RECORDS], "a") as records:
        records.write(line + "\n")
