"""The GPUs of a host that train one model together, using the process group of their trial."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.llama.block import NamedTensors
from workloads.offload.optimizer import INT8_BLOCK
from workloads.offload.peer_copies import CudaDriver, PeerMemory
from workloads.offload.plan import GATHERED_SLOTS, Distribution
from workloads.offload.transfers import Buffer, CopyStreams, LayerSlots, Slot


@dataclass(frozen=True)
class Gang:
    """The position of this process in the gang; a single process by default."""

    distribution: Distribution | None = None
    ranks: int = 1
    rank: int = 0
    driver: CudaDriver | None = None  # exchanges shares by copies; None: collectives exchange them

    @property
    def is_sharded(self) -> bool:
        return self.distribution == "sharded"

    @property
    def is_ring(self) -> bool:
        return self.distribution == "ring"

    @property
    def batches(self) -> int:
        """The number of parts into which a step's sequences are divided: 1 in a ring, as its GPUs share them all."""
        return 1 if self.is_ring else self.ranks

    def list_own(self, count: int) -> range:
        """Return the range of `count` layers, or of chunks at the head, that this process computes."""
        return range(self.rank, count, self.ranks) if self.is_ring else range(count)

    def count_kept(self, numel: int) -> int:
        """Return how many elements of a vector each process keeps, padded to whole blocks of the optimizer's scales."""
        if not self.is_sharded:
            return numel
        return -(-numel // (INT8_BLOCK * self.ranks)) * INT8_BLOCK

    def select_share(self, whole: Tensor) -> Tensor:
        """Return a view of the part of a vector that this process keeps."""
        return whole.chunk(self.ranks)[self.rank] if self.is_sharded else whole

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all processes, in place."""
        for tensor in tensors if self.ranks > 1 else ():
            dist.all_reduce(tensor)

    def gather(self, n: int, kept: Tensor) -> Tensor:
        """Return layer n's whole vector. `kept` is this process's share; in a ring, the home rank keeps the vector."""
        if self.is_ring:
            dist.broadcast(kept, n % self.ranks)
        if not self.is_sharded:
            return kept
        whole = kept.new_empty(self.ranks * kept.numel())
        dist.all_gather_into_tensor(whole, kept)
        return whole


def store_sum(target: Tensor, parts: Sequence[Tensor]) -> None:
    """Store the sum of vectors, one of which may be the target. If compiled, it reads each vector once."""
    target.copy_(sum(parts[1:], start=parts[0]))


class WholeLayers:
    """Device buffers that the whole layers of a sharded model share."""

    def __init__(
        self,
        gang: Gang,
        numel: int,  # of a layer with its padding
        dtype: torch.dtype,
        device: torch.device,
        split: Callable[[Tensor], NamedTensors],  # returns the parts of a layer's vector by name
        copy_streams: CopyStreams,
    ) -> None:
        self._gang, self._copy_streams = gang, copy_streams
        self._others = [n for n in range(gang.ranks) if n != gang.rank]
        self.peers: PeerMemory | None = None
        sizes = 2 * GATHERED_SLOTS * [numel]
        if gang.driver:  # others write their weight shares to it, and their gradients of this process's share
            self.peers = PeerMemory(gang.driver, dtype, [*sizes, numel - numel // gang.ranks])
            *vectors, received = self.peers.tensors
        else:
            *vectors, received = (torch.zeros(size, dtype=dtype, device=device) for size in (*sizes, 0))
        self._received = Buffer(received)
        self._store_sum = store_sum if device.type == "cpu" else torch.compile(store_sum, dynamic=False)
        slots = [Slot(Buffer(vector), split(vector)) for vector in vectors]
        self._weights, self._gradients = slots[:GATHERED_SLOTS], slots[GATHERED_SLOTS:]

    def gather(self, n: int, kept: LayerSlots) -> Slot:
        """Return layer n's weight slot. If the slot lacks the weights, queue copying and gathering the share."""
        slot = self._weights[n % GATHERED_SLOTS]
        if slot.layer != n:
            share, whole = kept.fetch(n).buffer, slot.buffer
            self._exchange(lambda: self._gather(whole.tensor, share.tensor), whole, share)
            slot.layer = n
        return slot

    def _gather(self, whole: Tensor, share: Tensor) -> None:
        if not self.peers:
            dist.all_gather_into_tensor(whole, share)
            return
        own = self._gang.select_share(whole)
        own.copy_(share)
        self.peers.push([(n, own, own) for n in self._others])  # from CUDA's own memory, like the timed copies

    def invalidate(self, n: int | None = None) -> None:
        """Mark the weights of layer n, or of all layers, as outdated."""
        for slot in self._weights:
            slot.layer = -1 if n in (slot.layer, None) else slot.layer

    def gradients(self, n: int) -> Slot:
        return self._gradients[n % GATHERED_SLOTS]

    def reduce(self, n: int) -> None:
        """Queue the exchange of layer n's gradients. Call `take_reduced` for the previous layer first."""
        whole = self.gradients(n).buffer
        self._exchange(lambda: self._scatter(whole.tensor), whole, self._received)

    def _scatter(self, whole: Tensor) -> None:
        if not self.peers:
            dist.reduce_scatter_tensor(self._gang.select_share(whole), whole)
            return
        shares, slots = whole.chunk(self._gang.ranks), self._received.tensor.chunk(len(self._others))
        # Each of the other processes receives this process's data in a separate slot.
        self.peers.push([(n, slots[(self._gang.rank - n) % self._gang.ranks - 1], shares[n]) for n in self._others])

    def take_reduced(self, n: int, target: Buffer, *, is_first: bool) -> None:
        """Add the sum of all processes' gradients of layer n to a buffer, or store it there in the first round."""
        whole = self.gradients(n).buffer
        received = self._received.tensor.chunk(len(self._others)) if self.peers else ()
        self._copy_streams.acquire(whole, self._received, target)
        earlier = () if is_first else (target.tensor,)
        self._store_sum(target.tensor, [self._gang.select_share(whole.tensor), *received, *earlier])
        self._copy_streams.release(whole, self._received, target)

    def _exchange(self, exchange: Callable[[], object], whole: Buffer, *others: Buffer) -> None:
        received_bytes = whole.tensor.nbytes * (self._gang.ranks - 1) // self._gang.ranks
        self._copy_streams.exchange(exchange, received_bytes, whole, *others)
