"""The saved activations of a round, on the device or copied to the host and back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workloads.llama.block import Activations
from workloads.offload.memory import Arena, Buffer, CopyStreams
from workloads.offload.plan import PREFETCHED_CHUNKS, Location


@dataclass
class SavedChunk:
    """The saved activations of one chunk at one layer by name: on the device, on the host, or being copied back."""

    on_device: Activations = field(default_factory=dict)
    on_host: dict[str, Buffer] = field(default_factory=dict)
    arriving: dict[str, Buffer] = field(default_factory=dict)


class ActivationStack:
    """The saved activations of all chunks and layers. The backward pass takes those first that were saved last."""

    def __init__(self, arena: Arena, device: torch.device, copy_streams: CopyStreams) -> None:
        self._arena, self._device, self._copy_streams = arena, device, copy_streams
        self._free_host_tensors: dict[tuple[int, torch.dtype], list[Tensor]] = {}  # by number of elements and type
        self._chunks: list[SavedChunk] = []
        self._being_sent: deque[list[Buffer]] = deque()

    def push(self, saved: Activations, location: Location) -> None:
        """Save a chunk's activations. Those for the host are copied there while the computation goes on."""
        if location == "device":
            self._chunks.append(SavedChunk(on_device=saved))
            return
        sources = {name: Buffer(tensor.contiguous()) for name, tensor in saved.items()}
        self._copy_streams.release(*sources.values())
        targets = {name: Buffer(self._allocate_on_host(source.tensor)) for name, source in sources.items()}
        for name, source in sources.items():
            self._copy_streams.copy(targets[name], source, "activations")
        self._chunks.append(SavedChunk(on_host=targets))
        self._being_sent.append(list(sources.values()))
        self.free_sent(1)

    def free_sent(self, remaining: int) -> None:
        """Free the device memory of chunks that were sent to the host, but for the last `remaining` of them.

        Computation waits for their copies.
        """
        while len(self._being_sent) > remaining:
            self._copy_streams.acquire(*self._being_sent.popleft())

    def prefetch(self) -> None:
        """Queue the copies of the chunks that the backward pass needs first."""
        for chunk in self._chunks[-PREFETCHED_CHUNKS:]:
            self._fetch(chunk)

    def pop(self) -> Activations:
        """Return the activations that were saved last, on the device. Queues the copies of those of a later chunk."""
        chunk = self._chunks.pop()
        if len(self._chunks) >= PREFETCHED_CHUNKS:
            self._fetch(self._chunks[-PREFETCHED_CHUNKS])
        self._copy_streams.acquire(*chunk.arriving.values())
        for stored in chunk.on_host.values():
            self._free_host_tensors[stored.tensor.numel(), stored.tensor.dtype].append(stored.tensor.flatten())
        return chunk.on_device | {name: buffer.tensor for name, buffer in chunk.arriving.items()}

    def _fetch(self, chunk: SavedChunk) -> None:
        for name, stored in chunk.on_host.items():
            chunk.arriving[name] = Buffer(torch.empty_like(stored.tensor, device=self._device))
            self._copy_streams.release(chunk.arriving[name])
            self._copy_streams.copy(chunk.arriving[name], stored, "activations")

    def _allocate_on_host(self, template: Tensor) -> Tensor:
        free = self._free_host_tensors.setdefault((template.numel(), template.dtype), [])
        flat = free.pop() if free else self._arena.allocate(template.numel(), template.dtype)
        return flat.view(template.shape)
