"""GPUs measured side by side, each on its own: which one is slow. One slow GPU slows down every job that it joins."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sweeper.common.trials import TrialRecord
from sweeper.metrics import derivation


@dataclass(frozen=True)
class GpuResult:
    """One GPU.

    Attributes:
        relative: its rate over the median GPU's in the same trial, median over the trials.
        tflops: its rate, median over the trials.
    """

    host: str
    gpu: str
    relative: float
    tflops: float
    trials: int


def per_gpu_results(records: Iterable[TrialRecord]) -> list[GpuResult]:
    """Return every GPU of the trials whose ranks measured a device each, the slowest first.

    Empty if several gangs had some of the GPUs each: only what is measured side by side is compared.
    """
    relative = defaultdict[tuple[str, str], list[float]](list)
    absolute = defaultdict[tuple[str, str], list[float]](list)
    largest_gang = 0
    for record in records:
        ranks = [rank for rank in record.measurements if rank.get("independent")]
        if len(ranks) < 2:
            continue
        largest_gang = max(largest_gang, len(ranks))
        rates = [
            derivation.tflops_of(rank["flops_per_step"], rank["step_times_s"], rank["statistic"]) for rank in ranks
        ]
        median_rate = statistics.median(rates)
        for number, (rank, rate) in enumerate(zip(ranks, rates, strict=True)):
            gpu = _identify(rank["machine_info"], number)
            relative[gpu].append(rate / median_rate)
            absolute[gpu].append(rate)
    if len(relative) > largest_gang:
        return []
    results = [
        GpuResult(host, gpu, statistics.median(ratios), statistics.median(absolute[host, gpu]), len(ratios))
        for (host, gpu), ratios in relative.items()
    ]
    return sorted(results, key=lambda result: result.relative)


def _identify(machine_info: Mapping[str, Any], rank: int) -> tuple[str, str]:
    """Return the host and the GPU's UUID, on a CPU the rank."""
    return str(machine_info.get("host", "")), str(machine_info.get("gpu_uuid") or f"process {rank}")


def describe(results: list[GpuResult]) -> str:
    """Return how far apart the GPUs are, with the slowest and the fastest relative to the median one."""
    slowest, fastest = results[0], results[-1]
    spread = fastest.relative / slowest.relative - 1
    return (
        f"{len(results)} measured side by side, {spread:.1%} between the fastest and the slowest: "
        f"{slowest.host} {slowest.gpu} at {slowest.relative:.3f} of the median one, "
        f"{fastest.host} {fastest.gpu} at {fastest.relative:.3f}"
    )
