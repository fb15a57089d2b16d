"""TunableOp: PyTorch's own search over the kernels of hipBLASLt and rocBLAS, done before anything is timed.

It runs every kernel that accepts the product and keeps the fastest (torch.cuda.tunable). On CUDA it knows the default
kernel alone.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.cuda import tunable

# Milliseconds that one kernel is timed for at most: TunableOp's own default. There are up to thousands of kernels, of
# which slow ones are given up after a few calls; what bounds the whole search is the trial's timeout.
MAX_TUNING_MS = 30


class Tuning(NamedTuple):
    kernel: str  # that was chosen, such as Gemm_Hipblaslt_1219, or Default
    seconds: float  # that the search took; close to 0 for a product that this process has tuned before


_chosen_kernels: dict[str, str] = {}


@contextmanager
def tuned(multiply: Callable[[], object], product: str, rotating_mib: int) -> Iterator[Tuning]:
    """Search for the fastest kernel of a product, and let PyTorch run it until the block ends.

    `product` names its shape, layout and data type. The search rotates among `rotating_mib` of operands, so that a
    cache holds none; 0 for a warm cache.
    """
    tunable.set_filename(f"{_results_folder().name}/results.csv")
    tunable.set_max_tuning_duration(MAX_TUNING_MS)
    tunable.set_rotating_buffer_size(rotating_mib)
    tunable.enable(True)
    # Operator, parameters, kernel and milliseconds of every tuned product; torch's annotation is of one.
    results: Callable[[], Any] = tunable.get_results
    try:
        known = results()
        started = time.perf_counter()
        tunable.tuning_enable(True)
        try:
            multiply()
            torch.cuda.synchronize()
        finally:
            tunable.tuning_enable(False)  # otherwise a product of another shape within the block would be tuned
        seconds = time.perf_counter() - started
        if new := [result for result in results() if result not in known]:
            _chosen_kernels[product] = new[-1][2]
        yield Tuning(_chosen_kernels.get(product, "unknown"), seconds)
    finally:
        tunable.enable(False)


@cache
def _results_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is removed when the process ends: TunableOp writes its results into the current one."""
    return tempfile.TemporaryDirectory(prefix="tunableop")
