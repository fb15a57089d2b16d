"""`workload=collectives`: a collective over a gang, and the bandwidth of the links between the gang's devices."""

from dataclasses import dataclass, field
from typing import Literal

from workloads.api.contract import Workload

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
    Parameters = CollectivesParameters
    work = ("collective", "ranks", "dtype")
    ways = ("warmup", "repeats")
    measures = "bus_gb_s"
    benchmark_version = "collectives/1"
    min_world_size = 2
    max_world_size = None
    finalists = 0  # each point is a result in itself
