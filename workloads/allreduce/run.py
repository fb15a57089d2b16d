"""Timing a sum over ranks, and checking it."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from workloads import device as devices
from workloads.allreduce import AllreduceParameters
from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.distributed import process_group
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
    buffer = torch.ones(parameters.mib * 2**20 // dtype.itemsize, dtype=dtype, device=device)
    with process_group(rank, device):
        dist.all_reduce(buffer)
        wanted = rank.world_size  # exact in bf16 up to 256, and as near as its rounding beyond
        if not bool(((buffer.float() - wanted).abs() <= wanted / 128 * (wanted > 256)).all()):
            raise ArithmeticError(f"the sum of ones over {wanted} ranks is not {wanted} everywhere")
        buffer.zero_()  # so that it stays what it is
        with watching(device) as watch:
            times_s = time_steps(
                lambda: dist.all_reduce(buffer),
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
        metrics=watch.metrics() | {"bus_gb_s": moved / statistics.median(times_s) / 1e9},
        machine_info=devices.machine_info(device) | watch.machine_info(),
    )
