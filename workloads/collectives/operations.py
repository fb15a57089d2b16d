"""The collectives: their buffers, the call, the result that it has to have, and the share of bytes that links carry."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from workloads.collectives import Collective

# Bytes that each link carries for each byte of the size, over n ranks: nccl-tests, doc/PERFORMANCE.md.
BUS_FACTORS: dict[Collective, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send_receive": lambda n: 1.0,
}


@dataclass(frozen=True)
class Group:
    """The ranks that communicate.

    Attributes:
        handle: their process group; None for all ranks.
        first: the lowest of their ranks.
        size: how many they are.
        position: of this rank among them.
    """

    handle: dist.ProcessGroup | None
    first: int
    size: int
    position: int


@dataclass(frozen=True)
class Operation:
    """A collective with its buffers.

    Attributes:
        source, result: the buffers; the same one where the operation is in place.
        call: runs it.
        expected: of each equal part of the result, where each rank's source holds its position plus one.
    """

    source: torch.Tensor
    result: torch.Tensor
    call: Callable[[], object]
    expected: tuple[float, ...]

    @property
    def size_bytes(self) -> int:
        """The size as nccl-tests counts it: that of the larger buffer."""
        return max(self.source.nbytes, self.result.nbytes)

    def check(self, position: int) -> None:
        """Run once and check the result.

        Raises:
            ArithmeticError: it is wrong.
        """
        self.source.fill_(position + 1)
        self.call()
        parts = self.result.float().view(len(self.expected), -1)
        expected = torch.tensor(self.expected, device=parts.device)[:, None]
        # bf16 holds integers exactly up to 256; a larger sum is rounded.
        tolerance = torch.where(expected > 256, expected / 128, torch.zeros_like(expected))
        if not bool(((parts - expected).abs() <= tolerance).all()):
            raise ArithmeticError(f"the result is not {', '.join(f'{value:g}' for value in self.expected)}")
        self.source.zero_()  # repeated sums of zeros do not overflow


def build_operation(name: Collective, kib: int, dtype: torch.dtype, device: torch.device, group: Group) -> Operation:
    """Return a collective with buffers of the size, rounded up to equal parts for all ranks."""
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
    return Operation(whole, received, lambda: _pass_on(whole, received, group), (float((group.position - 1) % n + 1),))


def _pass_on(source: torch.Tensor, received: torch.Tensor, group: Group) -> None:
    """Send a buffer to the next rank and receive that of the last one."""
    following, previous = ((group.position + step) % group.size + group.first for step in (1, -1))
    operations = [
        dist.P2POp(dist.isend, source, following, group.handle),
        dist.P2POp(dist.irecv, received, previous, group.handle),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
