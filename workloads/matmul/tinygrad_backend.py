"""Matrix products with tinygrad's kernels."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from workloads.api.contract import Infeasible

# Width of tinygrad's beam search over kernels for a shape, each compiled and timed; its documentation advises 2.
BEAM = 2
# Processes that compile the candidates of a search: about a thousand, each for half a second.
COMPILERS = min(8, os.cpu_count() or 1)
# tinygrad 0.14 computes wrong products where tensor cores are combined with three further splits into threads, and its
# search takes the fastest kernel, correct or not. Blocks of at most MAX_THREADS leave a warp of 32 and two splits.
# Upstream a warp has since got a dimension of its own (tinygrad/tinygrad#17897, not released).
MAX_THREADS = 128


def device_name(device: torch.device) -> str:
    """Return tinygrad's name of a GPU. Raises Infeasible if tinygrad is not installed.

    The generated kernels run on the driver's ordinary interface (CUDA, HIP): tinygrad's own drivers would take the GPU
    away from PyTorch. Its HIP device loads libamdhip64 as PyTorch's build for ROCm does, and both see the GPUs of
    HIP_VISIBLE_DEVICES, so that index 0 is the worker's GPU (tinygrad 0.14, runtime/ops_hip.py; read, not run).
    """
    if importlib.util.find_spec("tinygrad") is None:
        raise Infeasible("backend=tinygrad: tinygrad is not installed; run pip install 'gpu-sweeper[tinygrad]'")
    return f"{'HIP' if torch.version.hip else 'CUDA'}:{device.index or 0}"


def build_gemm(
    a: torch.Tensor, b: torch.Tensor, tinygrad_device: str, *, beam: int = BEAM
) -> tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]:
    """Return a function that computes C = A·B with tinygrad, and one that converts its result to a PyTorch tensor.

    The first writes C into the same memory at each call. tinygrad has its own context on the GPU, so it gets copies of
    a[m, k] and b[k, n] in the same memory layout, and its work is in no stream of PyTorch: a call waits for PyTorch's
    queue before it starts, and for its own end. That wait and the launch, some tens of microseconds, count.
    """
    from tinygrad import Context, Device, TinyJit, dtypes
    from tinygrad.engine.worker import terminate_worker_pool
    from tinygrad.helpers import LRU

    os.environ["BEAM_LOCAL_MAX"] = str(MAX_THREADS)
    LRU.value = 0  # otherwise tinygrad caches the memory of earlier trials, and PyTorch cannot allocate it
    a_copy, b_copy = _copy(a, tinygrad_device), _copy(b, tinygrad_device)

    @TinyJit
    def multiply(x: Any, y: Any) -> Any:
        return x.matmul(y).realize()

    def run() -> Any:
        if a.is_cuda:
            torch.cuda.synchronize(a.device)
        c = multiply(a_copy, b_copy)
        Device[tinygrad_device].synchronize()
        return c

    def fetch(c: Any) -> torch.Tensor:
        if a.dtype == torch.bfloat16:
            return torch.from_numpy(c.bitcast(dtypes.int16).numpy()).view(torch.bfloat16).to(a.device)
        return torch.from_numpy(c.numpy()).to(a.device)

    # The first call tunes the kernel, the second one captures it. CACHELEVEL=0 disables tinygrad's cache on disk, in
    # which another program's search may have stored a wrong kernel.
    with Context(BEAM=beam, PARALLEL=COMPILERS, CACHELEVEL=0):
        run()
        run()
    terminate_worker_pool()  # the compilers must not compete with the timed calls
    return run, fetch


def _copy(matrix: torch.Tensor, tinygrad_device: str) -> Any:
    from tinygrad import Tensor, dtypes

    tinygrad_dtypes = {torch.float32: dtypes.float32, torch.float16: dtypes.float16, torch.bfloat16: dtypes.bfloat16}
    transposed = not matrix.is_contiguous()
    row_major = (matrix.t() if transposed else matrix).cpu()
    if matrix.dtype == torch.bfloat16:  # a type that numpy lacks
        row_major = row_major.view(torch.int16)
    copy = Tensor(row_major.numpy(), device=tinygrad_device).bitcast(tinygrad_dtypes[matrix.dtype])
    copy = copy.contiguous().realize()
    return copy.T if transposed else copy
