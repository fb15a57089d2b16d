"""The tables of benchmarks/results/peers.md, from the rows of the runs."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.figures import count_lines, describe
from benchmarks.peers.processes import WORKERS
from benchmarks.peers.schedules import batch_length_s, queue_length_s, scheduled_idle_share
from benchmarks.peers.tools import KILLED, WHOLE, Tool

Row = Mapping[str, Any]


def render(rows: Sequence[Row], versions: Mapping[str, Mapping[str, str]]) -> str:
    """Return the machine, the versions and the three tables as Markdown."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [f"{machine}; median (minimum to maximum) over tables of durations, one run each", ""]
    lines += [f"- {name}: {', '.join(f'{key} {value}' for key, value in of.items())}" for name, of in versions.items()]
    loads = [row["load"] for row in rows]
    if loads:
        lines.append(f"- load average at the end of a run: {describe(loads, 0)}")
    ideals = {row["seed"]: row["ideal_s"] for row in rows if row["kind"] == "whole"}
    if ideals:
        lines.append(f"- all trial time over four workers: {describe(list(ideals.values()))} s")
        for name, schedule in (("batches of four", batch_length_s), ("a queue", queue_length_s)):
            shares = [100 * scheduled_idle_share(schedule, seed, WORKERS) for seed in ideals]
            lines.append(f"- idle share of {name}, computed without any other time: {describe(shares)}%")
    return "\n".join([*lines, "", *_whole(rows), "", *_killed(rows), "", *_lines()])


def _whole(rows: Sequence[Row]) -> list[str]:
    spans = "idle % | of it: start, between, end | first start to last end, s | wall, s"
    lines = [f"| whole runs | runs | {spans} | points run | trials run | best found % |", "|---|" + "---:|" * 8]
    for tool in WHOLE:
        runs = _of(rows, "whole", tool)
        if not runs:
            continue
        idle = describe([100 * run["idle"] for run in runs])
        parts = [
            f"{100 * statistics.median(part):.1f}" for part in zip(*(run["idle_parts"] for run in runs), strict=True)
        ]
        figures = [[run[key] for run in runs] for key in ("span_s", "wall_s")]
        counts = [[run[key] for run in runs] for key in ("points", "trials")]
        found = [100 * run["found"] for run in runs]
        cells = [
            idle,
            ", ".join(parts),
            *map(describe, figures),
            *(describe(values, 0) for values in counts),
            describe(found),
        ]
        lines.append(f"| {tool.name} | {len(runs)} | {' | '.join(cells)} |")
    return lines


def _killed(rows: Sequence[Row]) -> list[str]:
    keys = ("finished", "repeated", "missing", "started_again", "absent")
    names = "finished before | of them run again | of them without a result | started after | points without a result"
    lines = [f"| killed runs | runs | {names} | second start, s |", "|---|" + "---:|" * 7]
    for tool in KILLED:
        runs = _of(rows, "killed", tool)
        if not runs:
            continue
        cells = [describe([run[key] for run in runs], 0) for key in keys]
        cells.append(describe([run["rest_s"] for run in runs]))
        lines.append(f"| {tool.name} | {len(runs)} | {' | '.join(cells)} |")
    return lines


def _lines() -> list[str]:
    lines = ["| program | lines | files |", "|---|---:|---|"]
    shown: set[tuple[str, ...]] = set()
    for tool in WHOLE:
        if tool.files not in shown:
            lines.append(f"| {tool.name} | {count_lines(tool.paths)} | {', '.join(tool.files)} |")
        shown.add(tool.files)
    return lines


def _of(rows: Sequence[Row], kind: str, tool: Tool) -> list[Row]:
    return [row for row in rows if (row["kind"], row["tool"]) == (kind, tool.name)]
