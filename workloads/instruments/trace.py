"""Record traces of a process and its GPU, with named ranges.

The ranges in a mixture of experts are named router, permutation and experts.
"""

import gzip
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from workloads.instruments.torch_internals import recorded_events

_tracing = False
EXPERT_PARTS = ("router", "permutation", "experts")


def record_trace(run: Callable[[], object]) -> tuple[bytes, dict[str, float]]:
    """Call `run` under PyTorch's profiler.

    Returns:
        A gzipped Chrome trace, which ui.perfetto.dev opens; and the shares of time in the ranges of EXPERT_PARTS, on
        the GPU if there is one, by metric name.
    """
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
        trace = gzip.compress(path.read_bytes(), compresslevel=6)
    recorded = list(recorded_events(profiler))
    on_gpu = [event for event in recorded if event.device_type() == DeviceType.CUDA]
    events = on_gpu or recorded  # a machine with a GPU can also train on its CPU
    total_ns = max(event.end_ns() for event in events) - min(event.start_ns() for event in events)
    parts_ns = Counter[str]()
    for event in events:
        if event.is_user_annotation() and event.name() in EXPERT_PARTS:
            parts_ns[event.name()] += event.duration_ns()
    return trace, {f"{part}_share": ns / total_ns for part, ns in parts_ns.items()}


@contextmanager
def annotate(name: str) -> Iterator[None]:
    """Label the block in the trace, and as an NVTX or ROCTX range. Does nothing unless a trace is being recorded."""
    if not _tracing:
        yield
        return
    with record_function(name), torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext():
        yield
