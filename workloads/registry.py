"""Workloads by name. A configuration names one of these and can run nothing else.

Another package adds its own by an entry point in the group `sweeper.workloads`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from workloads.contract import Workload

# Here, so that a checkout runs without being installed.
BUILT_IN = {
    "allreduce": "workloads.allreduce:Allreduce",
    "command": "workloads.command:Command",
    "matmul": "workloads.matmul:Matmul",
    "offload": "workloads.offload:Offload",
    "parallel": "workloads.parallel:Parallel",
    "precision": "workloads.precision:Gemm",
    "precision_casts": "workloads.precision:Casts",
    "precision_linear": "workloads.precision:Linear",
    "precision_training": "workloads.precision:Training",
    "probe": "workloads.probe:Probe",
}


def names() -> list[str]:
    """The workloads there are, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group="sweeper.workloads"))})


@cache
def load(name: str) -> Workload:
    """The workload of that name. Raises KeyError where there is none."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return cast(Workload, getattr(import_module(module), attribute)())
    for point in entry_points(group="sweeper.workloads"):
        if point.name == name:
            return cast(Workload, point.load()())
    raise KeyError(name)
