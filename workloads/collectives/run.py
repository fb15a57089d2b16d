"""Time a collective over a gang and check its result."""

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.collectives import Collective, CollectivesParameters
from workloads.instruments import device as devices
from workloads.instruments.distributed import process_group
from workloads.instruments.telemetry import monitor_gpu
from workloads.instruments.timing import time_steps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Bytes that each link carries per byte of size, for n ranks (nccl-tests, doc/PERFORMANCE.md).
BUS_FACTORS: dict[Collective, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send_receive": lambda n: 1.0,
}


class Group(NamedTuple):
    handle: dist.ProcessGroup | None  # None for all ranks
    first: int  # the lowest rank
    size: int
    position: int  # this rank's position in the group


class Operation(NamedTuple):
    """A collective with its buffers. An in-place operation has one buffer."""

    source: torch.Tensor
    result: torch.Tensor
    call: Callable[[], object]
    # The value in each equal part of the result, if each rank's source contains the rank's position plus one.
    expected: tuple[float, ...]

    @property
    def size_bytes(self) -> int:
        return max(self.source.nbytes, self.result.nbytes)

    def check(self, position: int) -> None:
        """Run once and check the result. Raises ArithmeticError if the result is wrong."""
        self.source.fill_(position + 1)
        self.call()
        parts = self.result.float().view(len(self.expected), -1)
        expected = torch.tensor(self.expected, device=parts.device)[:, None]
        # bf16 represents integers exactly up to 256; larger sums are rounded.
        tolerance = torch.where(expected > 256, expected / 128, torch.zeros_like(expected))
        if not bool(((parts - expected).abs() <= tolerance).all()):
            raise ArithmeticError(f"the result is not {', '.join(f'{value:g}' for value in self.expected)}")
        self.source.zero_()  # repeated sums of zeros do not overflow


def measure(parameters: CollectivesParameters, rank: Rank) -> Measurement:
    """Time the collective on a buffer. `bus_gb_s` is the bandwidth of each device's link per direction.

    Raises Infeasible if a group has a single rank or the groups do not divide the gang, and ArithmeticError if the
    result is wrong.
    """
    size = parameters.ranks or rank.world_size
    if size == 1:
        raise Infeasible(f"{parameters.collective} needs at least two ranks: set gpus=2 or more")
    if rank.world_size % size:
        raise Infeasible(f"groups of {size} ranks do not divide the gang of {rank.world_size}")
    device, dtype = devices.device_of(rank), DTYPES[parameters.dtype]
    with process_group(rank, device):
        group = Group(None, 0, size, rank.rank)
        if size < rank.world_size:  # PyTorch requires every rank to create all groups
            handles = {start: dist.new_group(range(start, start + size)) for start in range(0, rank.world_size, size)}
            first = rank.rank // size * size
            group = Group(handles[first], first, size, rank.rank - first)
        operation = build_operation(parameters.collective, parameters.kib, dtype, device, group)
        operation.check(group.position)
        with monitor_gpu(device) as readings:
            times_s = time_calls(operation.call, device, parameters.warmup, parameters.repeats)
    moved = BUS_FACTORS[parameters.collective](size) * operation.size_bytes
    return Measurement(
        executed=vars(parameters)
        | {"kib": operation.size_bytes // 1024, "ranks": parameters.ranks and group.size, "repeats": len(times_s)}
        | {"dtype": next(name for name, torch_dtype in DTYPES.items() if torch_dtype == operation.result.dtype)},
        step_times_s=times_s,
        metrics=readings.metrics() | {"bus_gb_s": moved / statistics.median(times_s) / 1e9},
        machine_info=devices.machine_info(device) | readings.machine_info(),
    )


def time_calls(call: Callable[[], object], device: torch.device, warmup: int, repeats: int) -> tuple[float, ...]:
    """Return the duration of each call in seconds. All ranks must make the same number of calls.

    `time_steps` is not used on a CPU, where it repeats disturbed calls: each rank would decide on its own to repeat a
    call. The other ranks would wait for that rank, or match the extra call with their next call.
    """
    if device.type != "cpu":
        return time_steps(call, device, warmup=warmup, repeats=repeats, cold_cache=False)
    times_s = []
    for _ in range(warmup + repeats):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return tuple(times_s[warmup:])


def build_operation(name: Collective, kib: int, dtype: torch.dtype, device: torch.device, group: Group) -> Operation:
    """Return a collective with buffers of `kib` KiB, rounded up so that all ranks have equal parts."""
    n, handle = group.size, group.handle
    part = math.ceil(kib * 1024 / dtype.itemsize / n)
    whole = torch.zeros(part * n, dtype=dtype, device=device)
    total, positions = n * (n + 1) / 2, tuple(float(position + 1) for position in range(n))
    if name == "all_reduce":
        return Operation(whole, whole, lambda: dist.all_reduce(whole, group=handle), (total,))
    if name == "all_gather":
        own = whole.new_zeros(part)
        return Operation(own, whole, lambda: dist.all_gather_into_tensor(whole, own, group=handle), positions)
    if name == "reduce_scatter":
        own = whole.new_zeros(part)
        return Operation(whole, own, lambda: dist.reduce_scatter_tensor(own, whole, group=handle), (total,))
    received = torch.zeros_like(whole)
    if name == "all_to_all":
        return Operation(whole, received, lambda: dist.all_to_all_single(received, whole, group=handle), positions)
    following, previous = ((group.position + step) % n + group.first for step in (1, -1))

    def send_receive() -> None:
        pair = [dist.P2POp(dist.isend, whole, following, handle), dist.P2POp(dist.irecv, received, previous, handle)]
        for request in dist.batch_isend_irecv(pair):
            request.wait()

    return Operation(whole, received, send_receive, (float((group.position - 1) % n + 1),))
