"""Compare GPUs that were measured side by side. A single slow GPU slows down every job in which it takes part."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sweeper.common.trials import TrialRecord
from sweeper.metrics.derivation import tflops_of


@dataclass(frozen=True)
class GpuResult:
    """A GPU's rate and the ratio to the median GPU of the same trial, both as medians over the trials."""

    host: str
    gpu: str
    relative: float
    tflops: float
    trials: int


def per_gpu_results(records: Iterable[TrialRecord]) -> list[GpuResult]:
    """Return the GPUs that were measured side by side, slowest first, unless several gangs shared the GPUs."""
    rates_of = defaultdict[tuple[str, str], list[tuple[float, float]]](list)  # relative and absolute rates by GPU
    largest_gang = 0
    for record in records:
        ranks = [rank for rank in record.measurements if rank.get("independent")]
        if len(ranks) < 2:
            continue
        largest_gang = max(largest_gang, len(ranks))
        tflops = [tflops_of(rank["flops_per_step"], rank["step_times_s"], rank["statistic"]) for rank in ranks]
        for number, (rank, rate) in enumerate(zip(ranks, tflops, strict=True)):
            info = rank["machine_info"]
            key = str(info.get("host", "")), str(info.get("gpu_uuid") or f"process {number}")  # a rank on a CPU
            rates_of[key].append((rate / statistics.median(tflops), rate))
    if len(rates_of) > largest_gang:
        return []
    results = []
    for (host, gpu), rates in rates_of.items():
        relative, absolute = (statistics.median(values) for values in zip(*rates, strict=True))
        results.append(GpuResult(host, gpu, relative, absolute, len(rates)))
    return sorted(results, key=lambda result: result.relative)


def describe(results: list[GpuResult]) -> str:
    """Describe the spread between the GPUs, with the slowest and the fastest relative to the median GPU."""
    slowest, fastest = results[0], results[-1]
    spread = f"{fastest.relative / slowest.relative - 1:.1%} between the fastest and the slowest"
    ends = f"{slowest.host} {slowest.gpu} at {slowest.relative:.3f} of the median one"
    ends += f", {fastest.host} {fastest.gpu} at {fastest.relative:.3f}"
    return f"{len(results)} measured side by side, {spread}: {ends}"
