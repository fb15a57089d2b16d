"""The saved activations of a round, on the device or copied to the host and back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workloads.llama.block import Activations
from workloads.offload.memory import Arena, Buffer, CopyStreams
from workloads.offload.plan import CHUNKS_IN_FLIGHT, Location


@dataclass
class SavedChunk:
    """The saved activations of one chunk at one layer by name: on the device, or on the host and being copied.

    Attributes:
        in_flight: the buffers on the device that are being copied to the host or back.
    """

    on_device: Activations = field(default_factory=dict)
    on_host: dict[str, Buffer] = field(default_factory=dict)
    in_flight: dict[str, Buffer] = field(default_factory=dict)


class ActivationStack:
    """The saved activations of all chunks and layers. The backward pass takes those first that were saved last."""

    def __init__(self, arena: Arena, device: torch.device, copy_streams: CopyStreams) -> None:
        self._arena, self._device, self._copy_streams = arena, device, copy_streams
        self._free_host_tensors: dict[tuple[int, torch.dtype], list[Tensor]] = {}  # by number of elements and type
        self._chunks: list[SavedChunk] = []
        self._on_host: list[SavedChunk] = []  # those of `_chunks` whose activations are on the host alone
        self._leaving: deque[SavedChunk] = deque()

    def push(self, saved: Activations, location: Location) -> None:
        """Save a chunk's activations. Those for the host are copied there while the computation goes on.

        Computation waits for the oldest copies if more than CHUNKS_IN_FLIGHT chunks are being copied.
        """
        if location == "device":
            self._chunks.append(SavedChunk(on_device=saved))
            return
        sources = {name: Buffer(tensor.contiguous()) for name, tensor in saved.items()}
        self._copy_streams.release(*sources.values())
        targets = {name: Buffer(self._allocate_on_host(source.tensor)) for name, source in sources.items()}
        for name, source in sources.items():
            self._copy_streams.copy(targets[name], source, "activations")
        chunk = SavedChunk(on_host=targets, in_flight=sources)
        self._chunks.append(chunk)
        self._leaving.append(chunk)
        if len(self._leaving) > CHUNKS_IN_FLIGHT:
            sent = self._leaving.popleft()
            self._copy_streams.acquire(*sent.in_flight.values())
            sent.in_flight = {}
            self._on_host.append(sent)

    def start_backward(self) -> None:
        """Queue the copies of the chunks that the backward pass needs first.

        The chunks that are still being copied to the host are the first that it needs: they stay on the device.
        """
        remaining = CHUNKS_IN_FLIGHT - len(self._leaving)
        self._leaving.clear()
        for _ in range(remaining):
            self._fetch_next()

    def pop(self) -> Activations:
        """Return the activations that were saved last, on the device. Queues the copies of those of a later chunk."""
        chunk = self._chunks.pop()
        if not chunk.on_host:
            return chunk.on_device
        self._fetch_next()
        self._copy_streams.acquire(*chunk.in_flight.values())
        for stored in chunk.on_host.values():
            self._free_host_tensors[stored.tensor.numel(), stored.tensor.dtype].append(stored.tensor.flatten())
        return {name: buffer.tensor for name, buffer in chunk.in_flight.items()}

    def _fetch_next(self) -> None:
        """Queue the copies of the chunk that was saved last of those on the host, if there is one."""
        if not self._on_host:
            return
        chunk = self._on_host.pop()
        for name, stored in chunk.on_host.items():
            chunk.in_flight[name] = Buffer(torch.empty_like(stored.tensor, device=self._device))
            self._copy_streams.release(chunk.in_flight[name])
            self._copy_streams.copy(chunk.in_flight[name], stored, "activations")

    def _allocate_on_host(self, template: Tensor) -> Tensor:
        free = self._free_host_tensors.setdefault((template.numel(), template.dtype), [])
        flat = free.pop() if free else self._arena.allocate(template.numel(), template.dtype)
        return flat.view(template.shape)
