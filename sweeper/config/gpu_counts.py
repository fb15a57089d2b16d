"""Values of a space that follow from the number of a trial's GPUs.

tp: divisors(gpus)               every degree that the number allows: 1, 2, 3 and 6 of 6 GPUs
global_batch: multiple(gpus, 64) the smallest multiple of the GPUs from 64 on
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sweeper.config.resolution import ResolvedConfig
from workloads.layouts.enumeration import divisors

DIVISORS = "divisors(gpus)"
MULTIPLE = re.compile(r"multiple\(gpus, *([1-9]\d*)\)")


def apply_gpu_count(resolved: ResolvedConfig, gpus: int) -> ResolvedConfig:
    """Return the configuration with the values that this number of GPUs gives."""
    return resolved.with_space({name: apply_to_entry(entry, gpus) for name, entry in resolved.config.space.items()})


def apply_to_entry(entry: Any, gpus: int) -> Any:
    """Return an entry of a space with what this number of GPUs gives."""
    if isinstance(entry, Mapping):
        return {name: apply_to_entry(value, gpus) for name, value in entry.items()}
    if entry == DIVISORS:
        return list(divisors(gpus))
    if isinstance(entry, str) and (multiple := MULTIPLE.fullmatch(entry)):
        return -(-int(multiple[1]) // gpus) * gpus
    return entry
