"""Memory with a budget: one pinned arena on the host, and buffers whose copies know what they have to wait for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workloads.contract import OutOfMemory
from workloads.host import available_memory_bytes

ALIGNMENT = 512


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

    def close(self) -> None:
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
    """The streams: the current one computes, two others copy, one each way. On a CPU everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.copied_bytes = 0
        if self.on_gpu:
            self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Queue a copy between host and device, after everything that is queued on either."""
        self.copied_bytes += source.tensor.numel() * source.tensor.element_size()
        if not self.on_gpu:
            target.tensor.copy_(source.tensor)
            return
        stream = self._up if target.tensor.is_cuda else self._down
        self._wait(stream, target, source)
        with torch.cuda.stream(stream):
            target.tensor.copy_(source.tensor, non_blocking=True)
            done = stream.record_event()
        target.last = source.last = done

    def keep_until_copied(self, tensor: torch.Tensor) -> None:
        """The allocator may not give its memory to another before what is queued down from it is done."""
        if self.on_gpu:
            tensor.record_stream(self._down)

    def acquire(self, *buffers: Buffer) -> None:
        """Computation queued from now on waits for what is queued on these."""
        if self.on_gpu:
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
