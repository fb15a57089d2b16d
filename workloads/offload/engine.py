"""Carrying out a plan: forward, backward and AdamW of a Llama whose layers come and go.

Each block's parameters are one flat vector, so that a layer moves in one copy. A few slots on the device take turns for
layers that stream; the next layer is on its way while one computes, and so are the activations of the next chunks. A
step visits the layers up and down once a round; in the last round each layer is updated as soon as its gradients are
whole, with its states on their way meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workloads import trace
from workloads.llama.attention import Kernel
from workloads.llama.block import Activations, BlockMath
from workloads.llama.model import Block, rope_table
from workloads.llama.shapes import LlamaShape
from workloads.offload.embedding_head import Ends
from workloads.offload.memory import Arena, Buffer, Queues
from workloads.offload.optimizer import AdamW
from workloads.offload.plan import AHEAD, GRADIENT_SLOTS, WEIGHT_SLOTS, Plan, kept_names
from workloads.offload.slots import ByName, Slots


@dataclass
class State:
    """What is kept of one group of parameters between steps, each where the plan has it: momentum, variance and, where
    asked for, the weights in fp32; no gradients where none wait from one round to the next."""

    weights: Buffer
    states: tuple[Buffer, ...]
    gradients: Buffer | None = None


@dataclass
class Kept:
    """One chunk's activations at one layer, by name: on the device, on the host, or on their way back from there."""

    here: Activations = field(default_factory=dict)
    on_host: dict[str, Buffer] = field(default_factory=dict)
    coming: dict[str, Buffer] = field(default_factory=dict)


class Engine:
    """A model in training under a plan. `step` takes tokens and returns the mean loss.

    Everything is in `dtype`, with `master_weights` the optimizer's states are in fp32 and so is a copy of the weights;
    the optimizer's arithmetic is in fp32 in any case. Host memory is taken from `arena`.
    """

    def __init__(
        self,
        shape: LlamaShape,
        plan: Plan,
        arena: Arena,
        device: torch.device,
        kernel: Kernel,
        *,
        dtype: torch.dtype = torch.bfloat16,
        master_weights: bool = False,
        optimizer: AdamW | None = None,
    ) -> None:
        assert len(plan.layers) <= shape.layers and plan.chunks % plan.pieces == 0
        self.shape, self.plan, self.device, self.dtype = shape, plan, device, dtype
        self.optimizer, self.steps_done = optimizer or AdamW(), 0
        self.queues, self._arena = Queues(device), arena
        self._states_dtype = torch.float32 if master_weights else dtype
        self._states_count = 3 if master_weights else 2
        with torch.device("meta"):
            self._shapes = {name: p.shape for name, p in Block(shape).named_parameters()}
        size = sum(s.numel() for s in self._shapes.values())
        self.rope = rope_table(shape, plan.sequence_length, device)
        self._layers = [
            State(
                self._buffer(size, layer.weights),
                self._states(size, layer.states),
                self._buffer(size, layer.gradients) if plan.rounds > 1 or layer.gradients == "device" else None,
            )
            for layer in plan.layers
        ]
        self._weights = self._slots(
            [s.weights for s in self._layers], [p.weights == "device" for p in plan.layers], WEIGHT_SLOTS
        )
        self._gradients = self._slots(
            [s.gradients for s in self._layers], [p.gradients == "device" for p in plan.layers], GRADIENT_SLOTS
        )
        moving = sum(layer.states == "host" for layer in plan.layers)
        self._state_slots = [self._states(size, "device") for _ in range(min(2, moving))]
        self._math = BlockMath(shape, kernel, compiled=device.type != "cpu")
        self._ends = Ends(
            shape, self._math, device, dtype, self.queues, lambda n: self._states(n, plan.ends_states), plan.ends_states
        )
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}  # host memory for activations, by size
        self._kept: list[Kept] = []
        self._leaving: deque[list[Buffer]] = deque()
        self._keys_values = self._d_keys_values = torch.empty(0)

    def _buffer(self, numbers: int, place: str, dtype: torch.dtype | None = None) -> Buffer:
        if place == "host":
            return Buffer(self._arena.take(numbers, dtype or self.dtype))
        return Buffer(torch.zeros(numbers, dtype=dtype or self.dtype, device=self.device))

    def _states(self, numbers: int, place: str) -> tuple[Buffer, ...]:
        return tuple(self._buffer(numbers, place, self._states_dtype) for _ in range(self._states_count))

    def _slots(self, homes: Sequence[Buffer | None], stays: list[bool], count: int) -> Slots:
        size = sum(shape.numel() for shape in self._shapes.values())
        return Slots(homes, stays, count, lambda: self._buffer(size, "device"), self._by_name, self.queues)

    def _by_name(self, flat: Tensor) -> ByName:
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    # ── a step ──

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """One step on tokens[rounds, groups, sequences, sequence_length + 1]; the mean loss, on the device."""
        plan = self.plan
        expected = (plan.rounds, plan.groups, plan.sequences, plan.sequence_length + 1)
        if tuple(tokens.shape) != expected:
            raise ValueError(f"tokens are {tuple(tokens.shape)}, the plan has {expected}")
        self.steps_done += 1
        loss = torch.zeros((), device=self.device)
        for number, groups in enumerate(tokens.to(self.device)):
            loss += self._round(groups, first=number == 0, last=number == plan.rounds - 1)
        self._ends.update(self.optimizer, self.steps_done)
        return loss

    def _round(self, groups: Tensor, *, first: bool, last: bool) -> Tensor:
        length = self.plan.chunk_length
        inputs = [piece for group in groups for piece in group[:, :-1].split(length, dim=1)]
        targets = [piece for group in groups for piece in group[:, 1:].split(length, dim=1)]
        x = [self._ends.embed(each) for each in inputs]
        for n in range(len(self.plan.layers)):
            weights = self._weights.fetch(n)
            for m in [m for m in self._weights.streamed if m > n][:1]:
                self._weights.fetch(m)
            self.queues.acquire(weights.buffer)
            with trace.annotate(f"layer {n} forward"):
                for c in range(len(x)):
                    x[c] = self._up(n, weights.by_name, c, x[c])
            self.queues.release(weights.buffer)
        self._return_activations()
        loss, share = torch.zeros((), device=self.device), 1.0 / (len(x) * self.plan.rounds)
        with trace.annotate("head and loss"):
            for c, wanted in enumerate(targets):
                chunk_loss, x[c] = self._ends.loss(x[c], wanted, share)
                loss += chunk_loss
        for n in reversed(range(len(self.plan.layers))):
            self._layer_down(n, x, first=first, last=last)
        self._leave(0)
        for each, d_each in zip(inputs, x, strict=True):
            self._ends.embed_backward(each, d_each)
        return loss

    def _up(self, n: int, w: ByName, c: int, x: Tensor) -> Tensor:
        """Block n on chunk c, keeping of it what the plan says."""
        plan, rope, piece = self.plan, self._rope(c), c % self.plan.pieces
        start, end = piece * plan.chunk_length, (piece + 1) * plan.chunk_length
        if plan.pieces > 1 and piece == 0:
            size = (plan.sequences, plan.sequence_length, 2 * self.shape.kv_heads, self.shape.head_size)
            self._keys_values = torch.empty(size, dtype=self.dtype, device=self.device)
        out, made = self._math.forward(w, x, rope, self._keys_values[:, :start] if piece else None)
        found = {name: made[name] for name in kept_names(plan.layers[n].keeps, plan.pieces)}
        if plan.pieces > 1:
            self._keys_values[:, start:end] = made["kv"]
            if piece == plan.pieces - 1:
                found["keys_values"] = self._keys_values
        self._keep(found, plan.layers[n].kept_on)
        return out

    def _rope(self, c: int) -> Tensor:
        return self.rope.split(self.plan.chunk_length, dim=1)[c % self.plan.pieces]

    def _layer_down(self, n: int, d: list[Tensor], *, first: bool, last: bool) -> None:
        """Backward through block n for all chunks, the last first, then its gradients stored or its weights updated.
        `d` are the chunks' gradients, of the block's outputs and then of its inputs."""
        weights, gradients = self._weights.fetch(n), self._gradients.of(n)
        if first:
            gradients.holds = n
        else:
            self._gradients.fetch(n)
        states = self._fetch_states(n) if last else ()  # first: the next layer's wait for a slot, these need not
        for slots in [self._weights] if first else [self._weights, self._gradients]:
            for m in [m for m in reversed(slots.streamed) if m < n][:1]:
                slots.fetch(m)
        self.queues.acquire(weights.buffer, gradients.buffer)
        if first:
            gradients.buffer.tensor.zero_()
        with trace.annotate(f"layer {n} backward"):
            for c in reversed(range(len(d))):
                d[c] = self._down(weights.by_name, gradients.by_name, c, d[c])
        self.queues.release(weights.buffer, gradients.buffer)
        if last:
            self._update(n, states)
        else:
            self._gradients.store(n)

    def _down(self, w: ByName, g: ByName, c: int, d_out: Tensor) -> Tensor:
        plan, piece = self.plan, c % self.plan.pieces
        found = self._arrived(self._kept.pop())
        if plan.pieces == 1:
            return self._math.backward(w, g, found, self._rope(c), d_out)
        if piece == plan.pieces - 1:
            self._keys_values = found.pop("keys_values")
            self._d_keys_values = torch.zeros_like(self._keys_values, dtype=torch.float32)
        start, end = piece * plan.chunk_length, (piece + 1) * plan.chunk_length
        earlier, found["kv"] = self._keys_values[:, :start] if piece else None, self._keys_values[:, start:end]
        d_keys_values = self._d_keys_values[:, start:end], self._d_keys_values[:, :start]
        return self._math.backward(w, g, found, self._rope(c), d_out, earlier, d_keys_values)

    # ── activations ──

    def _keep(self, found: Activations, place: str) -> None:
        if place == "device":
            self._kept.append(Kept(here=found))
            return
        sources = {name: Buffer(t.contiguous()) for name, t in found.items()}
        self.queues.release(*sources.values())
        targets = {name: Buffer(self._take(source.tensor)) for name, source in sources.items()}
        for name, source in sources.items():
            self.queues.copy(targets[name], source, "activations")
        self._kept.append(Kept(on_host=targets))
        self._leaving.append(list(sources.values()))
        self._leave(1)

    def _leave(self, most: int) -> None:
        """Let go of the device's memory of all but the last `most` chunks that were sent to the host, once they are."""
        while len(self._leaving) > most:
            self.queues.acquire(*self._leaving.popleft())

    def _take(self, like: Tensor) -> Tensor:
        free = self._free.setdefault((like.numel(), like.dtype), [])
        flat = free.pop() if free else self._arena.take(like.numel(), like.dtype)
        return flat.view(like.shape)

    def _return_activations(self) -> None:
        """Send those of the first chunks that are needed on their way."""
        for kept in self._kept[-AHEAD:]:
            self._fetch(kept)

    def _fetch(self, kept: Kept) -> None:
        for name, there in kept.on_host.items():
            kept.coming[name] = Buffer(torch.empty_like(there.tensor, device=self.device))
            self.queues.release(kept.coming[name])
            self.queues.copy(kept.coming[name], there, "activations")

    def _arrived(self, kept: Kept) -> Activations:
        """One chunk's activations, once they are on the device; those of a later one are sent for."""
        if len(self._kept) >= AHEAD:
            self._fetch(self._kept[-AHEAD])
        self.queues.acquire(*kept.coming.values())
        for there in kept.on_host.values():
            self._free[there.tensor.numel(), there.tensor.dtype].append(there.tensor.flatten())
        return kept.here | {name: there.tensor for name, there in kept.coming.items()}

    # ── the optimizer ──

    def _fetch_states(self, n: int) -> tuple[Buffer, ...]:
        """The optimizer's states of layer n on the device, or on their way there."""
        state = self._layers[n]
        if self.plan.layers[n].states == "device":
            return state.states
        there = self._state_slots[n % len(self._state_slots)]
        for target, source in zip(there, state.states, strict=True):
            self.queues.copy(target, source)
        return there

    def _update(self, n: int, states: tuple[Buffer, ...]) -> None:
        buffers = self._weights.of(n).buffer, self._gradients.of(n).buffer, *states
        self.queues.acquire(*buffers)
        with self.queues.span("optimizer"), trace.annotate(f"layer {n} update"):
            self.optimizer.apply(self.steps_done, *(each.tensor for each in buffers))
        self.queues.release(*buffers)
        self._weights.store(n)  # first: the next but one layer's come into the same slot
        if self.plan.layers[n].states == "host":
            for target, source in zip(self._layers[n].states, states, strict=True):
                self.queues.copy(target, source)

    # ── what goes in and out ──

    def load(self, named: Callable[[str], Tensor]) -> None:
        """Take all weights from `named`, by their names in `workloads.llama.model.Llama`."""
        for n, state in enumerate(self._layers):
            for kind in (state.weights, *state.states[2:]):
                flat = torch.cat([named(f"blocks.{n}.{name}").flatten() for name in self._shapes])
                kind.tensor.copy_(flat)
        self._weights.forget()
        self._ends.load(named)
        self.synchronize()

    def load_random(self, seed: int) -> None:
        """Normal weights with a deviation of 0.02, norms of one, biases of zero; the same whatever the plan."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def random(name: str) -> Tensor:
            size = self._ends.sizes.get(name) or self._shapes[name.split(".", 2)[2]]
            if len(size) == 1:
                return torch.full(size, 0.0 if name.endswith("bias") else 1.0, dtype=self.dtype, device=self.device)
            return torch.empty(size, dtype=self.dtype, device=self.device).normal_(std=0.02, generator=generator)

        self.load(random)

    def weights(self) -> dict[str, Tensor]:
        """All weights by name, copies on the host."""
        self.synchronize()
        found = self._ends.weights()
        for n, state in enumerate(self._layers):
            parts = self._by_name(state.weights.tensor.cpu())
            found |= {f"blocks.{n}.{name}": part.clone() for name, part in parts.items()}
        return found

    def synchronize(self) -> None:
        if self.queues.on_gpu:
            torch.cuda.synchronize(self.device)
