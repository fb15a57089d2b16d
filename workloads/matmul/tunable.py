"""TunableOp: PyTorch's own search over the kernels of hipBLASLt and rocBLAS, done before anything is timed.

TunableOp runs every kernel that accepts the GEMM and keeps the fastest (torch.cuda.tunable). On CUDA, TunableOp has
only the default kernel.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.cuda import tunable

# The maximum time for timing one kernel, in milliseconds: TunableOp's own default. There may be thousands of kernels,
# and slow ones are abandoned after a few calls. The trial's timeout limits the whole search.
MAX_TUNING_MS = 30


class Tuning(NamedTuple):
    kernel: str  # the chosen kernel, such as Gemm_Hipblaslt_1219, or Default
    seconds: float  # the duration of the search; close to 0 for a GEMM that this process has already tuned


_chosen_kernels: dict[str, str] = {}


@contextmanager
def tuned(multiply: Callable[[], object], product: str, rotating_mib: int) -> Iterator[Tuning]:
    """Search for the fastest kernel for a GEMM, and make PyTorch run that kernel within the context.

    `product` describes the GEMM's shape, layout and data type. The search rotates through `rotating_mib` MiB of
    operands, so that none of them is cached; 0 gives a warm cache.
    """
    tunable.set_filename(f"{_results_folder().name}/results.csv")
    tunable.set_max_tuning_duration(MAX_TUNING_MS)
    tunable.set_rotating_buffer_size(rotating_mib)
    tunable.enable(True)
    # The operator, parameters, kernel and milliseconds of every tuned GEMM; torch's annotation describes only one.
    results: Callable[[], Any] = tunable.get_results
    try:
        known = results()
        started = time.perf_counter()
        tunable.tuning_enable(True)
        try:
            multiply()
            torch.cuda.synchronize()
        finally:
            tunable.tuning_enable(False)  # otherwise a GEMM of another shape within the block would be tuned
        seconds = time.perf_counter() - started
        if new := [result for result in results() if result not in known]:
            _chosen_kernels[product] = new[-1][2]
        yield Tuning(_chosen_kernels.get(product, "unknown"), seconds)
    finally:
        tunable.enable(False)


@cache
def _results_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder for TunableOp's results, which otherwise go to the current folder."""
    return tempfile.TemporaryDirectory(prefix="tunableop")
