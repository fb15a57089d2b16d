"""Simulated cases of nodes that fail at random, what a failure costs in them by formulas, and the tables of both.

What the tables mean stands on the page alone, `results/node_faults.md`.
"""

import math
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version

from benchmarks.scale.failing_nodes import DETECTION_S, SPREAD, START_S, Failures
from benchmarks.scale.page import render_table
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


def render_tables(results: list[dict[str, float]]) -> str:
    """Render the results of CASES as the tables of `results/node_faults.md`."""
    cases = list(zip(CASES, results, strict=True))
    costs = "GPUs a trial, gangs, spare nodes, times the rate, hours, failures, trials ended, run again GPU h, "
    costs += "formula, idle GPU h, formula, lost, drained"
    names = [f"{name}, trials of {m} min" for m in TRIAL_MINUTES for name in ("run again GPU h", "idle GPU h", "share")]
    driver = "GPUs a trial, trials, CPU ms a trial, ms of an idle round, core busy, ms a change of nodes, longest ms, "
    driver += "MiB a trial, journal kB a trial, a day: GiB, journal GB"
    parts = {
        "What a failure costs, simulated and by formula": render_table(
            costs.split(", "), [_cost_row(case, result) for case, result in cases]
        ),
        "A day at the report's rate, by formula": render_table(
            ["GPUs a trial", *names], [_day_row(case) for case in CASES]
        ),
        "The driver": render_table(driver.split(", "), [_driver_row(case, result) for case, result in cases]),
    }
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ray {version('ray')}."
    return "\n\n".join([machine, *(text for title, table in parts.items() for text in (f"## {title}", table))])


def _cost_row(case: Case, result: dict[str, float]) -> list[object]:
    measured, expected = measure(case, result), expect(case.gpus, case.trial_s, case.failures)
    spare = NODES % (case.gpus // GPUS_PER_NODE)
    counts = [case.gpus, f"{result['gangs']:,}", spare, f"{case.factor:g}", f"{case.hours:g}"]
    counts += [result["failures"], result["interrupted"]]
    costs = [measured.rerun_gpu_h, expected.rerun_gpu_h, measured.idle_gpu_h, expected.idle_gpu_h]
    return [*counts, *(f"{cost:.2f}" for cost in costs), result["lost"], result["drained"]]


def _day_row(case: Case) -> list[str]:
    cells = [f"{case.gpus}"]
    gpus = NODES * GPUS_PER_NODE
    for minutes in TRIAL_MINUTES:
        failures = Failures(FAILURES_PER_GPU_DAY * GPUS_PER_NODE / DAY_S, REPAIR_S)
        cost = expect(case.gpus, 60 * minutes, failures)
        day = [gpus * FAILURES_PER_GPU_DAY * part for part in (cost.rerun_gpu_h, cost.idle_gpu_h)]
        cells += [*(f"{part:,.0f}" for part in day), f"{100 * sum(day) / (24 * gpus):.2f}%"]
    return cells


def _driver_row(case: Case, result: dict[str, float]) -> list[object]:
    trials_d = result["gangs"] * DAY_S / case.trial_s
    times = [f"{result['trial_ms']:.0f}", f"{result['round_ms']:.1f}", f"{100 * result['busy']:.1f}%"]
    times += [f"{result['change_ms']:.0f}", f"{result['longest_ms']:.0f}"]
    sizes = [f"{result['trial_mib']:.2f}", f"{result['journal_kb']:.0f}"]
    sizes += [f"{result['trial_mib'] * trials_d / 1024:.1f}", f"{result['journal_kb'] * trials_d / 1e6:.1f}"]
    return [case.gpus, f"{result['trials']:,}", *times, *sizes]
