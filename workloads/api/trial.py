"""Run one trial in this process and classify its errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from workloads.api.contract import Measurement, OutOfMemory, Rank, Scalar
from workloads.api.registry import load

# Torch raises its own class for a GPU, but a plain RuntimeError where the CPU's allocator fails.
_CPU_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def run_trial(
    workload: str, parameters: Mapping[str, Scalar], rank: Rank, settings: Mapping[str, Any] | None = None
) -> Measurement:
    """One trial on this rank, of a workload that may have settings.

    Raises Infeasible (OutOfMemory is one), NotAsAsked, or whatever the workload raised.
    """
    loaded = load(workload)
    if settings is not None and loaded.Settings is not None:
        loaded = loaded.with_settings(loaded.Settings(**settings))
    try:
        measurement = loaded.run(loaded.Parameters(**parameters), rank)
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"out of memory: {_first_line(error)}") from error
        raise
    if differing := differences(measurement, parameters):
        raise ParameterMismatch(f"rank {rank.rank} ran {differing}")
    return measurement


class ParameterMismatch(Exception):
    """What ran is not what was asked: a figure under the wrong name."""


def differences(measurement: Measurement, asked: Mapping[str, Scalar]) -> str:
    """Which parameters were executed otherwise than asked, in words; empty where all is as it should be."""
    executed = {name: measurement.executed.get(name, "nothing") for name in asked}
    return "; ".join(
        f"{name}={executed[name]}, asked was {value}" for name, value in asked.items() if executed[name] != value
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error says that the device or the host had too little memory."""
    torch = sys.modules.get("torch")  # a workload without torch need not wait for its import
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_OUT_OF_MEMORY)


def _first_line(error: BaseException) -> str:
    """As much as tells how much was wanted and how much there was; PyTorch goes on with advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = re.sub(r"^\[enforce fail at [^]]*\] (err == 0\. )?", "", line)
    return re.split(r" Including non-PyTorch| Error code", line)[0][:200]
