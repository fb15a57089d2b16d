"""tinygrad's kernels for a product, beside those of PyTorch's libraries."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from workloads.api.contract import Infeasible

# How wide tinygrad searches among its kernels for a shape, each compiled and timed: 2 is what its own notes advise.
BEAM = 2
# Processes that compile the thousand or so candidates of a search, each for half a second.
COMPILERS = min(8, os.cpu_count() or 1)
# tinygrad 0.14 multiplies wrongly where tensor cores meet three further splits into threads, and its search takes the
# fastest kernel, right or not: with so many threads in a block at most there is a warp of 32 and two splits. Upstream a
# warp has since been given a dimension of its own (tinygrad/tinygrad#17897, not released).
MOST_THREADS = 128


def device_of(device: torch.device) -> str:
    """tinygrad's name of a GPU; Infeasible where it cannot be used.

    The generated kernels run on the driver's ordinary interface (CUDA, HIP): tinygrad's own drivers would take the GPU
    away from PyTorch.
    """
    if importlib.util.find_spec("tinygrad") is None:
        raise Infeasible("tinygrad is not installed: pip install 'gpu-sweeper[tinygrad]'")
    return f"{'HIP' if torch.version.hip else 'CUDA'}:{device.index or 0}"


def product(
    a: torch.Tensor, b: torch.Tensor, on: str, *, beam: int = BEAM
) -> tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]:
    """What computes C = A·B on tinygrad's device `on`, into the same memory each time, and what hands it to PyTorch.

    tinygrad has a context of its own on the GPU, so it gets copies of a[m, k] and b[k, n], as they lie in memory, and
    its work stands in no stream of PyTorch's: a call waits for PyTorch's queue before it starts, and for its own end.
    That wait and the launch, some tens of microseconds, are in its time.
    """
    from tinygrad import Context, Device, TinyJit, dtypes
    from tinygrad.engine.worker import terminate_worker_pool
    from tinygrad.helpers import LRU

    os.environ["BEAM_LOCAL_MAX"] = str(MOST_THREADS)
    LRU.value = 0  # or it would keep what trials before had, and PyTorch could not get it
    ours, theirs = _copy(a, on), _copy(b, on)

    @TinyJit
    def multiply(x: Any, y: Any) -> Any:
        return x.matmul(y).realize()

    def run() -> Any:
        if a.is_cuda:
            torch.cuda.synchronize(a.device)
        c = multiply(ours, theirs)
        Device[on].synchronize()
        return c

    def fetch(c: Any) -> torch.Tensor:
        if a.dtype == torch.bfloat16:
            return torch.from_numpy(c.bitcast(dtypes.int16).numpy()).view(torch.bfloat16).to(a.device)
        return torch.from_numpy(c.numpy()).to(a.device)

    # Tuned at the first call and kept at the second; what compiled must not compete with what is timed. Without what
    # tinygrad keeps on disk: another program's search may have put a wrong kernel there.
    with Context(BEAM=beam, PARALLEL=COMPILERS, CACHELEVEL=0):
        run()
        run()
    terminate_worker_pool()
    return run, fetch


def _copy(matrix: torch.Tensor, on: str) -> Any:
    """The matrix as tinygrad's, in the same order in memory."""
    from tinygrad import Tensor, dtypes

    kinds = {torch.float32: dtypes.float32, torch.float16: dtypes.float16, torch.bfloat16: dtypes.bfloat16}
    turned = not matrix.is_contiguous()
    lying = (matrix.t() if turned else matrix).cpu()
    if matrix.dtype == torch.bfloat16:  # a type that numpy lacks
        lying = lying.view(torch.int16)
    copied = Tensor(lying.numpy(), device=on).bitcast(kinds[matrix.dtype]).contiguous().realize()
    return copied.T if turned else copied
