"""The result page `results/node_faults.md`."""

import os
import platform
from importlib.metadata import version

from benchmarks.scale.failing_nodes import DETECTION_S, START_S, Failures
from benchmarks.scale.node_fault_costs import (
    CASES,
    DAY_S,
    FAILURES_PER_GPU_DAY,
    NODES,
    REPAIR_S,
    TRIAL_MINUTES,
    Case,
    expect,
    measure,
)
from benchmarks.scale.page import render_table
from benchmarks.scale.simulated_ray import GPUS_PER_NODE


def render_page(results: list[dict[str, float]]) -> str:
    """Render the results of CASES as Markdown."""
    cases = list(zip(CASES, results, strict=True))
    rate_d = NODES * GPUS_PER_NODE * FAILURES_PER_GPU_DAY
    costs_table = render_table(
        [
            "GPUs a trial",
            "gangs",
            "spare nodes",
            "times the rate",
            "hours",
            "failures",
            "trials ended",
            "run again GPU h",
            "formula",
            "idle GPU h",
            "formula",
            "lost",
            "drained",
        ],
        [_cost_row(case, result) for case, result in cases],
    )
    days_table = render_table(
        [
            "GPUs a trial",
            *(
                f"{name}, trials of {minutes} min"
                for minutes in TRIAL_MINUTES
                for name in ("run again GPU h", "idle GPU h", "share")
            ),
        ],
        [_day_row(case) for case in CASES],
    )
    driver_table = render_table(
        [
            "GPUs a trial",
            "trials",
            "CPU ms a trial",
            "ms of an idle round",
            "core busy",
            "ms a change of nodes",
            "longest ms",
            "MiB a trial",
            "journal kB a trial",
            "a day: GiB",
            "journal GB",
        ],
        [_driver_row(case, result) for case, result in cases],
    )
    return f"""# The driver while nodes fail

`python -m benchmarks.scale.node_faults`. Simulated: without a GPU, on one machine.

{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ray {version("ray")}. One run, CPU
times of the process, on a machine with other work. The driver's loop, study, gangs and node monitor are the real ones,
over a simulated Ray of {NODES:,} nodes of {GPUS_PER_NODE} GPUs (`benchmarks/scale/failing_nodes.py`). The report on the
training of Llama 3 has 419 unexpected interruptions in 54 days on 16,384 GPUs: {rate_d:.1f} a day on
{NODES * GPUS_PER_NODE:,}. Each is taken to be the loss of a node, at a time that is exponential for each node.

Assumed: Ray notices after {DETECTION_S:.0f} s, a node is back after {REPAIR_S / 3600:.0f} h on average (exponential),
the workers of a gang start in {START_S:.0f} s, trials take {CASES[0].trial_s / 60:.0f} minutes, give or take a sixth.
Not simulated: the time that Ray itself takes for thousands of actors, several nodes that fail together (a switch, a
rack), and failures of the driver's node or of the head.

## What a failure costs, simulated and by formula

{costs_table}

Failures are more frequent than in the report, by the factor in the table, and repairs faster by the same factor, so as
many nodes are down on average. Run again: the work of trials that a failure ended; over n failures the mean has a
standard error of about 58% / √n. Idle: by how much the GPUs that run trials fall short of all gangs that fit, on the
failed node and on the others of its gang. Lost: trials that ended as `lost`, after three attempts. Drained: nodes that
the driver took to be faulty by mistake; their gang is idle from then on. At the report's rate three failures within one
trial of an hour on 512 GPUs have a chance of one in a million.

## A day at the report's rate, by formula

{days_table}

Share: of the {24 * NODES * GPUS_PER_NODE:,} GPU hours of a day.

## The driver

{driver_table}

An idle round of the loop is one in which nothing ends; there are four a second. Core busy: the share of one core that
the driver takes. Change of nodes: reading the nodes and taking those that are lost or back into account; longest: of
one such step. MiB: by which the driver's process grows with each trial. The last two columns are for the trials of a
day.

## What would need another design

- The driver keeps the measurement of every rank of every trial in memory, and the journal has them too: gigabytes for
  the trials of a day, whatever the size of a trial. A sweep of weeks on all nodes needs them in files of their own.
- A trial begins anew. That costs most with long trials on many GPUs, and less only with checkpoints within a trial,
  which a workload would have to write.
- All gangs of a sweep have one size. Where they take all nodes, the rest of a gang waits until a failed node is
  repaired, and no smaller trial uses it.
- A worker that is gone counts against its own node. An error that a rank reports counts against all nodes of its gang,
  since the driver does not tell which one was at fault. Healthy nodes drained here:
  {sum(result["drained"] for result in results)}.
- The driver and the head run on one node each. One of the two is lost every {NODES / rate_d / 2:.0f} days on average.
  Then the sweep ends, and the same command resumes it on a cluster that has a head.
"""


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
