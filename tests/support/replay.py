"""Simulate the work that an engine queues for a GPU, at given rates and without a GPU.

The engine itself runs, on meta tensors. Its computation and its copies become pieces of work on the streams that they
would be queued on; each piece starts after those that it waits for. Copies in one direction share its bandwidth.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from workloads.llama.attention_kernels import KERNELS
from workloads.models.model import Model
from workloads.offload import engine as engines
from workloads.offload.cost_model import DeviceRates
from workloads.offload.gang import Gang
from workloads.offload.host_memory import Arena
from workloads.offload.optimizer import AdamW
from workloads.offload.plan import SAVED_TENSORS, Plan
from workloads.offload.transfers import Buffer, CopyStreams

META = torch.device("meta")
COMPUTE = "compute"


@dataclass(eq=False)
class Work:
    """A piece of work on a stream, the work that it waits for, and the time at which it is done."""

    stream: tuple[str, int, str]  # the resource ("compute", "h2d", "d2h" or "links"), its rank and the kind of traffic
    remaining: float  # seconds of computation or bytes to copy
    after: list[Work]
    done_s: float | None = None


class MetaArena(Arena):
    """An arena of meta tensors, which stand for tensors on the host."""

    def __init__(self) -> None:
        self._tensors = dict[int, Tensor]()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype, device=META)
        self._tensors[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def contains(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._tensors


class RecordingCopyStreams(CopyStreams):
    """Streams that record the work that is queued on them. The ranks of a ring share `work` and `posts`."""

    def __init__(self, arena: MetaArena, work: list[Work], posts: dict[Any, Work], gang: Gang) -> None:
        self.arena, self.work, self.posts, self.gang, self.exchanged_bytes = arena, work, posts, gang, 0
        self.messages, self.counts = list[Any](), Counter[Any]()

    def copy(self, target: Buffer, source: Buffer, traffic: str = "parameters") -> None:
        direction = "d2h" if self.arena.contains(target.tensor) else "h2d"
        after = [work for work in (target.last_event, source.last_event) if work is not None]
        result = self.record(direction, traffic, float(source.tensor.nbytes), after)
        target.last_event = source.last_event = result

    def exchange(self, collective: Callable[[], object], received_bytes: int, *buffers: Buffer) -> None:
        after: list[Any] = [buffer.last_event for buffer in buffers if buffer.last_event is not None]
        if self.gang.is_ring:
            collective()  # which leaves its messages here
            after = [*after, *(self.post(after, *message) for message in self.messages)]
            received_bytes = max(tensor.nbytes for _, tensor, _ in self.messages)  # both directions at once
        result = self.record("links", "", float(received_bytes), after)
        for buffer in buffers:
            buffer.last_event = result

    def take_messages(self, messages: list[Any]) -> list[Any]:
        self.messages = messages
        return []  # nothing to wait for

    def post(self, after: list[Work], operation: Any, tensor: Tensor, other: int) -> Work:
        """Record that a send or a receive can begin. Return the same of the other rank, which it waits for."""
        pair = (other, self.gang.rank) if operation is dist.irecv else (self.gang.rank, other)
        self.counts[pair] += 1
        own, others = (
            self.posts.setdefault((pair, self.counts[pair], rank), Work(("links", rank, "posts"), 0.0, []))
            for rank in (self.gang.rank, other)
        )
        own.after = after
        self.work.append(own)
        return others

    def acquire(self, *buffers: Buffer) -> None:
        self.record(COMPUTE, "", 0.0, [buffer.last_event for buffer in buffers if buffer.last_event is not None])

    def release(self, *buffers: Buffer) -> None:
        result = self.record(COMPUTE, "", 0.0, [])
        for buffer in buffers:
            buffer.last_event = result

    def compute(self, seconds: float) -> None:
        self.record(COMPUTE, "", seconds, [])

    def record(self, resource: str, traffic: str, amount: float, after: list[Any]) -> Any:
        """Append a piece of work and return it in the place of the event that a GPU would record."""
        self.work.append(Work((resource, self.gang.rank, traffic), amount, after))
        return self.work[-1]

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        yield


def simulate_s(queued: list[Work], rates: DeviceRates) -> float:
    """Return the seconds that the work takes: each stream in its order, each piece after those that it waits for."""
    streams: dict[tuple[str, int, str], deque[Work]] = defaultdict(deque)
    for work in queued:
        streams[work.stream].append(work)
    resource_rates = {COMPUTE: 1.0, "h2d": 1 / rates.h2d_s_per_byte, "d2h": 1 / rates.d2h_s_per_byte}
    resource_rates["links"] = 1 / rates.link_s_per_byte if rates.link_s_per_byte else 0.0
    now_s = 0.0
    while any(streams.values()):
        heads = [stream[0] for stream in streams.values() if stream]
        ready = [work for work in heads if all(earlier.done_s is not None for earlier in work.after)]
        assert ready, "deadlock: all work waits for other work"
        running = Counter(work.stream[:2] for work in ready if work.remaining > 0)
        work_rates = [resource_rates[work.stream[0]] / max(1, running[work.stream[:2]]) for work in ready]
        elapsed_s = min(work.remaining / rate for work, rate in zip(ready, work_rates, strict=True))
        now_s += elapsed_s
        for work, rate in zip(ready, work_rates, strict=True):
            work.remaining -= elapsed_s * rate
            if work.remaining <= 1e-9 * rate:
                work.remaining, work.done_s = 0.0, now_s
                streams[work.stream].popleft()
    return now_s


def simulate_steps_s(
    shape: Model, plan: Plan, rates: DeviceRates, monkeypatch: pytest.MonkeyPatch, steps: int, gang: Gang | None = None
) -> float:
    """Return the seconds of `steps` steps under the plan, from the first copy to the last.

    The ranks of a gang do the same at the same time, but those of a ring, which are all simulated. Sums of the loss and
    of the embedding's gradients take no time.
    """
    gang, work, posts = gang or Gang(), list[Work](), dict[Any, Work]()
    for rank in range(gang.ranks if gang.is_ring else 1):
        arena = MetaArena()
        copy_streams = RecordingCopyStreams(arena, work, posts, replace(gang, rank=rank))
        _queue_steps(shape, plan, rates, monkeypatch, steps, arena, copy_streams)
    return simulate_s(work, rates)


def _queue_steps(
    shape: Model,
    plan: Plan,
    rates: DeviceRates,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    arena: MetaArena,
    copy_streams: RecordingCopyStreams,
) -> None:
    monkeypatch.setattr(Gang, "sum", lambda *_: None)
    monkeypatch.setattr(engines, "CopyStreams", lambda device: copy_streams)
    monkeypatch.setattr(dist, "P2POp", lambda *message: message)
    monkeypatch.setattr(dist, "batch_isend_irecv", copy_streams.take_messages)

    class SimulatedAdamW(AdamW):
        def apply(self, step: int, w: Tensor, *others: Any) -> None:
            copy_streams.compute(w.nbytes * rates.optimizer_s_per_byte)

    engine = engines.Engine(
        shape, plan, arena, META, KERNELS["cpu"], optimizer=SimulatedAdamW(), gang=copy_streams.gang
    )
    tokens, sequences = plan.chunk_tokens, plan.sequences_per_chunk
    forward_s, backward_s = rates.pass_s_per_token(plan.sequence_length, plan.segments_per_sequence)

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device=META)

    def forward(weights: Any, x: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        copy_streams.compute(tokens * forward_s)
        activations = {
            "x": x,
            "q": empty(sequences, plan.chunk_length, shape.heads, shape.head_size),
            "kv": empty(sequences, plan.chunk_length, 2 * shape.kv_heads, shape.head_size),
            "attn_out": empty(tokens, shape.heads * shape.head_size),
            "lse": empty(sequences, shape.heads, plan.chunk_length, dtype=torch.float32),
            "residual": empty(*x.shape),
            "gate": empty(tokens, shape.intermediate_size),
            "up": empty(tokens, shape.intermediate_size),
        }
        return empty(*x.shape), activations

    def backward(weights: Any, gradients: Any, saved: dict[str, Tensor], rope: Any, d_out: Tensor, *_: Any) -> Tensor:
        choice = next(choice for choice, names in SAVED_TENSORS.items() if {*names, "kv"} == {*saved, "kv"})
        copy_streams.compute(tokens * (backward_s + rates.recompute_s_per_token[choice]))
        return empty(*d_out.shape)

    def loss(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        copy_streams.compute(tokens * rates.lm_head_s_per_token)
        return torch.zeros((), device=META), empty(*x.shape)

    monkeypatch.setattr(engine._math, "forward", forward)
    monkeypatch.setattr(engine._math, "backward", backward)
    monkeypatch.setattr(engine._embedding_and_head, "loss", loss)
    batch_size = (plan.accumulation_rounds, plan.groups_per_round, plan.sequences_per_chunk, plan.sequence_length + 1)
    batch = empty(*batch_size, dtype=torch.long)
    for _ in range(steps):
        engine.step(batch)
