"""Calibrated efficiencies: one for each pair of trainer and device, from published runs."""

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
# An efficiency is drawn towards 1, what the kernels' rates alone give, as if one more run had shown that: a pair with a
# single row would otherwise repeat that row and show no error.
PRIOR_RUNS = 1

# The constants that were chosen with published runs in sight, and what each would be without them.
NEUTRAL = (
    (operations, "EAGER_FACTOR", 1),  # single kernels move the bytes of fused ones
    (operations, "ROUTING_S", 0),  # routing does not wait for the host
    (operations, "LAUNCHES_S", 0),  # nor do experts for launches
    (placed_job, "HOST_GB_S", 600),  # the data sheets of two sockets with DDR5, all of it
    (step, "STEP_OVERHEAD_S", 0),  # launches are hidden
    (step, "IDLE_POWER_SHARE", 0),  # a GPU that waits draws as much as one that computes
)


@contextmanager
def neutral_constants() -> Iterator[None]:
    """Estimate with neutral constants, and keep no block's seconds over the change."""
    patches = [patch.object(module, name, value) for module, name, value in NEUTRAL]
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
    """Return the efficiency with the least squared error of the step times' logarithms, by Gauss and Newton."""
    logarithm = 0.0
    for _ in range(3):
        errors = [_error(run, logarithm) for run in runs]
        slopes = [(_error(run, logarithm + 0.01) - error) / 0.01 for run, error in zip(runs, errors, strict=True)]
        gradient = sum(slope * error for slope, error in zip(slopes, errors, strict=True)) + PRIOR_RUNS * logarithm
        logarithm -= gradient / (sum(slope**2 for slope in slopes) + PRIOR_RUNS)
    return round(math.exp(logarithm), 3)


def _error(run: PublishedRun, logarithm: float) -> float:
    """Return the logarithm of predicted over measured time, with the logarithm of an efficiency."""
    return math.log(step_s(run, math.exp(logarithm)) / (run.step_s or 1))


def step_s(run: PublishedRun, efficiency: float) -> float:
    return estimate_job(run.job, run.cluster, efficiency).step.total_s


def efficiencies_without(source: str, runs: Sequence[PublishedRun], table: dict[Pair, float]) -> dict[Pair, float]:
    """Return the efficiencies that all other sources give; `table` is that of all sources."""
    remaining, changed = dict(table), {run.pair for run in runs if run.source == source}
    for pair in changed:
        remaining.pop(pair, None)
    return remaining | calibrate(run for run in runs if run.source != source and run.pair in changed)


def efficiency_of(run: PublishedRun, table: dict[Pair, float]) -> float:
    """Return the efficiency of a run's pair, or of the nearest pair that the table has."""
    return nearest_efficiency(*run.pair, table)
