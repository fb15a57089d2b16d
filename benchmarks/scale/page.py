"""The result page `results/scale.md`."""

import math
import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.scale.components import MAX_TRIALS, PROPOSALS
from benchmarks.scale.driver import WINDOW
from benchmarks.scale.rerun import SAMPLE
from benchmarks.scale.simulated_ray import GPUS_PER_NODE, TRIAL_S
from benchmarks.scale.study import ENDED_BEFORE, ROUNDS, STUDIES, TRIALS_A_ROUND
from sweeper.search.sampling import MANY_RUNNING

NODES = 1000
SHAPES = ((1, 1), (10, 1), (100, 1), (NODES, 1), (NODES, 8))  # nodes, and GPUs of a trial
PARTS = ("ask", "submit", "wait", "metrics", "tell", "state", "other")


def render_table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heading, ["---:"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def render_page(results: dict[str, Any], trials: int, recorded: int) -> str:
    """Render the results of all parts, by name, as Markdown."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("ray", "optuna", "mlflow"))
    largest = results[f"drive-{NODES}-1"]
    last, resumed = largest["rows"][-1], largest["resume"]
    part_headings = [f"{name} ms" for name in PARTS]
    sampler_rows = results["samplers"]
    proposal_ms = {name: f"{sampler_rows[-1][name]:,.1f}" for name in MAX_TRIALS if name in sampler_rows[-1]}
    sums_ms = {row["trials"]: sum(row["ms"].values()) for row in largest["rows"]}
    early = min(sums_ms, key=lambda mark: abs(mark - 10_000))
    growth = sums_ms[last["trials"]] / sums_ms[early]
    log_growth = math.log(last["trials"]) / math.log(early)
    trial_s = statistics.mean(TRIAL_S)
    trials_table = render_table(
        ["trials", *part_headings, "sum ms", "driver busy", "MiB", "journal MB"],
        [_trials_row(row) for row in largest["rows"]],
    )
    shapes_table = render_table(
        ["nodes", "GPUs a trial", "at once", "after trials", *part_headings, "sum ms", "all busy after s"],
        [_shape_row(results[f"drive-{nodes}-{gpus}"], nodes, gpus) for nodes, gpus in SHAPES],
    )
    waiting_table = render_table(
        ["pending replies", "ms"], [[f"{row['replies']:,}", f"{row['ms']:.2f}"] for row in results["waiting"]]
    )
    proposals_table = render_table(
        ["trials", *(f"{name} ms" for name in MAX_TRIALS)], [_sampler_row(row) for row in sampler_rows]
    )
    studies_table = render_table(
        ["sampler", "running", "ask ms", "tell ms", "asks and tells/s", "syncs a round"],
        [_study_row(results[f"study-{sampler}-{running}"]) for sampler, running in STUDIES],
    )
    recording_table = render_table(
        ["trials", "CPU ms a trial", "wall ms", "kB a trial", "list s", "MiB"],
        [_recording_row(row) for row in results["record"]],
    )
    rerun_table = render_table(
        ["", "CPU s of all processes", "wall s", "load", "MiB", "says that it is finished"],
        [_rerun_row(heading, results["rerun"][name]) for heading, name in (("its end", "close"), ("rerun", "rerun"))],
    )
    return f"""# The driver's cost as sweeps and clusters grow

`python -m benchmarks.scale --trials {trials} --recorded {recorded}`. Simulated: without a GPU, on one machine.

{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}.
One run. Each value is the mean over the {WINDOW:,} trials before the number at its left, in CPU time of the process,
which other work on the machine affects little. The study was on a RAM disk: waiting for a disk, once a round,
comes on top. A trial takes {TRIAL_S[0]:.0f} to {TRIAL_S[1]:.0f} s.

## Work for a trial, by number of trials: {NODES:,} nodes of {GPUS_PER_NODE} GPUs, {largest["gangs"]:,} trials at once

{trials_table}

From {early:,} trials to {last["trials"]:,} the sum grows by a factor of {growth:.2f}, and log n by {log_growth:.2f}.

`search=random`. Wait and other are of a round of the loop, divided by the trials that ended in it. MiB: the growth of
the driver's process. Resuming the sweep after {last["trials"]:,} trials takes {resumed["s"]:.0f} s and
{resumed["memory_mib"]:,.0f} MiB.

## Work for a trial, by trials at once

{shapes_table}

Wait grows with the gangs that a round examines, and is shared by the trials that end in it. All busy: when the last
worker got its first trial, without the workers' own start.

Wall time of `ray.wait` over so many pending replies (real Ray; the loop calls it twice a round):

{waiting_table}

## Proposals: CPU time of a sampler, by number of trials

{proposals_table}

Three integers in a space of 10^9 points, random values; median of {PROPOSALS} proposals, without the line on disk.

## Asks and tells, by sampler and trials that run

{studies_table}

The study with its journal, three integers as above, short records; median CPU time over {ROUNDS} rounds after
{ENDED_BEFORE:,} ended trials. In each round {TRIALS_A_ROUND} trials end and are replaced, or all where fewer run. With
more than {MANY_RUNNING} trials running TPE keeps away from the latest 500 of them.

## MLflow: the recording process, SQLite

{recording_table}

A trial is a run with its parameters, metrics, tags and `trial.json`, a file beside the database of about
{last["journal_bytes"] / 1e3:.1f} kB. Wall time includes the disk and other work on the machine. List: which trials are
recorded, a query of each resume.

## The whole command on a finished sweep of {results["rerun"]["trials"]:,} trials

{rerun_table}

A real sweep of {SAMPLE} trials of `workload=probe`, repeated under further numbers in its journal
({results["rerun"]["journal_mb"]:,.0f} MB) and in MLflow's SQLite file (`benchmarks/scale/rerun.py`). Its end draws the
plots and writes trials.csv, the parent run and the report. Run again, the command opens the study and MLflow, finds
that all is written, prints the summary, and leaves the parent run {results["rerun"]["parent"]}. Wall: until the driver
ends. Load: the mean number of processes that wanted one of the {os.cpu_count()} cores. MiB: of the largest process.

## What limits larger sweeps

- TPE is given at most 1,000 finished trials. After {sampler_rows[-1]["trials"]:,} trials a proposal takes
  {proposal_ms["tpe"]} ms, and more with more than {MANY_RUNNING} trials running, as in the table above. It takes
  {proposal_ms["qmc"]} ms with `search=qmc`, {proposal_ms["random"]} ms with `search=random`, and seconds with
  `search=gp`.
- {largest["gangs"]:,} trials of {trial_s:.0f} s end {largest["gangs"] / trial_s:.0f} times a second. The driver is fast
  enough; a process that writes to SQLite has CPU time for {1e3 / results["record"][-1]["cpu_ms"]:.0f} a second. Trials
  that are not yet recorded wait in the driver's memory, are in the study, and are recorded after the sweep has ended.
  Other stores were not measured here.
"""


def _work_columns(row: dict[str, Any]) -> list[str]:
    return [*(f"{row['ms'][name]:.2f}" for name in PARTS), f"{sum(row['ms'].values()):.2f}"]


def _trials_row(row: dict[str, Any]) -> list[str]:
    journal_mb = row["journal_bytes"] * row["trials"] / 1e6
    load = [f"{100 * (1 - row['idle']):.0f}%"]
    return [f"{row['trials']:,}", *_work_columns(row), *load, f"{row['memory_mib']:,.0f}", f"{journal_mb:,.0f}"]


def _shape_row(result: dict[str, Any], nodes: int, gpus: int) -> list[object]:
    row = next(row for row in reversed(result["rows"]) if row["trials"] <= 10_000)
    shape = [f"{nodes:,}", gpus, f"{result['gangs']:,}", f"{row['trials']:,}"]
    return [*shape, *_work_columns(row), f"{result['all_busy_s']:.1f}"]


def _sampler_row(row: dict[str, Any]) -> list[str]:
    return [f"{row['trials']:,}", *(f"{row[name]:.1f}" if name in row else "" for name in MAX_TRIALS)]


def _study_row(row: dict[str, Any]) -> list[str]:
    times = [f"{row['ask_ms']:.1f}", f"{row['tell_ms']:.1f}", f"{row['per_s']:.0f}", f"{row['syncs_a_round']:.0f}"]
    return [row["sampler"], f"{row['running']:,}", *times]


def _rerun_row(heading: str, run: dict[str, Any]) -> list[str]:
    values = [f"{run['cpu_s']:.1f}", f"{run['wall_s']:.0f}", f"{run['load']:.1f}", f"{run['memory_mib']:,.0f}"]
    return [heading, *values, "yes" if run["says_finished"] else "no"]


def _recording_row(row: dict[str, Any]) -> list[str]:
    times = [f"{row['cpu_ms']:.1f}", f"{row['wall_ms']:.1f}"]
    return [
        f"{row['trials']:,}",
        *times,
        f"{row['bytes'] / 1e3:.1f}",
        f"{row['list_s']:.2f}",
        f"{row['memory_mib']:.0f}",
    ]
