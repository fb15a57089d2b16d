"""Simulated cases of nodes that fail at random, and what a failure costs in them by formulas."""

import math
from dataclasses import dataclass

from benchmarks.scale.failing_nodes import DETECTION_S, SPREAD, START_S, Failures
from benchmarks.scale.simulated_ray import GPUS_PER_NODE

NODES = 1000
DAY_S = 86_400.0
# "The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.3.4: 419 unexpected of 466 interruptions in 54 days on
# 16,384 GPUs.
FAILURES_PER_GPU_DAY = 419 / (54 * 16_384)
REPAIR_S = 4 * 3600.0  # assumed
WARM_UP_S = 600.0  # not counted
TRIAL_MINUTES = (10, 60)  # of the table for a day
POLL_S = 10.0  # NodeMonitor.POLL_INTERVAL_S
GRACE_S = 3.0  # gang.ROOT_CAUSE_GRACE_S


@dataclass(frozen=True)
class Case:
    """One simulation."""

    gpus: int  # of a gang
    trial_s: float  # the mean duration of a trial
    factor: float  # failures are so much more frequent than in the report, and repairs faster
    hours: float  # simulated, after WARM_UP_S

    @property
    def failures(self) -> Failures:
        return Failures(self.factor * FAILURES_PER_GPU_DAY * GPUS_PER_NODE / DAY_S, REPAIR_S / self.factor)


CASES = (Case(8, 600, 200, 1), Case(64, 600, 100, 4), Case(256, 600, 50, 8), Case(512, 600, 40, 12))


@dataclass(frozen=True)
class Cost:
    """What a failure costs on average."""

    rerun_gpu_h: float  # of trials that it ended, up to then
    idle_gpu_h: float  # by which the GPUs that run trials fall short of all gangs that fit without failures


def expect(gpus: int, trial_s: float, failures: Failures) -> Cost:
    """Return what a failure costs by formulas, for gangs of so many GPUs.

    A trial has run for E[T²] / 2 E[T] when a failure meets it (length-biased sampling). The number of nodes that are
    down has Poisson's distribution, since they fail and are repaired independently; the others make as many gangs as
    they can. A gang that loses a node takes a spare one, or waits for the repair, which is part of the nodes down.
    """
    size = gpus // GPUS_PER_NODE
    repair_s = DETECTION_S + failures.repair_s * math.exp(-DETECTION_S / failures.repair_s)  # mean of the longer one
    rate_s = NODES * failures.per_node_s
    mean_down = rate_s * repair_s
    chances = [math.exp(-mean_down)]
    while sum(chances) < 1 - 1e-9:
        chances.append(chances[-1] * mean_down / len(chances))
    gangs = sum(chance * ((NODES - down) // size) for down, chance in enumerate(chances))
    busy_share = gangs * size / (NODES - mean_down)  # of the nodes that are up
    spare = sum(chance * ((NODES - down) % size > 0) for down, chance in enumerate(chances))
    start_s = START_S + spare * (DETECTION_S + GRACE_S) + (1 - spare) * POLL_S / 2
    since_start_s = trial_s * (1 + SPREAD**2 / 3) / 2
    missing_gpu_s = gpus * (NODES // size - gangs) / rate_s
    return Cost(
        rerun_gpu_h=busy_share * gpus * since_start_s / 3600,
        idle_gpu_h=(missing_gpu_s + busy_share * gpus * start_s) / 3600,
    )


def measure(case: Case, result: dict[str, float]) -> Cost:
    """Return what a failure cost in a simulation."""
    full_s = result["gangs"] * case.gpus * 3600 * case.hours
    failures_h = 3600 * result["failures"]
    return Cost(result["rerun_s"] / failures_h, (full_s - result["busy_s"]) / failures_h)
