"""Copies between host and device during computation: streams, slots of layers, and saved activations."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from workloads.llama.block import Activations, NamedTensors
from workloads.offload.host_memory import Arena
from workloads.offload.plan import CHUNKS_IN_FLIGHT, Location

Traffic = Literal["parameters", "activations"]


@dataclass
class Buffer:
    """A tensor and the event of the last work queued on it. The next user, on any stream, waits for this event."""

    tensor: Tensor
    last_event: torch.cuda.Event | None = None


class CopyStreams:
    """The CUDA streams of a training run: the current one computes, others copy. On a CPU every copy is synchronous.

    Each kind of traffic has one stream per direction, so that an urgent copy is not queued behind a copy that has to
    wait. On AMD's GPUs these five streams share four hardware queues by default, and streams on one queue wait for each
    other (ROCm/rocm-systems#8916, ROCm/hip#3769): `space.env.GPU_MAX_HW_QUEUES` searches over the number of queues.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.copied_bytes = 0  # of all copies so far, in both directions
        self.exchanged_bytes = 0  # received from other GPUs
        self.skips_exchanges = False
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._span_times_s: dict[str, float] = defaultdict(float)
        if self.on_gpu:
            self._h2d = {traffic: torch.cuda.Stream(device) for traffic in get_args(Traffic)}
            self._d2h = {traffic: torch.cuda.Stream(device) for traffic in get_args(Traffic)}
            self._links = torch.cuda.Stream(device)

    def copy(self, target: Buffer, source: Buffer, traffic: Traffic = "parameters") -> None:
        """Queue a copy between host and device, after all work that is already queued on either buffer."""
        self.copied_bytes += source.tensor.nbytes
        if not self.on_gpu:
            target.tensor.copy_(source.tensor)
            return
        stream = (self._h2d if target.tensor.is_cuda else self._d2h)[traffic]
        self._wait_for_events(stream, target, source)
        with torch.cuda.stream(stream):
            target.tensor.copy_(source.tensor, non_blocking=True)
            done = stream.record_event()
        target.last_event = source.last_event = done

    def exchange(self, collective: Callable[[], object], received_bytes: int, *buffers: Buffer) -> None:
        """Queue an exchange with other GPUs, after all work that is already queued on `buffers`."""
        if self.skips_exchanges:
            return
        self.exchanged_bytes += received_bytes
        if not self.on_gpu:
            collective()
            return
        self._wait_for_events(self._links, *buffers)
        with torch.cuda.stream(self._links):
            collective()
            done = self._links.record_event()
        for buffer in buffers:
            buffer.last_event = done

    def acquire(self, *buffers: Buffer) -> None:
        """Make later computation wait for the work that is queued on these buffers."""
        if self.on_gpu and any(buffer.last_event is not None for buffer in buffers):
            with self.span("copy_wait"):
                self._wait_for_events(torch.cuda.current_stream(), *buffers)

    def release(self, *buffers: Buffer) -> None:
        """Make the next user of these buffers wait for the computation queued so far."""
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
        """Add the time that the computation stream spends in this context to the span `name`."""
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
        """Return the duration of each span since the last call, in seconds. All queued work must have finished."""
        for name, events in self._spans.items():
            self._span_times_s[name] += sum(begin.elapsed_time(end) for begin, end in events) / 1000
        times_s = dict(self._span_times_s)
        self._spans.clear()
        self._span_times_s.clear()
        return times_s


@dataclass
class Slot:
    """One layer's vector on the device."""

    buffer: Buffer
    tensors: NamedTensors  # views of the vector's parts by parameter name
    layer: int = -1  # the layer that the vector belongs to; -1: none yet


class LayerSlots:
    """The slots of all layers' weights or gradients. A resident layer has its own; `streamed_layers` share some."""

    def __init__(
        self,
        stored: Sequence[Buffer | None],  # of each layer's vector; None if nothing is stored between two uses
        resident: Sequence[bool],  # whether that buffer stays on the device and is the layer's slot
        shared: Sequence[Buffer],  # on the device, for streamed layers
        split: Callable[[Tensor], NamedTensors],  # returns the parts of a layer's vector by name
        copy_streams: CopyStreams,
    ) -> None:
        self._stored, self._copy_streams = stored, copy_streams
        self.streamed_layers = [n for n, is_resident in enumerate(resident) if not is_resident]
        kept = [(n, buffer) for n, buffer in enumerate(stored) if resident[n] and buffer is not None]
        self._resident = {n: Slot(buffer, split(buffer.tensor), n) for n, buffer in kept}
        self._shared = [Slot(buffer, split(buffer.tensor)) for buffer in shared]

    def get(self, n: int) -> Slot:
        """Return the slot of layer n, which may still hold another layer's vector."""
        if n in self._resident:
            return self._resident[n]
        return self._shared[self.streamed_layers.index(n) % len(self._shared)]

    def fetch(self, n: int) -> Slot:
        """Return the slot of layer n. Queue the copy of the layer's vector unless the slot already holds it."""
        slot, stored = self.get(n), self._stored[n]
        if slot.layer != n:
            assert stored is not None
            self._copy_streams.copy(slot.buffer, stored)
            slot.layer = n
        return slot

    def store(self, n: int) -> None:
        """Queue the copy of layer n's slot to the buffer that stores the vector, unless they are the same."""
        slot, stored = self.get(n), self._stored[n]
        if stored is not None and stored is not slot.buffer:
            self._copy_streams.copy(stored, slot.buffer)

    def invalidate(self) -> None:
        """Mark the shared slots as empty, since the stored vectors have changed."""
        for slot in self._shared:
            slot.layer = -1


@dataclass
class SavedChunk:
    """The saved activations of one chunk at one layer by name: on the device, or on the host and being copied."""

    on_device: Activations = field(default_factory=dict)
    on_host: dict[str, Buffer] = field(default_factory=dict)
    in_flight: dict[str, Buffer] = field(default_factory=dict)  # on the device, being copied to the host or back


class ActivationStack:
    """The saved activations of all chunks and layers. The backward pass takes chunks in reverse order."""

    def __init__(self, arena: Arena, device: torch.device, copy_streams: CopyStreams) -> None:
        self._arena, self._device, self._copy_streams = arena, device, copy_streams
        # Keyed by number of elements and type.
        self._free_host_tensors: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._chunks: list[SavedChunk] = []
        self._on_host: list[SavedChunk] = []  # chunks whose activations are only on the host
        self._leaving: deque[SavedChunk] = deque()

    def push(self, saved: Activations, location: Location) -> None:
        """Save a chunk's activations. Activations with location `host` are copied there during computation. Computation
        waits for the oldest copies if more than CHUNKS_IN_FLIGHT chunks are being copied."""
        if location == "device":
            self._chunks.append(SavedChunk(on_device=saved))
            return
        sources = {name: Buffer(tensor.contiguous()) for name, tensor in saved.items()}
        self._copy_streams.release(*sources.values())
        targets = {}
        for name, source in sources.items():
            numel, dtype = source.tensor.numel(), source.tensor.dtype
            free = self._free_host_tensors[numel, dtype]
            flat = free.pop() if free else self._arena.allocate(numel, dtype)
            targets[name] = Buffer(flat.view(source.tensor.shape))
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
        """Queue the copies of the chunks that the backward pass needs first."""
        for _ in range(CHUNKS_IN_FLIGHT - len(self._leaving)):
            self._fetch_next()
        self._leaving.clear()  # the backward pass needs these first, so they stay on the device

    def pop(self) -> Activations:
        """Return the most recently saved activations, on the device. Also queues the copies for a later chunk."""
        chunk = self._chunks.pop()
        if not chunk.on_host:
            return chunk.on_device
        self._fetch_next()
        self._copy_streams.acquire(*chunk.in_flight.values())
        for stored in chunk.on_host.values():
            self._free_host_tensors[stored.tensor.numel(), stored.tensor.dtype].append(stored.tensor.flatten())
        return {name: buffer.tensor for name, buffer in chunk.in_flight.items()}

    def _fetch_next(self) -> None:
        if not self._on_host:
            return
        chunk = self._on_host.pop()
        for name, stored in chunk.on_host.items():
            chunk.in_flight[name] = Buffer(torch.empty_like(stored.tensor, device=self._device))
            self._copy_streams.release(chunk.in_flight[name])
            self._copy_streams.copy(chunk.in_flight[name], stored, "activations")
