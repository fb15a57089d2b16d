"""Where on the device a layer's weights or gradients are while it computes: its home, or a slot that layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from workloads.offload.memory import Buffer, Queues

ByName = dict[str, Tensor]


@dataclass
class Slot:
    """One layer's vector on the device, and its parts by name. holds: the layer that it is of; -1: none yet."""

    buffer: Buffer
    by_name: ByName
    holds: int = -1


class Slots:
    """The slots of all layers. Those whose home is on the device have their own, others take a few in turns."""

    def __init__(
        self,
        homes: Sequence[Buffer | None],
        stays: Sequence[bool],
        count: int,
        make: Callable[[], Buffer],
        split: Callable[[Tensor], ByName],
        queues: Queues,
    ) -> None:
        """`make` makes a buffer for one layer on the device, `split` finds the parts of a layer's vector."""
        self._homes, self._queues = homes, queues
        self.streamed = [n for n, stay in enumerate(stays) if not stay]
        own = {n: home for n, home in enumerate(homes) if stays[n] and home is not None}
        self._own = {n: Slot(home, split(home.tensor), n) for n, home in own.items()}
        shared = [make() for _ in self.streamed[:count]]
        self._shared = [Slot(buffer, split(buffer.tensor)) for buffer in shared]

    def of(self, n: int) -> Slot:
        """Layer n's slot, whatever is in it."""
        return self._own[n] if n in self._own else self._shared[self.streamed.index(n) % len(self._shared)]

    def fetch(self, n: int) -> Slot:
        """Layer n's slot, with the layer in it or on its way."""
        slot, home = self.of(n), self._homes[n]
        if slot.holds != n:
            assert home is not None
            self._queues.copy(slot.buffer, home)
            slot.holds = n
        return slot

    def store(self, n: int) -> None:
        """Send what is in layer n's slot home, if that is elsewhere and there is one."""
        slot, home = self.of(n), self._homes[n]
        if home is not None and home is not slot.buffer:
            self._queues.copy(home, slot.buffer)

    def forget(self) -> None:
        """What the shared slots hold is no longer what is at home."""
        for slot in self._shared:
            slot.holds = -1
