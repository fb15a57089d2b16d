"""The all-reduce of `workload=collectives`, by its older name and in MiB."""

from __future__ import annotations

from dataclasses import replace

from workloads.allreduce import AllreduceParameters
from workloads.api.contract import Measurement, Rank
from workloads.collectives import CollectivesParameters
from workloads.collectives.run import measure as measure_collective


def measure(parameters: AllreduceParameters, rank: Rank) -> Measurement:
    """Time the all-reduce of a buffer.

    Raises:
        Infeasible: the gang has a single rank.
        ArithmeticError: the sum is wrong.
    """
    collective = CollectivesParameters(
        "all_reduce",
        1024 * parameters.mib,
        dtype=parameters.dtype,
        warmup=parameters.warmup,
        repeats=parameters.repeats,
    )
    measurement = measure_collective(collective, rank)
    kib = measurement.executed["kib"]
    assert isinstance(kib, int)
    executed = {name: measurement.executed[name] for name in ("dtype", "warmup", "repeats")}
    return replace(measurement, executed=executed | {"mib": kib // 1024})
