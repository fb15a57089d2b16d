"""How good the best of a search is, with Optuna's TPE and with the sampler for many trials at once."""

from __future__ import annotations

import heapq
import math
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.scale.simulated_ray import TRIAL_S
from sweeper.metrics.intervals import student_interval

SEARCHES = ((64, 600, 6), (1000, 2500, 3))  # trials that run at a time, trials, and seeds
OPTUNAS, ARRAYS = 10**9, 0  # the sampler of all proposals: trials up to which Optuna's proposes
CHOICES = 8
PEAKS = 3
NOISE = 0.01  # standard deviation of a measurement, relative


class Surface:
    """A surface with three peaks of different heights over three integers, and a choice; its maximum is 1.

    Peaks are narrower in some directions than in others. Sizes that are no multiple of 256 lose a tenth, as matrix
    products do that do not fill their tiles.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._heights = [1.0, 0.9, 0.8][:PEAKS]
        self._centers = [[rng.uniform(0.1, 0.9) for _ in "mnk"] for _ in range(PEAKS)]
        self._widths = [[rng.uniform(0.05, 0.3) for _ in "mnk"] for _ in range(PEAKS)]
        self._best_choices = [rng.randrange(CHOICES) for _ in range(PEAKS)]

    def value(self, params: Mapping[str, Any]) -> float:
        position = [params[name] / 65536 for name in "mnk"]
        alignment = math.prod(1.0 if params[name] % 256 == 0 else 0.9 for name in "mnk")
        peaks = []
        for height, center, width, choice in zip(
            self._heights, self._centers, self._widths, self._best_choices, strict=True
        ):
            distance = sum(((x - c) / w) ** 2 for x, c, w in zip(position, center, width, strict=True))
            peaks.append(height * (0.7 if params["choice"] != choice else 1.0) / (1 + distance))
        return alignment * max(peaks)


def measure_search(seed: int, running: int, trials: int, many_running: int) -> dict[str, float]:
    """Run a search of so many trials, of which `running` run at a time. Return the best value and the CPU time.

    Args:
        many_running: Optuna's TPE proposes while so many run at most.
    """
    from optuna.distributions import CategoricalDistribution, IntDistribution
    from optuna.trial import TrialState

    from sweeper.metrics.criteria import Criteria
    from sweeper.search import sampling
    from sweeper.search.sampling import NO_PRUNER

    sampling.MANY_RUNNING = many_running
    distributions: Any = {name: IntDistribution(64, 65472, step=64) for name in "mnk"}
    distributions["choice"] = CategoricalDistribution(list(range(CHOICES)))
    surface, rng = Surface(seed), random.Random(seed)
    study = sampling.SamplingStudy("tpe", NO_PRUNER, Criteria.of({"score": "maximize"}), distributions)
    in_flight: list[tuple[float, int, float]] = []
    now_s = best = ask_s = 0.0
    for number in range(trials):
        if len(in_flight) == running:
            now_s, ended, value = heapq.heappop(in_flight)
            measured = value * rng.gauss(1.0, NOISE)
            study.finish(ended, sampling.Ending(TrialState.COMPLETE, (measured,)))
            best = max(best, value)
        started_s = time.process_time()
        proposal = study.ask(study.make_sampler(seed, number))
        ask_s += time.process_time() - started_s
        study.accept(number, proposal)
        heapq.heappush(in_flight, (now_s + rng.uniform(*TRIAL_S), number, surface.value(proposal.params)))
    return {"best": max(best, *(value for _, _, value in in_flight)), "ask_ms": 1e3 * ask_s / trials}


def compare_searches(running: int) -> dict[str, Any]:
    """Return what searches find with both samplers and the same seeds, and the interval of the difference."""
    (trials, seeds) = next((trials, seeds) for number, trials, seeds in SEARCHES if number == running)
    runs = [
        [measure_search(seed, running, trials, many_running) for many_running in (OPTUNAS, ARRAYS)]
        for seed in range(seeds)
    ]
    differences = [arrays["best"] - optunas["best"] for optunas, arrays in runs]
    difference = student_interval(np.array(differences))
    return {
        "running": running,
        "trials": trials,
        "seeds": seeds,
        "optuna": statistics.fmean(optunas["best"] for optunas, _ in runs),
        "arrays": statistics.fmean(arrays["best"] for _, arrays in runs),
        "optuna_ask_ms": statistics.fmean(optunas["ask_ms"] for optunas, _ in runs),
        "arrays_ask_ms": statistics.fmean(arrays["ask_ms"] for _, arrays in runs),
        "low": difference.low,
        "high": difference.high,
    }
