"""Record a trace of a process and its GPU, with named ranges."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_tracing = False


def record_trace(run: Callable[[], object]) -> bytes:
    """Call `run` under PyTorch's profiler and return a gzipped Chrome trace, which ui.perfetto.dev opens."""
    global _tracing
    has_gpu, _tracing = torch.cuda.is_available(), True
    try:
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]) as profiler:
            run()
            if has_gpu:
                torch.cuda.synchronize()
    finally:
        _tracing = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes(), compresslevel=6)


@contextmanager
def annotate(name: str) -> Iterator[None]:
    """Name the block in the trace, and as an NVTX or ROCTX range. Does nothing unless a trace is being recorded."""
    if not _tracing:
        yield
        return
    with record_function(name), torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext():
        yield
