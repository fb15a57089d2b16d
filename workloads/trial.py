"""Run one trial in this process, and say what an error in it was.

By hand:  python -m workloads.trial matmul m=1024 n=1024 k=1024 dtype=fp32
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, get_type_hints

from workloads.contract import Measurement, OutOfMemory, Rank, Scalar
from workloads.registry import load, names

# Torch raises its own class for a GPU, but a plain RuntimeError where the CPU's allocator fails.
_CPU_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def run_trial(
    workload: str, parameters: Mapping[str, Scalar], rank: Rank, settings: Mapping[str, Any] | None = None
) -> Measurement:
    """One trial on this rank, of a workload that may have settings.

    Raises Infeasible (OutOfMemory is one), NotAsAsked, or whatever the workload raised.
    """
    loaded: Any = load(workload)
    if settings is not None:
        loaded = loaded.with_settings(loaded.Settings(**settings))
    try:
        measurement = loaded.run(loaded.Parameters(**parameters), rank)
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"out of memory: {_first_line(error)}") from error
        raise
    if differing := differences(measurement, parameters):
        raise NotAsAsked(f"rank {rank.rank} ran {differing}")
    return measurement


class NotAsAsked(Exception):
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


def _by_hand(arguments: list[str]) -> None:
    name, *pairs = arguments
    if name not in names():
        sys.exit(f"{__doc__}\nworkloads: {', '.join(names())}")
    kinds = get_type_hints(load(name).Parameters)
    given = dict(pair.partition("=")[::2] for pair in pairs)
    needed = {f.name for f in fields(load(name).Parameters) if f.default is MISSING}
    if set(given) - set(kinds) or needed - set(given):
        sys.exit(f"{name} has the parameters {', '.join(kinds)}; {', '.join(sorted(needed)) or 'none'} must be given")
    parameters = {key: kinds[key](text) if kinds[key] in (int, float) else text for key, text in given.items()}
    import torch

    rank = Rank(device="cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(asdict(run_trial(name, parameters, rank)), indent=2))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    _by_hand(sys.argv[1:])
