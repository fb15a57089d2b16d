"""The device buffers in which layers compute: a resident layer has its own, streamed layers share a few in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from workloads.offload.memory import Buffer, CopyStreams

NamedTensors = dict[str, Tensor]


@dataclass
class Slot:
    """One layer's vector on the device.

    Attributes:
        tensors: views of the vector's parts by parameter name.
        layer: the index of the layer whose vector it holds; -1: none yet.
    """

    buffer: Buffer
    tensors: NamedTensors
    layer: int = -1


class LayerSlots:
    """The slots of all layers, for their weights or for their gradients.

    Attributes:
        streamed_layers: the indices of the layers that share slots.
    """

    def __init__(
        self,
        stored: Sequence[Buffer | None],
        resident: Sequence[bool],
        shared_slots: int,
        allocate: Callable[[], Buffer],
        split: Callable[[Tensor], NamedTensors],
        copy_streams: CopyStreams,
    ) -> None:
        """Allocate the slots that streamed layers share.

        Args:
            stored: the buffer that stores each layer's vector; None if nothing is stored between two uses.
            resident: whether that buffer stays on the device and is the layer's slot.
            shared_slots: the number of slots that streamed layers share, at most one for each.
            allocate: returns a device buffer for one layer's vector.
            split: returns the parts of a layer's vector by name.
        """
        self._stored, self._copy_streams = stored, copy_streams
        self.streamed_layers = [n for n, is_resident in enumerate(resident) if not is_resident]
        self._resident = {
            n: Slot(buffer, split(buffer.tensor), n)
            for n, buffer in enumerate(stored)
            if resident[n] and buffer is not None
        }
        shared = [allocate() for _ in self.streamed_layers[:shared_slots]]
        self._shared = [Slot(buffer, split(buffer.tensor)) for buffer in shared]

    def get(self, n: int) -> Slot:
        """Return the slot of layer n, which may hold another layer's vector."""
        if n in self._resident:
            return self._resident[n]
        return self._shared[self.streamed_layers.index(n) % len(self._shared)]

    def fetch(self, n: int) -> Slot:
        """Return the slot of layer n. Queues the copy of the layer's vector unless the slot holds it."""
        slot, stored = self.get(n), self._stored[n]
        if slot.layer != n:
            assert stored is not None
            self._copy_streams.copy(slot.buffer, stored)
            slot.layer = n
        return slot

    def store(self, n: int) -> None:
        """Queue the copy of layer n's slot to where the vector is stored, if that is another buffer."""
        slot, stored = self.get(n), self._stored[n]
        if stored is not None and stored is not slot.buffer:
            self._copy_streams.copy(stored, slot.buffer)

    def invalidate(self) -> None:
        """Mark the shared slots as empty, since the stored vectors have changed."""
        for slot in self._shared:
            slot.layer = -1
