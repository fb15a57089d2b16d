"""What an engine queues for a GPU, replayed at given rates without one: how long a step takes, and where it waits.

The engine itself runs, on tensors without memory; its computation and its copies become pieces of work on the streams
that they would be queued on, each after what it waits for. Copies of one direction share its rate.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from workloads.llama.attention import KERNELS
from workloads.llama.shapes import LlamaShape
from workloads.offload import engine as engines
from workloads.offload.cost_model import Rates
from workloads.offload.memory import Arena, Buffer, Queues
from workloads.offload.optimizer import AdamW
from workloads.offload.plan import KEPT, Plan

META = torch.device("meta")
COMPUTES = "compute"


@dataclass(eq=False)
class Work:
    """Seconds of computation, or bytes to copy; `left` of it."""

    stream: tuple[str, str]
    left: float
    after: list[Work]
    done_s: float | None = None


class Host(Arena):
    """Tensors without memory that stand for those of the host."""

    def __init__(self) -> None:
        self.taken = dict[int, Tensor]()

    def take(self, numbers: int, dtype: torch.dtype) -> Tensor:
        found = torch.empty(numbers, dtype=dtype, device=META)
        self.taken[found.untyped_storage()._cdata] = found
        return found

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.taken


class TrackingClient(Queues):
    """Queues that write down what is queued."""

    def __init__(self, host: Host) -> None:
        self.host, self.work = host, list[Work]()

    def copy(self, target: Buffer, source: Buffer, lane: str = "parameters") -> None:
        way = "down" if self.host.holds(target.tensor) else "up"
        after = [work for work in (target.last, source.last) if work is not None]
        target.last = source.last = self.add(way, lane, float(source.tensor.nbytes), after)

    def acquire(self, *buffers: Buffer) -> None:
        self.add(COMPUTES, "", 0.0, [buffer.last for buffer in buffers if buffer.last is not None])

    def release(self, *buffers: Buffer) -> None:
        done = self.add(COMPUTES, "", 0.0, [])
        for buffer in buffers:
            buffer.last = done

    def compute(self, seconds: float) -> None:
        self.add(COMPUTES, "", seconds, [])

    def add(self, kind: str, lane: str, amount: float, after: list[Any]) -> Any:
        """The work, in the place of the event that a GPU would record."""
        self.work.append(Work((kind, lane), amount, after))
        return self.work[-1]

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        yield


def seconds_of(work: list[Work], rates: Rates) -> float:
    """Carry the work out: each stream in its order, everything after what it waits for."""
    streams: dict[tuple[str, str], deque[Work]] = defaultdict(deque)
    for each in work:
        streams[each.stream].append(each)
    rate = {COMPUTES: 1.0, "up": 1 / rates.up_s_per_byte, "down": 1 / rates.down_s_per_byte}
    now_s = 0.0
    while any(streams.values()):
        ready = [s[0] for s in streams.values() if s and all(w.done_s is not None for w in s[0].after)]
        assert ready, "everything waits"
        beside = Counter(each.stream[0] for each in ready if each.left > 0)
        speed = [rate[each.stream[0]] / max(1, beside[each.stream[0]]) for each in ready]
        took_s = min(each.left / fast for each, fast in zip(ready, speed, strict=True))
        now_s += took_s
        for each, fast in zip(ready, speed, strict=True):
            each.left -= took_s * fast
            if each.left <= 1e-9 * fast:
                each.left, each.done_s = 0.0, now_s
                streams[each.stream].popleft()
    return now_s


def steps_s(shape: LlamaShape, plan: Plan, rates: Rates, monkeypatch: pytest.MonkeyPatch, steps: int) -> float:
    """Seconds of so many steps under the plan, from the first copy to the last."""
    host = Host()
    queues = TrackingClient(host)
    monkeypatch.setattr(engines, "Queues", lambda device: queues)

    class Update(AdamW):
        def apply(self, step: int, w: Tensor, *others: Any) -> None:
            queues.compute(w.nbytes * rates.update_s_per_byte)

    engine = engines.Engine(shape, plan, host, META, KERNELS["cpu"], optimizer=Update())
    tokens, sequences = plan.chunk_tokens, plan.sequences

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device=META)

    def forward(w: Any, x: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        queues.compute(tokens * rates.forward_s)
        made = {
            "x": x,
            "q": empty(sequences, plan.chunk_length, shape.heads, shape.head_size),
            "kv": empty(sequences, plan.chunk_length, 2 * shape.kv_heads, shape.head_size),
            "attn_out": empty(tokens, shape.heads * shape.head_size),
            "lse": empty(sequences, shape.heads, plan.chunk_length, dtype=torch.float32),
            "residual": empty(*x.shape),
            "gate": empty(tokens, shape.intermediate_size),
            "up": empty(tokens, shape.intermediate_size),
        }
        return empty(*x.shape), made

    def backward(w: Any, g: Any, kept: dict[str, Tensor], rope: Any, d_out: Tensor, *_: Any) -> Tensor:
        keeps = next(keeps for keeps, names in KEPT.items() if {*names, "kv"} == {*kept, "kv"})
        queues.compute(tokens * (rates.backward_s + rates.again_s[keeps]))
        return empty(*d_out.shape)

    def loss(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        queues.compute(tokens * rates.head_s)
        return torch.zeros((), device=META), empty(*x.shape)

    monkeypatch.setattr(engine._math, "forward", forward)
    monkeypatch.setattr(engine._math, "backward", backward)
    monkeypatch.setattr(engine._ends, "loss", loss)
    batch = empty(plan.rounds, plan.groups, plan.sequences, plan.sequence_length + 1, dtype=torch.long)
    for _ in range(steps):
        engine.step(batch)
    return seconds_of(queues.work, rates)
