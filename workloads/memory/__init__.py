"""`workload=memory`: the bandwidth of a device's memory by copies, reads and writes of a buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workloads.api.contract import Measurement, Rank, Workload


@dataclass(frozen=True)
class MemoryParameters:
    """Parameters of one pass over the memory.

    Attributes:
        operation: copy a buffer into another one, read it (a sum) or write it (a constant).
        mib: size of a buffer; far above the last-level cache, or the cache is measured.
        warmup: calls that are not timed.
        repeats: timed calls.
    """

    operation: Literal["copy", "read", "write"] = "copy"
    mib: int = field(default=1024, metadata={"min": 1})
    warmup: int = field(default=3, metadata={"min": 0})
    repeats: int = field(default=20, metadata={"min": 1})


class Memory(Workload):
    """A pass over a device's memory, with its result checked."""

    name = "memory"
    Parameters = MemoryParameters
    benchmark_version = "memory/1"
    work = ("operation",)
    ways = ("warmup", "repeats")
    max_world_size = None  # each rank measures its own device, all at the same time
    finalists = 0  # each point is a result

    def run(self, parameters: MemoryParameters, rank: Rank) -> Measurement:
        from workloads.memory.run import measure

        return measure(parameters, rank)
