"""Host memory within a budget, and the streams that copy between host and device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from workloads.api.contract import OutOfMemory, Scalar
from workloads.api.host import available_memory_bytes
from workloads.offload import numa

ALIGNMENT_BYTES = 512
Traffic = Literal["parameters", "activations"]
TRAFFIC: tuple[Traffic, ...] = ("parameters", "activations")


class Arena:
    """The only host memory that a training run stores state in: one block, pinned where there is a GPU.

    Nothing that is allocated from it is returned to it.

    Attributes:
        placement: on a machine with several NUMA nodes, those of the GPU and of the block's pages; else empty.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Allocate the block on the GPU's NUMA node and pin it.

        Raises:
            OutOfMemory: the host has less memory available, or does not pin as much.
        """
        self.size_bytes = size_bytes
        self.used_bytes = 0
        if size_bytes > (available := available_memory_bytes()):
            raise OutOfMemory(
                f"the arena for host_gib needs {size_bytes / 2**30:.1f} GiB of host memory, "
                f"{available / 2**30:.1f} GiB are available"
            )
        self._block = torch.empty(size_bytes, dtype=torch.uint8)
        self.placement = self._place_block(device)
        self._pinned = device.type == "cuda" and size_bytes > 0
        if self._pinned:
            error = torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), size_bytes, 0)
            if int(error) != 0:
                raise OutOfMemory(
                    f"cudaHostRegister failed with error {int(error)}: the host does not pin {size_bytes / 2**30:.1f} "
                    "GiB for host_gib"
                )

    def _place_block(self, device: torch.device) -> dict[str, Scalar]:
        """Bind the block's pages and touch them: pages that are touched are pinned in an eighth of the time."""
        node = numa.node_of(device)
        error = numa.bind_pages(self._block, node) if node is not None else ""
        self._block.zero_()
        if node is None:
            return {}
        nodes = " ".join(map(str, sorted(numa.read_nodes(self._block)))) or "unknown"
        return {"gpu_numa_node": node, "host_numa_nodes": f"{nodes} (not bound: {error})" if error else nodes}

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of `numel` numbers.

        Raises:
            OutOfMemory: the arena has less memory left.
        """
        size_bytes = numel * dtype.itemsize
        start = -(-self.used_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if start + size_bytes > self.size_bytes:
            raise OutOfMemory(
                f"the host arena of {self.size_bytes / 2**30:.2f} GiB is {start + size_bytes - self.size_bytes} bytes "
                "too small"
            )
        self.used_bytes = start + size_bytes
        return self._block[start : start + size_bytes].view(dtype)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        """Unpin the block. Its tensors must not be used any more."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())
            self._pinned = False


@dataclass
class Buffer:
    """A tensor and the event of the last work queued on it, which its next user waits for on any stream."""

    tensor: torch.Tensor
    last_event: torch.cuda.Event | None = None


class CopyStreams:
    """The CUDA streams of a training run: the current one computes, others copy. On a CPU every copy is synchronous.

    Each kind of traffic has one stream in each direction, so that a copy that is needed soon is not queued behind one
    that has to wait. On AMD's GPUs these five streams share four hardware queues by default, and streams on one queue
    wait for each other (ROCm/rocm-systems#8916, ROCm/hip#3769): `space.env.GPU_MAX_HW_QUEUES` searches their number.

    Attributes:
        copied_bytes: bytes of all copies so far, in both directions.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.copied_bytes = 0
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._span_times_s: dict[str, float] = defaultdict(float)
        if self.on_gpu:
            self._h2d = {traffic: torch.cuda.Stream(device) for traffic in TRAFFIC}
            self._d2h = {traffic: torch.cuda.Stream(device) for traffic in TRAFFIC}

    def copy(self, target: Buffer, source: Buffer, traffic: Traffic = "parameters") -> None:
        """Queue a copy between host and device, after everything that is queued on either buffer."""
        self.copied_bytes += source.tensor.numel() * source.tensor.element_size()
        if not self.on_gpu:
            target.tensor.copy_(source.tensor)
            return
        stream = (self._h2d if target.tensor.is_cuda else self._d2h)[traffic]
        self._wait_for_events(stream, target, source)
        with torch.cuda.stream(stream):
            target.tensor.copy_(source.tensor, non_blocking=True)
            done = stream.record_event()
        target.last_event = source.last_event = done

    def acquire(self, *buffers: Buffer) -> None:
        """Let computation that is queued from now on wait for the work queued on these buffers."""
        if self.on_gpu and any(buffer.last_event is not None for buffer in buffers):
            with self.span("copy_wait"):
                self._wait_for_events(torch.cuda.current_stream(), *buffers)

    def release(self, *buffers: Buffer) -> None:
        """Let the next user of these buffers wait for the computation queued so far."""
        if self.on_gpu:
            done = torch.cuda.current_stream().record_event()
            for buffer in buffers:
                buffer.last_event = done

    def _wait_for_events(self, stream: torch.cuda.Stream, *buffers: Buffer) -> None:
        for buffer in buffers:
            if buffer.last_event is not None:
                stream.wait_event(buffer.last_event)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time that the computing stream spends in this context to the span `name`."""
        if not self.on_gpu:
            started = time.perf_counter()
            yield
            self._span_times_s[name] += time.perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._spans[name].append((begin, end))

    def take_span_times_s(self) -> dict[str, float]:
        """Return the seconds of each span since the last call. All queued work must be done."""
        for name, events in self._spans.items():
            self._span_times_s[name] += sum(begin.elapsed_time(end) for begin, end in events) / 1000
        times_s = dict(self._span_times_s)
        self._spans.clear()
        self._span_times_s.clear()
        return times_s
