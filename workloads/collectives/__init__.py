"""`workload=collectives`: a collective over a gang, and the bandwidth of the links between its devices.

`workload=allreduce` is the all-reduce with a size in MiB.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from workloads.api.contract import Measurement, Rank, Workload

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive"]


@dataclass(frozen=True)
class CollectivesParameters:
    """Parameters of one collective.

    Attributes:
        collective: the operation. In `send_receive`, each rank sends to the next one and receives from the previous.
        kib: size in KiB, counted as in nccl-tests: a rank's larger buffer, which is the gathered one in an all-gather.
        ranks: ranks per group. Groups of neighboring ranks run at the same time; 0 means one group of all ranks.
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
    """A collective, with NCCL or RCCL between GPUs and gloo between CPUs, whose result is checked."""

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
    """The all-reduce, with the name, parameters and benchmark version under which earlier sweeps measured it."""

    name = "allreduce"
    Parameters = AllreduceParameters
    work = ("dtype",)
    benchmark_version = "allreduce/4"  # the cost of events is subtracted on GPUs (3); no call is repeated on a CPU (4)

    def run(self, parameters: AllreduceParameters, rank: Rank) -> Measurement:
        values = {name: getattr(parameters, name) for name in ("dtype", "warmup", "repeats")}
        measurement = super().run(CollectivesParameters(kib=1024 * parameters.mib, **values), rank)
        executed = {name: measurement.executed[name] for name in values}
        return replace(measurement, executed=executed | {"mib": int(str(measurement.executed["kib"])) // 1024})
