"""Calibrate one efficiency for each pair of trainer and device, from published runs."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from benchmarks.planner_rows import PublishedRun
from workloads.estimator import operations, placed_job, step
from workloads.estimator.step import estimate_job
from workloads.layouts.trainers import nearest_efficiency

Pair = tuple[str, str]
# An efficiency is shrunk toward 1, the value given by kernel rates alone, as if one more run had shown it. Otherwise, a
# pair with a single row would repeat that row and show no error.
PRIOR_RUNS = 1

# The constants that were chosen after seeing published runs, and their values without those runs.
NEUTRAL = (
    (operations, "EAGER_FACTOR", 1),  # single kernels move the bytes of fused ones
    (operations, "ROUTING_S", 0),  # routing does not wait for the host
    (operations, "LAUNCHES_S", 0),  # experts do not wait for launches
    (placed_job, "HOST_GB_S", 600),  # the full data sheet rate of two sockets with DDR5
    (step, "STALL_S_PER_GIB", 0),  # too little memory costs no time
    (step, "STEP_OVERHEAD_S", 0),  # launches are hidden
    (step, "IDLE_POWER_SHARE", 0),  # a waiting GPU draws as much power as a computing GPU
)


@contextmanager
def neutral_constants(*names: str) -> Iterator[None]:
    """Estimate with these constants neutral, by default all, until the block ends. Cached block times are cleared at
    both changes."""
    patches = [patch.object(module, name, value) for module, name, value in NEUTRAL if name in (names or (name,))]
    for each in patches:
        each.start()
    operations._BLOCK_SECONDS.clear()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
        operations._BLOCK_SECONDS.clear()


def calibrate(runs: Iterable[PublishedRun]) -> dict[Pair, float]:
    """Return the efficiency of each pair that has runs with a step time."""
    return {pair: _fit(members) for pair, members in sorted(_pairs(runs).items())}


def _pairs(runs: Iterable[PublishedRun]) -> dict[Pair, list[PublishedRun]]:
    pairs: dict[Pair, list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.step_s is not None:
            pairs[run.pair].append(run)
    return pairs


def _fit(runs: Sequence[PublishedRun]) -> float:
    """Return the efficiency with the least squared error of log step times, by the Gauss-Newton method."""
    logarithm = 0.0
    for _ in range(3):
        errors = [_error(run, logarithm) for run in runs]
        slopes = [(_error(run, logarithm + 0.01) - error) / 0.01 for run, error in zip(runs, errors, strict=True)]
        gradient = sum(slope * error for slope, error in zip(slopes, errors, strict=True)) + PRIOR_RUNS * logarithm
        logarithm -= gradient / (sum(slope**2 for slope in slopes) + PRIOR_RUNS)
    return round(math.exp(logarithm), 3)


def _error(run: PublishedRun, logarithm: float) -> float:
    """Return the logarithm of predicted over measured time, given the logarithm of an efficiency."""
    return math.log(step_s(run, math.exp(logarithm)) / (run.step_s or 1))


def step_s(run: PublishedRun, efficiency: float) -> float:
    return estimate_job(run.job, run.cluster, efficiency).step.total_s


def efficiencies_without(source: str, runs: Sequence[PublishedRun], table: dict[Pair, float]) -> dict[Pair, float]:
    """Return the efficiencies fitted to all other sources; `table` has the efficiencies from all sources."""
    remaining, changed = dict(table), {run.pair for run in runs if run.source == source}
    for pair in changed:
        remaining.pop(pair, None)
    return remaining | calibrate(run for run in runs if run.source != source and run.pair in changed)


def efficiency_of(run: PublishedRun, table: dict[Pair, float]) -> float:
    """Return the efficiency of a run's pair, or of the nearest pair in the table."""
    return nearest_efficiency(*run.pair, table)
