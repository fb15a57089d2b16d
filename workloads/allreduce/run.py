"""Timing a sum over ranks, and checking it."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from workloads import device as devices
from workloads.allreduce import AllreduceParameters
from workloads.contract import Infeasible, Measurement, Rank
from workloads.gang import together
from workloads.telemetry import watching
from workloads.timing import time_steps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(parameters: AllreduceParameters, rank: Rank) -> Measurement:
    """Its `bus_gb_s` is what each device's link carries each way: 2 (n-1)/n of the buffer (NCCL's tests name it so).

    Raises Infeasible for one rank by itself, ArithmeticError where the sum is wrong.
    """
    if rank.world_size == 1:
        raise Infeasible("one rank has nobody to sum with: gpus=2 or more")
    device, dtype = devices.of(rank), DTYPES[parameters.dtype]
    buffer = torch.full((parameters.mib * 2**20 // dtype.itemsize,), float(rank.rank + 1), dtype=dtype, device=device)
    with together(rank, device):
        dist.all_reduce(buffer)
        wanted = rank.world_size * (rank.world_size + 1) // 2
        if not bool((buffer == wanted).all()):
            raise ArithmeticError(f"the sum over {rank.world_size} ranks is not {wanted} everywhere")
        with watching(device) as watch:
            times_s = time_steps(
                lambda: dist.all_reduce(buffer.zero_()),
                device,
                warmup=parameters.warmup,
                repeats=parameters.repeats,
                cold_cache=False,
            )
    moved = 2 * (rank.world_size - 1) / rank.world_size * buffer.numel() * dtype.itemsize
    return Measurement(
        executed={
            "mib": buffer.numel() * dtype.itemsize // 2**20,
            "dtype": next(name for name, each in DTYPES.items() if each == buffer.dtype),
            "warmup": parameters.warmup,
            "repeats": len(times_s),
        },
        step_times_s=times_s,
        figures=watch.figures() | {"bus_gb_s": moved / statistics.median(times_s) / 1e9},
        facts=devices.facts(device) | watch.facts(),
    )
