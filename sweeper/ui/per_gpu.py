"""Many GPUs measured side by side, each by itself: which one is slow. One slow GPU holds up every job that it joins."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sweeper.common import metrics
from sweeper.common.trials import TrialRecord
from sweeper.ui import tables


@dataclass(frozen=True)
class Member:
    """One GPU. relative: its rate over the median GPU's in the same trial, median over the trials."""

    host: str
    gpu: str
    relative: float
    tflops: float
    trials: int


def members(records: Iterable[TrialRecord]) -> list[Member]:
    """Every GPU of the trials whose ranks measured a device each, the slowest first.

    None where several gangs had some of them each: what was not measured side by side is not compared.
    """
    relative, absolute = (
        defaultdict[tuple[str, str], list[float]](list),
        defaultdict[tuple[str, str], list[float]](list),
    )
    size = 0
    for record in records:
        ranks = [m for m in record.measurements if m.get("independent")]
        if len(ranks) < 2:
            continue
        size = max(size, len(ranks))
        rates = [metrics.tflops_of(m["flops_per_step"], m["step_times_s"], m["statistic"]) for m in ranks]
        middle = statistics.median(rates)
        for number, (rank, rate) in enumerate(zip(ranks, rates, strict=True)):
            relative[_name(rank["machine_info"], number)].append(rate / middle)
            absolute[_name(rank["machine_info"], number)].append(rate)
    found = [
        Member(*name, statistics.median(each), statistics.median(absolute[name]), len(each))
        for name, each in relative.items()
    ]
    if len(found) > size:
        return []
    return sorted(found, key=lambda member: member.relative)


def _name(machine_info: Mapping[str, Any], rank: int) -> tuple[str, str]:
    return str(machine_info.get("host", "")), str(machine_info.get("gpu_uuid") or f"process {rank}")


def said(found: list[Member]) -> str:
    """`4 measured side by side: slowest n1 GPU-1f3a… at 0.951 of the median one, fastest n0 GPU-77c2… at 1.012`."""
    slowest, fastest = found[0], found[-1]
    spread = fastest.relative / slowest.relative - 1
    return (
        f"{len(found)} measured side by side, {spread:.1%} between the fastest and the slowest: "
        f"{slowest.host} {slowest.gpu} at {slowest.relative:.3f} of the median one, "
        f"{fastest.host} {fastest.gpu} at {fastest.relative:.3f}"
    )


def csv(found: list[Member]) -> str:
    return tables.csv_of([vars(member) for member in found])
