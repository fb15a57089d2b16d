"""Time a pass over a device's memory and check its result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workloads.api.contract import Measurement, Rank
from workloads.instruments import device as devices
from workloads.instruments.device import MIB
from workloads.instruments.runs import time_untainted
from workloads.instruments.timing import event_metrics
from workloads.memory import MemoryParameters

# Bytes that each operation moves for a byte of the buffer.
MOVED = {"copy": 2, "read": 1, "write": 1}


def measure(parameters: MemoryParameters, rank: Rank) -> Measurement:
    """Time the operation on a buffer of ones, with the last-level cache flushed before each call on a GPU.

    Raises:
        ArithmeticError: the result is wrong.
    """
    device = devices.device_of(rank)
    source = torch.ones(parameters.mib * MIB // 4, device=device)
    target = torch.zeros_like(source) if parameters.operation != "read" else torch.zeros(1, device=device)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "write": lambda: target.fill_(1),
        "read": lambda: torch.sum(source, dim=0, keepdim=True, out=target),
    }
    timed = time_untainted(
        calls[parameters.operation],
        device,
        warmup=parameters.warmup,
        repeats=parameters.repeats,
        cold_cache=device.type != "cpu",
    )
    _check(target, source, parameters.operation)
    return Measurement(
        executed={
            "operation": parameters.operation,
            "mib": source.nbytes // MIB,
            "warmup": parameters.warmup,
            "repeats": len(timed.times_s),
        },
        step_times_s=timed.times_s,
        independent=True,
        bytes_per_step=MOVED[parameters.operation] * source.nbytes,
        metrics=timed.readings.metrics() | event_metrics(device),
        machine_info=devices.machine_info(device) | timed.readings.machine_info(),
    )


def _check(target: torch.Tensor, source: torch.Tensor, operation: str) -> None:
    """Check the last result. Raises ArithmeticError if it is wrong."""
    # A sum of many ones in fp32 is rounded.
    is_sum = operation == "read" and abs(float(target) / source.numel() - 1) < 1e-3
    if not is_sum and not torch.equal(target, source):
        raise ArithmeticError(f"operation={operation}: the result is wrong")
