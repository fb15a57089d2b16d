"""`workload=collectives`: a collective over a gang, and the bandwidth of the links between its devices.

`workload=allreduce` is its all-reduce with a size in MiB.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from workloads.api.contract import Measurement, Rank, Workload

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive"]


@dataclass(frozen=True)
class CollectivesParameters:
    """Parameters of one collective.

    Attributes:
        collective: what the ranks do together; in `send_receive` each sends to the next one and receives from the last.
        kib: size in KiB, as nccl-tests counts it: the larger buffer of a rank, so the gathered one of an all-gather.
        ranks: ranks of a group. Groups of neighboring ranks run at the same time; 0 is one group of all.
        dtype: number format of the buffers.
        warmup: calls that are not timed.
        repeats: timed calls.
    """

    collective: Collective = "all_reduce"
    kib: int = field(default=262_144, metadata={"min": 1})
    ranks: int = field(default=0, metadata={"min": 0})
    dtype: Literal["fp32", "bf16"] = "bf16"
    warmup: int = field(default=5, metadata={"min": 1})
    repeats: int = field(default=20, metadata={"min": 1})


class Collectives(Workload):
    """A collective by NCCL or RCCL between GPUs, by gloo between processors, with its result checked."""

    name = "collectives"
    Parameters: type = CollectivesParameters
    work: tuple[str, ...] = ("collective", "ranks", "dtype")
    ways = ("warmup", "repeats")
    benchmark_version = "collectives/1"
    min_world_size = 2
    max_world_size = None
    finalists = 0  # each point is a result


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


class Allreduce(Collectives):
    """The all-reduce, under the name, parameters and benchmark version of the sweeps that have measured it."""

    name = "allreduce"
    Parameters = AllreduceParameters
    work = ("dtype",)
    benchmark_version = "allreduce/4"  # the cost of events is subtracted on GPUs (3); no call is repeated on a CPU (4)

    def run(self, parameters: AllreduceParameters, rank: Rank) -> Measurement:
        values = {name: getattr(parameters, name) for name in ("dtype", "warmup", "repeats")}
        measurement = super().run(CollectivesParameters(kib=1024 * parameters.mib, **values), rank)
        executed = {name: measurement.executed[name] for name in values}
        return replace(measurement, executed=executed | {"mib": int(str(measurement.executed["kib"])) // 1024})
