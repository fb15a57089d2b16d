"""Carrying out a plan: forward, backward and AdamW of a Llama whose layers come and go.

Each block's parameters are one flat vector, so that a layer moves in one copy. Two slots on the device take turns for
layers that stream; the next layer is on its way while one computes. A step visits the layers up and down once a round;
in the last round each layer is updated as soon as its gradients are whole, with the next one's states on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from workloads.llama.model import Block, rope_table
from workloads.llama.shapes import LlamaShape
from workloads.offload.ends import Ends
from workloads.offload.layout import Plan
from workloads.offload.memory import Arena, Buffer, Queues
from workloads.offload.optimizer import AdamW


@dataclass
class State:
    """What is kept of one group of parameters between steps, each where the plan has it; no gradients where none wait
    from one round to the next."""

    weights: Buffer
    momentum: Buffer
    variance: Buffer
    gradients: Buffer | None = None


@dataclass
class Slot:
    """Device memory of one layer at a time: its weights as leaves of autograd, which gather into its gradients."""

    weights: Buffer
    gradients: Buffer
    leaves: dict[str, Tensor]
    holds: int = -1


@dataclass
class Kept:
    """One chunk's activations at one layer: the block's input, where it lies, and the output's graph if it is kept."""

    input: Tensor | None = None
    on_host: Buffer | None = None
    coming: Buffer | None = None
    output: Tensor | None = None
    leaf: Tensor | None = None


class Engine:
    """A model in training under a plan. `step` takes tokens and returns the mean loss.

    Everything is in `dtype`; the optimizer's arithmetic is in fp32. Host memory is taken from `arena`.
    """

    def __init__(
        self,
        shape: LlamaShape,
        plan: Plan,
        arena: Arena,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        optimizer: AdamW | None = None,
        compiled: bool = False,
    ) -> None:
        assert len(plan.layers) <= shape.layers
        self.shape, self.plan, self.device, self.dtype = shape, plan, device, dtype
        self.optimizer, self.steps_done = optimizer or AdamW(), 0
        self.queues, self._arena = Queues(device), arena
        with torch.device("meta"):
            self._block = Block(shape)
        self._shapes = {name: p.shape for name, p in self._block.named_parameters()}
        size = sum(s.numel() for s in self._shapes.values())
        self.rope = rope_table(shape, plan.sequence_length, device)
        self._layers = [
            State(
                self._buffer(size, layer.weights),
                self._buffer(size, layer.states),
                self._buffer(size, layer.states),
                self._buffer(size, layer.gradients) if plan.rounds > 1 or layer.gradients == "device" else None,
            )
            for layer in plan.layers
        ]
        self._slots = [self._resident_slot(n) for n in range(len(plan.layers))]
        self._streamed = [n for n, slot in enumerate(self._slots) if slot is None]
        self._shared = [self._new_slot(size) for _ in self._streamed[:2]]
        self._free_activations: list[Tensor] = []
        self._ends = Ends(shape, plan.ends_states, device, dtype, self.queues, self._buffer)
        self._state_slots = [tuple(self._buffer(size, "device") for _ in range(2)) for _ in range(2)]
        self._forward: Callable[..., Tensor] = self._call
        if compiled:
            self._forward = torch.compile(self._call, dynamic=False)

    def _call(self, x: Tensor, rope: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        return functional_call(self._block, leaves, (x, rope))

    def _buffer(self, numbers: int, place: str) -> Buffer:
        if place == "host":
            return Buffer(self._arena.take(numbers, self.dtype))
        return Buffer(torch.zeros(numbers, dtype=self.dtype, device=self.device))

    # ── slots ──

    def _resident_slot(self, n: int) -> Slot | None:
        """The slot of a layer whose weights and gradients both stay: its own memory."""
        layer, state = self.plan.layers[n], self._layers[n]
        if layer.weights == "host" or layer.gradients == "host":
            return None
        assert state.gradients is not None
        return Slot(state.weights, state.gradients, self._leaves(state.weights.tensor, state.gradients.tensor), n)

    def _new_slot(self, size: int) -> Slot:
        weights, gradients = self._buffer(size, "device"), self._buffer(size, "device")
        return Slot(weights, gradients, self._leaves(weights.tensor, gradients.tensor))

    def _leaves(self, weights: Tensor, gradients: Tensor) -> dict[str, Tensor]:
        """Parameters by name as views of a flat vector, their gradients as views of another."""
        leaves, start = {}, 0
        for name, shape in self._shapes.items():
            leaf = weights[start : start + shape.numel()].view(shape).detach().requires_grad_()
            leaf.grad = gradients[start : start + shape.numel()].view(shape)
            leaves[name], start = leaf, start + shape.numel()
        return leaves

    def _slot(self, n: int) -> Slot:
        """The slot that layer n computes in, its weights on their way if they are not there."""
        if resident := self._slots[n]:
            return resident
        slot = self._shared[self._streamed.index(n) % 2]
        if slot.holds != n:
            self.queues.copy(slot.weights, self._layers[n].weights)
            slot.holds = n
        return slot

    def _prefetch(self, coming: Iterator[int]) -> None:
        """Send the first of the layers that are still to come on its way, if it streams."""
        if (n := next(coming, None)) is not None:
            self._slot(n)

    # ── a step ──

    def step(self, tokens: Tensor) -> Tensor:
        """One step on tokens[rounds, chunks, sequences, sequence_length + 1]; the mean loss, on the device."""
        plan = self.plan
        expected = (plan.rounds, plan.chunks, plan.sequences, plan.sequence_length + 1)
        if tuple(tokens.shape) != expected:
            raise ValueError(f"tokens are {tuple(tokens.shape)}, the plan has {expected}")
        self.steps_done += 1
        loss = torch.zeros((), device=self.device)
        for number, chunks in enumerate(tokens.to(self.device)):
            loss += self._round(chunks, first=number == 0, last=number == plan.rounds - 1)
        self._ends.update(self.optimizer, self.steps_done)
        return loss

    def _round(self, chunks: Tensor, *, first: bool, last: bool) -> Tensor:
        inputs, targets = chunks[..., :-1], chunks[..., 1:]
        x = [self._ends.embed(each) for each in inputs]
        kept = []
        for n in range(len(self.plan.layers)):
            slot = self._slot(n)
            self._prefetch(m for m in self._streamed if m > n)
            self.queues.acquire(slot.weights)
            kept.append([Kept() for _ in x])
            x = [self._up(n, slot, each, keep) for each, keep in zip(x, kept[n], strict=True)]
            self.queues.release(slot.weights)
        share = 1.0 / (len(chunks) * self.plan.rounds)
        ends = [self._ends.loss(each, t, share) for each, t in zip(x, targets, strict=True)]
        losses, d_x = [loss for loss, _ in ends], [d for _, d in ends]
        for n in reversed(range(len(self.plan.layers))):
            d_x = self._layer_down(n, kept.pop(), d_x, first=first, last=last)
        for each, d_each in zip(inputs, d_x, strict=True):
            self._ends.embed_backward(each, d_each)
        return torch.stack(losses).sum()

    def _up(self, n: int, slot: Slot, x: Tensor, kept: Kept) -> Tensor:
        """Block n on one chunk, keeping of it what the plan says."""
        kind = self.plan.layers[n].activations
        if kind == "full":
            kept.leaf = x.requires_grad_()
            with self._weights_by_name(n, slot):
                kept.output = self._forward(kept.leaf, self.rope, slot.leaves)
            return kept.output.detach()
        with torch.no_grad():
            out = self._forward(x, self.rope, slot.leaves)
        if kind == "input":
            kept.input = x
            return out
        if not self._free_activations:
            self._free_activations.append(self._arena.take(x.numel(), x.dtype))
        kept.on_host = Buffer(self._free_activations.pop().view(x.shape))
        source = Buffer(x)
        self.queues.release(source)
        self.queues.copy(kept.on_host, source)
        self.queues.keep_until_copied(x)
        return out

    def _layer_down(self, n: int, kept: list[Kept], d_out: list[Tensor], *, first: bool, last: bool) -> list[Tensor]:
        """Backward through block n for all chunks, then its gradients stored or its weights updated."""
        state, slot = self._layers[n], self._slot(n)
        self._begin_gradients(state, slot, first=first)
        if last:
            states = self._fetch_states(n)
        self._prefetch(m for m in reversed(self._streamed) if m < n)
        for keep in kept:
            self._fetch_activation(keep)
        self.queues.acquire(slot.weights, slot.gradients)
        d_in = [self._down(n, slot, keep, d) for keep, d in zip(kept, d_out, strict=True)]
        self.queues.release(slot.weights, slot.gradients)
        if last:
            self._update(n, slot, states)
        elif state.gradients is not None and state.gradients is not slot.gradients:
            self.queues.copy(state.gradients, slot.gradients)
        return d_in

    def _begin_gradients(self, state: State, slot: Slot, *, first: bool) -> None:
        """Zero in the first round, else what the rounds before have gathered."""
        if first:
            self.queues.acquire(slot.gradients)
            slot.gradients.tensor.zero_()
            self.queues.release(slot.gradients)
        elif state.gradients is not None and state.gradients is not slot.gradients:
            self.queues.copy(slot.gradients, state.gradients)

    def _fetch_activation(self, kept: Kept) -> None:
        if kept.on_host is not None:
            kept.coming = Buffer(torch.empty_like(kept.on_host.tensor, device=self.device))
            self.queues.release(kept.coming)
            self.queues.copy(kept.coming, kept.on_host)

    def _down(self, n: int, slot: Slot, kept: Kept, d_out: Tensor) -> Tensor:
        if kept.output is None:
            if kept.coming is not None:
                self.queues.acquire(kept.coming)
                kept.input = kept.coming.tensor
                assert kept.on_host is not None
                self._free_activations.append(kept.on_host.tensor.flatten())
            assert kept.input is not None
            kept.leaf = kept.input.detach().requires_grad_()
            kept.output = self._forward(kept.leaf, self.rope, slot.leaves)
        kept.output.backward(d_out)
        assert kept.leaf is not None and kept.leaf.grad is not None
        d_in = kept.leaf.grad
        kept.input = kept.output = kept.leaf = kept.coming = None
        return d_in

    @contextmanager
    def _weights_by_name(self, n: int, slot: Slot) -> Iterator[None]:
        """A graph that is kept must not hold on to a slot that another layer will use meanwhile: it remembers where in
        the layer a weight is, and finds it again in whatever slot has the layer by then."""
        if self._slots[n] is not None:
            yield
            return
        storage = slot.weights.tensor.untyped_storage().data_ptr()

        def pack(t: Tensor) -> Any:
            if t.untyped_storage().data_ptr() != storage:
                return t
            return t.shape, t.stride(), t.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            return self._slot(n).weights.tensor.as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            yield

    # ── the optimizer ──

    def _fetch_states(self, n: int) -> tuple[Buffer, Buffer]:
        """Momentum and variance of layer n on the device, or on their way there."""
        state = self._layers[n]
        if self.plan.layers[n].states == "device":
            return state.momentum, state.variance
        there = self._state_slots[n % 2]
        self.queues.copy(there[0], state.momentum)
        self.queues.copy(there[1], state.variance)
        return there[0], there[1]

    def _update(self, n: int, slot: Slot, states: tuple[Buffer, Buffer]) -> None:
        state = self._layers[n]
        self.queues.acquire(slot.weights, slot.gradients, *states)
        vectors = slot.weights.tensor, slot.gradients.tensor, states[0].tensor, states[1].tensor
        self.optimizer.apply(self.steps_done, *vectors)
        self.queues.release(slot.weights, slot.gradients, *states)
        if self.plan.layers[n].states == "host":
            self.queues.copy(state.momentum, states[0])
            self.queues.copy(state.variance, states[1])
        if slot.weights is not state.weights:
            self.queues.copy(state.weights, slot.weights)

    # ── what goes in and out ──

    def load(self, named: Callable[[str], Tensor]) -> None:
        """Take all weights from `named`, by their names in `workloads.llama.model.Llama`."""
        for n, state in enumerate(self._layers):
            flat = torch.cat([named(f"blocks.{n}.{name}").flatten().to(self.dtype).cpu() for name in self._shapes])
            self.queues.acquire(state.weights)
            state.weights.tensor.copy_(flat)
            self.queues.release(state.weights)
        for slot in self._shared:
            slot.holds = -1
        self._ends.load(named)

    def load_random(self, generator: torch.Generator) -> None:
        """Normal weights with a deviation of 0.02, norms of one, biases of zero; the same whatever the plan."""

        def random(name: str) -> Tensor:
            size = self._ends.sizes.get(name) or self._shapes[name.split(".", 2)[2]]
            if len(size) == 1:
                return torch.zeros(size) if name.endswith("bias") else torch.ones(size)
            return torch.empty(size, dtype=self.dtype).normal_(std=0.02, generator=generator)

        self.load(random)

    def weights(self) -> dict[str, Tensor]:
        """All weights by name, copies on the host."""
        self.synchronize()
        found = self._ends.weights()
        for n, state in enumerate(self._layers):
            flat, start = state.weights.tensor.cpu(), 0
            for name, shape in self._shapes.items():
                found[f"blocks.{n}.{name}"] = flat[start : start + shape.numel()].view(shape).clone()
                start += shape.numel()
        return found

    def synchronize(self) -> None:
        if self.queues.on_gpu:
            torch.cuda.synchronize(self.device)
