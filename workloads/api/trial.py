"""Run one trial in this process and classify its errors."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from workloads.api.contract import Measurement, OutOfMemory, ParameterMismatch, Rank, Scalar
from workloads.api.errors import first_line, message_of
from workloads.api.registry import load

# Messages of failed allocations outside PyTorch's GPU allocator, such as a library's workspace. PyTorch raises
# OutOfMemoryError if the GPU allocator fails, but a plain RuntimeError if the CPU allocator fails.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
)


def run_trial(
    workload: str, parameters: Mapping[str, Scalar], rank: Rank, settings: Mapping[str, Any] | None = None
) -> Measurement:
    """Run one trial of a registered workload on this rank. `settings` is the workload's section of the configuration.

    Raises Infeasible (including OutOfMemory), ParameterMismatch, and any other exception that the workload raises.
    """
    loaded = load(workload)
    if settings is not None and loaded.Settings is not None:
        loaded = loaded.with_settings(loaded.Settings(**settings))
    try:
        measurement = loaded.run(loaded.Parameters(**parameters), rank)
    except Exception as error:
        if is_out_of_memory(error):
            # Cut PyTorch's advice, but keep the reserved memory, which shows whether memory is fragmented.
            line = re.sub(r"^\[enforce fail at [^]]*\] (err == 0\. )?", "", first_line(error))
            line = re.split(r" If reserved but unallocated| Error code", line)[0]
            raise OutOfMemory(f"out of memory: {line}") from error
        raise
    if mismatches := describe_mismatches(measurement, parameters):
        raise ParameterMismatch(f"rank {rank.rank} executed {mismatches}")
    return measurement


def describe_mismatches(measurement: Measurement, requested: Mapping[str, Scalar]) -> str:
    """Describe the parameters whose executed values differ from the requested values; empty if there are none."""
    executed = {name: measurement.executed.get(name, "<missing>") for name in requested}
    return "; ".join(
        f"{name}={executed[name]}, requested {value}"
        for name, value in requested.items()
        if executed[name] != value and (value == value or executed[name] == executed[name])  # nan differs from itself
    )


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error reports that the device or the host ran out of memory."""
    torch = sys.modules.get("torch")  # not imported here, because a workload without torch would wait for the import
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in message_of(error) for text in _OUT_OF_MEMORY)
