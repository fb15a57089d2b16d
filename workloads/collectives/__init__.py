"""`workload=collectives`: a collective over a gang, and the bandwidth of the links between the gang's devices.

`workload=allreduce` is an all-reduce with a size in MiB.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from workloads.api.contract import Measurement, Rank, Workload

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive"]


@dataclass(frozen=True)
class CollectivesParameters:
    """Parameters of one collective.

    Attributes:
        collective: the operation. In `send_receive`, each rank sends to the next and receives from the previous rank.
        kib: size in KiB of a rank's larger buffer, as in nccl-tests; in an all-gather, this is the gathered buffer.
        ranks: ranks per group. Groups of neighboring ranks run at the same time; 0 means one group of all ranks.
        dtype: number format of the buffers.
        warmup: the number of untimed calls.
        repeats: the number of timed calls.
    """

    collective: Collective = "all_reduce"
    kib: int = field(default=262_144, metadata={"min": 1})
    ranks: int = field(default=0, metadata={"min": 0})
    dtype: Literal["fp32", "bf16"] = "bf16"
    warmup: int = field(default=5, metadata={"min": 1})
    repeats: int = field(default=20, metadata={"min": 1})


class Collectives(Workload):
    """A collective whose result is checked, by NCCL or RCCL between GPUs or by gloo between CPUs."""

    name = "collectives"
    Parameters: type = CollectivesParameters
    work: tuple[str, ...] = ("collective", "ranks", "dtype")
    ways = ("warmup", "repeats")
    measures = "bus_gb_s"
    benchmark_version = "collectives/1"
    min_world_size = 2
    max_world_size = None
    finalists = 0  # each point is a result in itself


@dataclass(frozen=True)
class AllreduceParameters:
    """Parameters of one all-reduce.

    Attributes:
        mib: size of each rank's buffer in MiB.
        dtype: number format of the buffer.
        warmup: the number of untimed calls.
        repeats: the number of timed calls.
    """

    mib: int = field(default=256, metadata={"min": 1})
    dtype: Literal["fp32", "bf16"] = "bf16"
    warmup: int = field(default=5, metadata={"min": 1})
    repeats: int = field(default=20, metadata={"min": 1})


class Allreduce(Collectives):
    """An all-reduce with the name, parameters and benchmark version of earlier sweeps."""

    name = "allreduce"
    Parameters = AllreduceParameters
    work = ("dtype",)
    benchmark_version = "allreduce/4"  # 3 subtracts the cost of events on GPUs; 4 repeats no call on a CPU

    def run(self, parameters: AllreduceParameters, rank: Rank) -> Measurement:
        values = {name: getattr(parameters, name) for name in ("dtype", "warmup", "repeats")}
        measurement = super().run(CollectivesParameters(kib=1024 * parameters.mib, **values), rank)
        executed = {name: measurement.executed[name] for name in values}
        return replace(measurement, executed=executed | {"mib": int(str(measurement.executed["kib"])) // 1024})
