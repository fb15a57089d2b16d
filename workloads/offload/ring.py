"""A ring of GPUs: each layer has its home on one GPU, and chunks move from home to home.

A round is divided into turns. In a turn, each GPU computes at most one chunk at one layer or at the head; then all GPUs
pass on their results before the next turn. Receiving during computation would cost more, since NCCL's kernels wait on
multiprocessors that the GEMMs need. All GPUs take turns in the same order, so none of them can wait forever.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from workloads.offload.transfers import Buffer, CopyStreams


class Turn(NamedTuple):
    """The work of one GPU in a turn."""

    chunk: int | None = None  # the chunk that it computes
    target: int | None = None  # the rank that receives the chunk next
    received: tuple[tuple[int, int], ...] = ()  # the chunks that the GPU receives, with their source ranks


def list_turns(layers: int, chunks: int, ranks: int, rank: int) -> list[Turn]:
    """Return the turns of a rank in a round: forward over all layers, the head, then backward over all layers. Layers
    are assigned round-robin, because a GPU with adjacent layers would wait for all chunks of the GPU before it."""
    free, ready = [0] * ranks, [0] * chunks  # the first turn in which each rank is free, and each chunk is ready
    turns: dict[int, Turn] = defaultdict(Turn)
    for stage in range(2 * layers + 1):
        if stage == layers:  # chunks take longer at the head than at a layer, so no turn has both
            free = [max(free)] * ranks
        for chunk in range(chunks) if stage <= layers else reversed(range(chunks)):
            # The ranks that compute a layer forward, the head, a layer backward, or the embedding.
            homes = (chunk if n == layers else max(0, min(n, 2 * layers - n)) for n in (stage, stage + 1))
            source, target = (home % ranks for home in homes)
            number = max(free[source], ready[chunk])
            free[source] = ready[chunk] = number + 1
            if source == rank:
                turns[number] = turns[number]._replace(chunk=chunk, target=target if target != source else None)
            elif target == rank:
                turns[number] = turns[number]._replace(received=(*turns[number].received, (chunk, source)))
    return [turns[number] for number in sorted(turns)]


class PassedChunks(dict[int, Tensor]):
    """The hidden states (or their gradients) of the chunks that this GPU holds in a round.

    Reading a chunk receives it from the previous GPU, and writing a chunk passes it to the next.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        held: Mapping[int, Tensor],
        build_empty: Callable[[], Tensor],  # builds a tensor of a chunk's size
        copy_streams: CopyStreams,
    ) -> None:
        super().__init__(held)
        self._turns, self._build_empty, self._copy_streams = list(reversed(turns)), build_empty, copy_streams

    def __getitem__(self, chunk: int) -> Tensor:
        while self._turns and self._turns[-1].chunk is None:
            self._pass_on(self._turns.pop())
        return super().__getitem__(chunk)

    def __setitem__(self, chunk: int, value: Tensor) -> None:
        super().__setitem__(chunk, value)
        turn = self._turns.pop()
        assert turn.chunk == chunk
        self._pass_on(turn)

    def _pass_on(self, turn: Turn) -> None:
        messages: list[tuple[bool, int, Buffer]] = []  # whether the chunk is received, the other rank, the chunk
        for chunk, source in turn.received:
            messages.append((True, source, Buffer(self._build_empty())))
            super().__setitem__(chunk, messages[-1][2].tensor)
        if turn.chunk is not None and turn.target is not None:
            messages.append((False, turn.target, Buffer(self.pop(turn.chunk).contiguous())))
        if not messages:
            return

        def exchange() -> None:
            operations = [
                dist.P2POp(dist.irecv if is_received else dist.isend, buffer.tensor, other)
                for is_received, other, buffer in messages
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        buffers = [buffer for *_, buffer in messages]
        received_bytes = sum(buffer.tensor.nbytes for is_received, _, buffer in messages if is_received)
        self._copy_streams.release(*buffers)
        self._copy_streams.exchange(exchange, received_bytes, *buffers)
        self._copy_streams.acquire(*buffers)
