"""`workload=allreduce`: the sum of a buffer over a gang, and how fast the links between its devices carry it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workloads.api.contract import Measurement, Rank, Workload


@dataclass(frozen=True)
class AllreduceParameters:
    """mib: of the buffer that each rank has."""

    mib: int = field(default=256, metadata={"min": 1})
    dtype: Literal["fp32", "bf16"] = "bf16"
    warmup: int = field(default=5, metadata={"min": 1})
    repeats: int = field(default=20, metadata={"min": 1})


class Allreduce(Workload):
    """NCCL or RCCL between GPUs, gloo between processors."""

    name = "allreduce"
    Parameters = AllreduceParameters
    benchmark_version = "allreduce/2"
    max_world_size = None

    def run(self, parameters: AllreduceParameters, rank: Rank) -> Measurement:
        from workloads.allreduce.run import measure

        return measure(parameters, rank)
