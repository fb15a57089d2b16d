"""Measure the cost of timing on a GPU: an empty pair of events, a sensor reading, and sensor polling.

Prints one line of JSON: the microseconds between two events with nothing between them (subtracted from every timing),
the milliseconds of a sensor reading, and the percentage by which polling the sensors slows GEMMs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

from workloads.instruments.telemetry import find_gpu, monitor_gpu
from workloads.instruments.timing import event_cost_s

READINGS, ROUNDS = 50, 5
PRODUCTS = 200  # GEMMs of 8192 x 8192 x 8192 in bf16: about 0.3 s on an MI300X


def reading_ms(device: torch.device) -> float | None:
    """Return the median time of a sensor reading; None if the GPU's sensors cannot be read."""
    gpu = find_gpu(device)
    if gpu is None:
        return None
    return statistics.median(_wall_s(gpu.read) for _ in range(READINGS)) * 1e3


def slowdown_percent(device: torch.device) -> float:
    """Return the percentage by which polling the sensors slows GEMMs, as the median of interleaved rounds."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    c = torch.empty_like(a)

    def multiply() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, a, out=c)
        torch.cuda.synchronize()

    def multiply_polled() -> None:
        with monitor_gpu(device):
            multiply()

    multiply()
    rounds = [(_wall_s(multiply), _wall_s(multiply_polled)) for _ in range(ROUNDS)]
    return (statistics.median(polled / alone for alone, polled in rounds) - 1) * 100


def _wall_s(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Print the measurements of the first visible GPU."""
    device = torch.device("cuda", 0)
    figures = {"device": torch.cuda.get_device_name(device), "event_cost_us": event_cost_s(device) * 1e6}
    figures |= {"reading_ms": reading_ms(device), "slowdown_percent": slowdown_percent(device)}
    print(json.dumps({name: value for name, value in figures.items() if value is not None}))


if __name__ == "__main__":
    main()
