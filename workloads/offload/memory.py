"""Memory with a budget: one pinned arena on the host, and buffers whose copies know what they have to wait for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from workloads.api.contract import OutOfMemory
from workloads.api.host import available_memory_bytes

ALIGNMENT = 512
LANES = ("parameters", "activations")


class Arena:
    """The only host memory that state is kept in: one block, pinned where there is a GPU, handed out once."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size, self.used = size_bytes, 0
        if size_bytes > (available := available_memory_bytes()):
            raise OutOfMemory(
                f"the host's arena needs {size_bytes / 2**30:.1f} GiB, {available / 2**30:.1f} are available"
            )
        self._block = torch.zeros(size_bytes, dtype=torch.uint8)  # touched, then registered: eight times as fast
        self._pinned = device.type == "cuda" and size_bytes > 0
        if self._pinned:
            error = torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), size_bytes, 0)
            if int(error) != 0:
                raise OutOfMemory(f"the host does not pin {size_bytes / 2**30:.1f} GiB (error {int(error)})")

    def take(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor. Raises OutOfMemory past the budget."""
        size = numbers * dtype.itemsize
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + size > self.size:
            raise OutOfMemory(f"the host's arena of {self.size / 2**30:.2f} GiB lacks {start + size - self.size} bytes")
        self.used = start + size
        return self._block[start : start + size].view(dtype)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        """Unpin it; its tensors are not to be used any more."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())
            self._pinned = False


@dataclass
class Buffer:
    """A tensor and the last work queued on it. Whoever uses it next waits for that, on whatever stream."""

    tensor: torch.Tensor
    last: torch.cuda.Event | None = None


class Queues:
    """The streams: the current one computes, others copy, one each way in each lane, so that what is needed soon does
    not stand behind what has to wait. On a CPU everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.copied_bytes = 0
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._spent_s: dict[str, float] = defaultdict(float)
        if self.on_gpu:
            self._up, self._down = ({lane: torch.cuda.Stream(device) for lane in LANES} for _ in range(2))

    def copy(self, target: Buffer, source: Buffer, lane: str = "parameters") -> None:
        """Queue a copy between host and device, after everything that is queued on either."""
        self.copied_bytes += source.tensor.numel() * source.tensor.element_size()
        if not self.on_gpu:
            target.tensor.copy_(source.tensor)
            return
        stream = (self._up if target.tensor.is_cuda else self._down)[lane]
        self._wait(stream, target, source)
        with torch.cuda.stream(stream):
            target.tensor.copy_(source.tensor, non_blocking=True)
            done = stream.record_event()
        target.last = source.last = done

    def acquire(self, *buffers: Buffer) -> None:
        """Computation queued from now on waits for what is queued on these."""
        if self.on_gpu and any(buffer.last is not None for buffer in buffers):
            with self.span("copy_wait"):
                self._wait(torch.cuda.current_stream(), *buffers)

    def release(self, *buffers: Buffer) -> None:
        """Whoever uses these next waits for the computation queued so far."""
        if self.on_gpu:
            done = torch.cuda.current_stream().record_event()
            for buffer in buffers:
                buffer.last = done

    def _wait(self, stream: torch.cuda.Stream, *buffers: Buffer) -> None:
        for buffer in buffers:
            if buffer.last is not None:
                stream.wait_event(buffer.last)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what the computing stream spends in here under a name."""
        if not self.on_gpu:
            started = time.perf_counter()
            yield
            self._spent_s[name] += time.perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._spans[name].append((begin, end))

    def spent_s(self) -> dict[str, float]:
        """Seconds by name since the last call, once everything queued is done."""
        for name, spans in self._spans.items():
            self._spent_s[name] += sum(begin.elapsed_time(end) for begin, end in spans) / 1000
        found = dict(self._spent_s)
        self._spans.clear()
        self._spent_s.clear()
        return found
