"""The tables of `results/scale.md`. What they mean stands on the page alone."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.scale.components import MAX_TRIALS
from benchmarks.scale.simulated_ray import GPUS_PER_NODE
from benchmarks.scale.study import STUDIES

NODES = 1000
SHAPES = ((1, 1), (10, 1), (100, 1), (NODES, 1), (NODES, 8))  # nodes, and GPUs of a trial
PARTS = ("ask", "submit", "wait", "metrics", "tell", "state", "other")


def render_table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heading, ["---:"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def render_tables(results: dict[str, Any]) -> str:
    """Render the results of all parts, by name, as the tables of `results/scale.md`."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("ray", "optuna", "mlflow"))
    largest, part_headings = results[f"drive-{NODES}-1"], [f"{name} ms" for name in PARTS]
    rerun, resumed = results["rerun"], largest["resume"]
    parts = {
        f"Work for a trial, by number of trials: {NODES:,} nodes of {GPUS_PER_NODE} GPUs": render_table(
            ["trials", *part_headings, "sum ms", "driver busy", "MiB", "journal MB"],
            [_trials_row(row) for row in largest["rows"]],
        ),
        f"Resumed: {resumed['s']:.0f} s and {resumed['memory_mib']:,.0f} MiB. By trials at once": render_table(
            ["nodes", "GPUs a trial", "at once", "after trials", *part_headings, "sum ms", "all busy after s"],
            [_shape_row(results[f"drive-{nodes}-{gpus}"], nodes, gpus) for nodes, gpus in SHAPES],
        ),
        "Wall time of `ray.wait`": render_table(
            ["pending replies", "ms"], [[f"{row['replies']:,}", f"{row['ms']:.2f}"] for row in results["waiting"]]
        ),
        "Proposals: CPU time of a sampler, by number of trials": render_table(
            ["trials", *(f"{name} ms" for name in MAX_TRIALS)], [_sampler_row(row) for row in results["samplers"]]
        ),
        "Asks and tells, by sampler and trials that run": render_table(
            ["sampler", "running", "ask ms", "tell ms", "asks and tells/s", "syncs a round"],
            [_study_row(results[f"study-{sampler}-{running}"]) for sampler, running in STUDIES],
        ),
        "MLflow: the recording process, SQLite": render_table(
            ["trials", "CPU ms a trial", "wall ms", "kB a trial", "list s", "MiB"],
            [_recording_row(row) for row in results["record"]],
        ),
        f"A finished sweep of {rerun['trials']:,} trials, whose parent run is {rerun['parent']}": render_table(
            ["", "CPU s of all processes", "wall s", "load", "MiB", "says that it is finished"],
            [_rerun_row(heading, rerun[name]) for heading, name in (("its end", "close"), ("rerun", "rerun"))],
        ),
    }
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}. One run."
    return "\n\n".join([machine, *(text for title, table in parts.items() for text in (f"## {title}", table))])


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
