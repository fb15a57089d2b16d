"""A trace of what a process and its GPU did, and names for its parts."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_tracing = False


def traced(run: Callable[[], object]) -> bytes:
    """Run it under PyTorch's profiler: a Chrome trace, gzipped, for ui.perfetto.dev."""
    global _tracing
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    _tracing = True
    try:
        with profile(activities=activities) as profiler:
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    finally:
        _tracing = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes(), compresslevel=6)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Call what is done in here by a name, in a trace and as an NVTX or ROCTX range; costs nothing elsewhere."""
    if not _tracing:
        yield
        return
    with record_function(name):
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.nvtx.range_pop()
