"""Time a collective over a gang and check its result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.collectives import CollectivesParameters
from workloads.collectives.operations import BUS_FACTORS, Group, build_operation
from workloads.instruments import device as devices
from workloads.instruments.distributed import process_group
from workloads.instruments.telemetry import monitor_gpu
from workloads.instruments.timing import time_steps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(parameters: CollectivesParameters, rank: Rank) -> Measurement:
    """Time the collective of a buffer.

    `bus_gb_s` is the bandwidth of each device's link in each direction, as nccl-tests defines it.

    Raises:
        Infeasible: a group has a single rank, or groups do not divide the gang.
        ArithmeticError: the result is wrong.
    """
    size = parameters.ranks or rank.world_size
    if size == 1:
        raise Infeasible(f"{parameters.collective} needs at least two ranks: set gpus=2 or more")
    if rank.world_size % size:
        raise Infeasible(f"groups of {size} ranks do not divide the gang of {rank.world_size}")
    device, dtype = devices.device_of(rank), DTYPES[parameters.dtype]
    with process_group(rank, device):
        group = form_group(size, rank)
        operation = build_operation(parameters.collective, parameters.kib, dtype, device, group)
        operation.check(group.position)
        with monitor_gpu(device) as readings:
            times_s = time_calls(operation.call, device, parameters.warmup, parameters.repeats)
    moved = BUS_FACTORS[parameters.collective](size) * operation.size_bytes
    return Measurement(
        executed={
            "collective": parameters.collective,
            "kib": operation.size_bytes // 1024,
            "ranks": parameters.ranks and group.size,
            "dtype": next(name for name, torch_dtype in DTYPES.items() if torch_dtype == operation.result.dtype),
            "warmup": parameters.warmup,
            "repeats": len(times_s),
        },
        step_times_s=times_s,
        metrics=readings.metrics() | {"bus_gb_s": moved / statistics.median(times_s) / 1e9},
        machine_info=devices.machine_info(device) | readings.machine_info(),
    )


def time_calls(call: Callable[[], object], device: torch.device, warmup: int, repeats: int) -> tuple[float, ...]:
    """Return the seconds of each call.

    All ranks have to call equally often. On a CPU `time_steps` measures again what other processes disturbed, which
    each rank decides alone: the others would wait for it, or take its extra call for their next one.
    """
    if device.type != "cpu":
        return time_steps(call, device, warmup=warmup, repeats=repeats, cold_cache=False)
    times_s = []
    for _ in range(warmup + repeats):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return tuple(times_s[warmup:])


def form_group(size: int, rank: Rank) -> Group:
    """Return the group of neighbouring ranks that this rank is in. Every rank makes all groups, as PyTorch asks for."""
    first = rank.rank // size * size
    if size == rank.world_size:
        return Group(None, 0, size, rank.rank)
    handles = {start: dist.new_group(range(start, start + size)) for start in range(0, rank.world_size, size)}
    return Group(handles[first], first, size, rank.rank - first)
