"""Time an all-reduce over a gang and check its result."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from workloads import device as devices
from workloads.allreduce import AllreduceParameters
from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.distributed import process_group
from workloads.telemetry import monitor_gpu
from workloads.timing import time_steps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(parameters: AllreduceParameters, rank: Rank) -> Measurement:
    """Time the all-reduce of a buffer.

    `bus_gb_s` is the bandwidth of each device's link in each direction, as nccl-tests defines it: an all-reduce over n
    ranks moves 2 (n-1)/n of the buffer.

    Raises:
        Infeasible: the gang has a single rank.
        ArithmeticError: the sum is wrong.
    """
    if rank.world_size == 1:
        raise Infeasible("an all-reduce needs at least two ranks: set gpus=2 or more")
    device, dtype = devices.device_of(rank), DTYPES[parameters.dtype]
    buffer = torch.ones(parameters.mib * 2**20 // dtype.itemsize, dtype=dtype, device=device)
    with process_group(rank, device):
        dist.all_reduce(buffer)
        expected = rank.world_size
        tolerance = expected / 128 if expected > 256 else 0.0  # bf16 holds integers exactly up to 256, then it rounds
        if not bool(((buffer.float() - expected).abs() <= tolerance).all()):
            raise ArithmeticError(f"the sum of ones over {expected} ranks is not {expected} everywhere")
        buffer.zero_()  # repeated sums of zeros do not overflow
        with monitor_gpu(device) as readings:
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
            "dtype": next(name for name, torch_dtype in DTYPES.items() if torch_dtype == buffer.dtype),
            "warmup": parameters.warmup,
            "repeats": len(times_s),
        },
        step_times_s=times_s,
        metrics=readings.metrics() | {"bus_gb_s": moved / statistics.median(times_s) / 1e9},
        machine_info=devices.machine_info(device) | readings.machine_info(),
    )
