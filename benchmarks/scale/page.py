"""The page of what was found: `results/scale.md`."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.scale.beside import ASKS, SAMPLERS
from benchmarks.scale.driver import WINDOW
from benchmarks.scale.stage import GPUS_OF_A_NODE, TRIAL_S

NODES = 1000
SHAPES = ((1, 1), (10, 1), (100, 1), (NODES, 1), (NODES, 8))  # nodes, and GPUs of a trial


def table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heading, ["---:"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


PARTS = ("ask", "hand out", "collect", "figures", "tell", "state", "other")


def written(found: dict[str, Any], trials: int, recorded: int) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("ray", "optuna", "mlflow"))
    one = found[f"drive-{NODES}-1"]

    def work(row: dict[str, Any]) -> list[str]:
        return [*(f"{row['ms'][name]:.2f}" for name in PARTS), f"{sum(row['ms'].values()):.2f}"]

    by_trials = []
    for r in one["rows"]:
        journal_mb = r["journal_bytes"] * r["trials"] / 1e6
        busy = [f"{r['per_s']:.0f}", f"{100 * (1 - r['idle']):.0f}%", f"{r['memory_mib']:,.0f}", f"{journal_mb:,.0f}"]
        by_trials.append([f"{r['trials']:,}", *work(r), *busy])
    by_gangs = []
    for nodes, gpus in SHAPES:
        of = found[f"drive-{nodes}-{gpus}"]
        row = next(r for r in reversed(of["rows"]) if r["trials"] <= 10_000)
        shape = [f"{nodes:,}", gpus, f"{of['gangs']:,}", f"{row['trials']:,}"]
        by_gangs.append([*shape, *work(row), f"{of['all_busy_s']:.1f}"])
    asked = [[f"{r['trials']:,}", *(f"{r[n]:.1f}" if n in r else "" for n in SAMPLERS)] for r in found["samplers"]]
    books = []
    for r in found["record"]:
        figures = [f"{r['ms']:.1f}", f"{r['wall_ms']:.1f}", f"{r['bytes'] / 1e3:.1f}", f"{r['look_s']:.2f}"]
        books.append([f"{r['trials']:,}", *figures, f"{r['memory_mib']:.0f}"])
    waits = [[f"{r['replies']:,}", f"{r['ms']:.2f}"] for r in found["waiting"]]
    last, resumed = one["rows"][-1], one["resume"]
    parts = [f"{name} ms" for name in PARTS]
    by_sampler = {name: f"{found['samplers'][-1][name]:,.1f}" for name in SAMPLERS if name in found["samplers"][-1]}
    sums = {r["trials"]: sum(r["ms"].values()) for r in one["rows"]}
    early = min(sums, key=lambda mark: abs(mark - 10_000))
    grown, log = sums[last["trials"]] / sums[early], math.log(last["trials"]) / math.log(early)
    trial_s, record_kb = statistics.mean(TRIAL_S), last["journal_bytes"] / 1e3
    ends = one["gangs"] / trial_s
    written_per_s = 1e3 / found["record"][-1]["ms"]
    return f"""# What the driver costs as sweeps and clusters grow

`python -m benchmarks.scale --trials {trials} --recorded {recorded}`. Simulated: there was no GPU, and one node.

{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}.
One run. A figure is the mean over the {WINDOW:,} trials before the number at its left, in CPU time of the process, so
that other work on the machine enters little. The study was on a RAM disk: waiting for a disk, three times a trial,
comes on top. A trial takes {TRIAL_S[0]:.0f} to {TRIAL_S[1]:.0f} s.

## A trial's work, by trials: {NODES:,} nodes of {GPUS_OF_A_NODE} GPUs, {one["gangs"]:,} trials at once

{table(["trials", *parts, "sum ms", "trials/s", "driver busy", "MiB", "journal MB"], by_trials)}

From {early:,} trials to {last["trials"]:,} the sum is {grown:.2f} times as large; log n is {log:.2f} times as large.

`search=random`. Collect and other are of a round of the loop, over what came in it. MiB: what the driver's process has
grown by. Opening the sweep again after {last["trials"]:,} trials takes {resumed["s"]:.0f} s and
{resumed["memory_mib"]:,.0f} MiB.

## By trials at once

{table(["nodes", "GPUs a trial", "at once", "after trials", *parts, "sum ms", "all busy after s"], by_gangs)}

Collect grows with the gangs that a round looks through, and is shared by the trials that came in it. All busy: when the
last worker got its first trial, the workers' own start left out.

Ray's own time for asking which of so many replies are there (real Ray, wall time; the loop asks twice a round):

{table(["replies awaited", "ms"], waits)}

## Proposals: a sampler's own time, by trials that it looks at

{table(["trials", *(f"{name} ms" for name in SAMPLERS)], asked)}

Three whole numbers in a space of 10^9 points, values at random; median of {ASKS} proposals, the line on disk left out.

## MLflow: the recording process, SQLite

{table(["trials", "CPU ms a trial", "wall ms", "kB a trial", "look s", "MiB"], books)}

A trial is a run with its parameters, metrics, tags and `trial.json`, a file beside the database of about
{record_kb:.1f} kB. Wall time has the disk in it, and other work of the machine. Look: which trials are there, asked by
a resume.

## What carries further

- Samplers are Optuna's, and most look at every trial for each proposal. After {asked[-1][0]} trials one takes
  {by_sampler["tpe"]} ms with `search=tpe`, the default, {by_sampler["qmc"]} ms with `search=qmc` and
  {by_sampler["random"]} ms with `search=random`.
- {one["gangs"]:,} trials of {trial_s:.0f} s end {ends:.0f} times a second. The driver has time for that; a process
  that writes to SQLite has CPU time for {written_per_s:.0f} a second. What is behind waits in the driver's memory, is
  in the study, and is written once the sweep has ended. Other stores were not measured here.
"""
