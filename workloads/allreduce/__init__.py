"""`workload=allreduce`: an all-reduce of a buffer over a gang, and the bandwidth of the links between its devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workloads.api.contract import Measurement, Rank, Workload


@dataclass(frozen=True)
class AllreduceParameters:
    """Parameters of one all-reduce.

    Attributes:
        mib: size of the buffer of each rank in MiB.
        dtype: number format of the buffer.
        warmup: calls that are not timed.
        repeats: timed calls.
    """

    mib: int = field(default=256, metadata={"min": 1})
    dtype: Literal["fp32", "bf16"] = "bf16"
    warmup: int = field(default=5, metadata={"min": 1})
    repeats: int = field(default=20, metadata={"min": 1})


class Allreduce(Workload):
    """An all-reduce by NCCL or RCCL between GPUs, by gloo between processors, with its result checked."""

    name = "allreduce"
    Parameters = AllreduceParameters
    work = ("dtype",)
    ways = ("warmup", "repeats")
    benchmark_version = "allreduce/4"  # the cost of events is subtracted on GPUs (3); no call is repeated on a CPU (4)
    min_world_size = 2
    max_world_size = None
    finalists = 0  # each point is a result

    def run(self, parameters: AllreduceParameters, rank: Rank) -> Measurement:
        from workloads.allreduce.run import measure

        return measure(parameters, rank)
