"""Train a Llama as a plan specifies: forward, backward and AdamW, with layers copied between host and device.

The parameters of each block form one flat vector, so a layer is copied at once. Streamed layers share a few slots on
the device: while one layer computes, the next layer and the activations of the next chunks are copied. Each round of a
step runs forward over all layers and then backward. In the last round, each layer is updated as soon as its gradients
are complete, and its optimizer states are copied during its backward pass.
"""

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from workloads.instruments import trace
from workloads.llama.attention_kernels import Kernel
from workloads.llama.block import BlockMath, NamedTensors, Unset
from workloads.llama.fp8_block import build_block_math
from workloads.llama.model import Block, loss_and_gradients, rope_table
from workloads.models.model import Model
from workloads.models.routing import NATURAL, Routing
from workloads.offload.gang import Gang, WholeLayers
from workloads.offload.host_memory import Arena
from workloads.offload.optimizer import AdamW, Precision
from workloads.offload.plan import GRADIENT_SLOTS, LOGIT_TOKENS, WEIGHT_SLOTS, Location, Plan, list_saved_tensors
from workloads.offload.ring import PassedChunks, list_turns
from workloads.offload.transfers import ActivationStack, Buffer, CopyStreams, LayerSlots, Slot

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "int8"}


@dataclass
class LayerState:
    """The stored tensors of one layer, each in the location given by the plan."""

    weights: Buffer
    optimizer_states: tuple[Buffer, ...]  # the vectors that `Precision.list_state_vectors` lists
    gradients: Buffer | None = None  # None if a step has one round: gradients then stay in their slot


class EmbeddingAndHead:
    """Embedding, last norm and LM head. Weights and gradients stay on the device; the plan places the optimizer states.

    `sizes` maps the name of each weight of the decoder to its size.
    """

    def __init__(
        self,
        block_math: BlockMath,
        device: torch.device,
        precision: Precision,
        copy_streams: CopyStreams,
        states_on: Location,
        allocate_states: Callable[[int, Location], tuple[Buffer, ...]],
    ) -> None:
        self._math, self._copy_streams, self._states_on = block_math, copy_streams, states_on
        self._has_master_weights, dtype, shape = precision.master_weights, precision.dtype, block_math.shape
        size = (shape.vocabulary, shape.hidden_size)
        self.sizes: dict[str, tuple[int, ...]] = {"embedding.weight": size, "norm.weight": (shape.hidden_size,)}
        if not shape.tied:
            self.sizes["lm_head.weight"] = size
        self._weights = {name: torch.zeros(size, device=device, dtype=dtype) for name, size in self.sizes.items()}
        self._gradients = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}
        self._states = {name: allocate_states(math.prod(size), states_on) for name, size in self.sizes.items()}
        self._lm_head = "embedding.weight" if shape.tied else "lm_head.weight"

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens[…, length] as [tokens, hidden_size]."""
        return nn.functional.embedding(tokens.flatten(), self._weights["embedding.weight"])

    def embed_backward(self, tokens: Tensor, d_x: Tensor) -> None:
        self._gradients["embedding.weight"].index_add_(0, tokens.flatten(), d_x)

    def loss(self, x: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Return `share` times the mean loss of a chunk, and its gradient with respect to x[tokens, hidden_size]. The
        gradients of the last norm and the LM head are accumulated."""
        norm, lm_head = self._weights["norm.weight"], self._weights[self._lm_head]
        d_lm_head = self._gradients[self._lm_head]
        normed = self._math.norm(x, norm)
        loss, d_normed = loss_and_gradients(normed, lm_head, targets.flatten(), LOGIT_TOKENS, d_lm_head, share)
        _, d_x, d_norm = self._math.norm_backward(x, norm, d_normed, torch.zeros((), dtype=x.dtype, device=x.device))
        self._gradients["norm.weight"] += d_norm
        return loss, d_x

    @property
    def gradients(self) -> list[Tensor]:
        return list(self._gradients.values())

    def update(self, optimizer: AdamW, step: int) -> None:
        """Update every weight and zero its gradient. States on the host are copied to the device and back."""
        device = self._weights["norm.weight"].device
        for name, stored in self._states.items():
            states = stored
            if self._states_on == "host":
                states = tuple(Buffer(torch.empty_like(buffer.tensor, device=device)) for buffer in stored)
                for on_device, on_host in zip(states, stored, strict=True):
                    self._copy_streams.release(on_device)
                    self._copy_streams.copy(on_device, on_host)
            self._copy_streams.acquire(*states)
            vectors = (self._weights[name].view(-1), self._gradients[name].view(-1))
            with self._copy_streams.span("optimizer"):
                optimizer.apply(step, *vectors, *(buffer.tensor for buffer in states))
            self._gradients[name].zero_()
            self._copy_streams.release(*states)
            if states is not stored:
                for on_device, on_host in zip(states, stored, strict=True):
                    self._copy_streams.copy(on_host, on_device)
                self._copy_streams.acquire(*states)  # so that their memory is not reused before the copies are done

    def load(self, get_weight: Callable[[str], Tensor]) -> None:
        """Copy all weights from `get_weight(name)`, also into the fp32 master weights if there are any."""
        for name, weight in self._weights.items():
            value = get_weight(name)
            weight.copy_(value)
            for master in self._states[name][-1:] if self._has_master_weights else ():
                master.tensor.copy_(value.flatten())

    @property
    def dtype(self) -> torch.dtype:  # of weights and GEMMs
        return self._weights[self._lm_head].dtype

    def copy_weights(self) -> Iterator[tuple[str, Tensor]]:  # to the host
        return ((name, weight.cpu().clone()) for name, weight in self._weights.items())


class Engine:
    """A model trained as a plan specifies, in host memory from `arena`, which raises OutOfMemory if it is too small.

    Each process of a gang has an engine with the same plan and trains on different sequences. If the model is sharded,
    the layers' vectors are this process's shares, and computation uses `WholeLayers`. The processes of a ring train on
    the same sequences, and each computes the layers assigned to it.
    """

    def __init__(
        self,
        shape: Model,
        plan: Plan,
        arena: Arena,
        device: torch.device,
        kernel: Kernel,
        *,
        precision: Precision | None = None,
        optimizer: AdamW | None = None,
        routing: Routing = NATURAL,
        gang: Gang | None = None,
    ) -> None:
        """Allocate everything that the plan stores. The weights are zero until `load` or `initialize`."""
        assert plan.chunks_per_round % plan.segments_per_sequence == 0
        self.gang = gang or Gang()
        self._own_layers = self.gang.list_own(shape.layers)
        # A ring's plan is made for the process with the most layers.
        self.plan = plan = replace(plan, layers=plan.layers[: len(self._own_layers)])
        assert len(plan.layers) == len(self._own_layers)
        self.shape, self.device = shape, device
        self.precision = precision or Precision()
        self.optimizer = optimizer or AdamW()
        self.steps_done = 0
        self.copy_streams, self._arena = CopyStreams(device), arena
        with torch.device("meta"):
            self._shapes = {name: parameter.shape for name, parameter in Block(shape).named_parameters()}
        self._layer_numel = sum(size.numel() for size in self._shapes.values())
        self._kept_numel = self.gang.count_kept(self._layer_numel)
        self._ropes = rope_table(shape, plan.sequence_length, device).split(plan.chunk_length, dim=1)  # by segment
        keeps_gradients = plan.accumulation_rounds > 1
        self._layers = []
        for layer in plan.layers:
            weights = self._allocate(self._kept_numel, layer.weights)
            state = LayerState(weights, self._allocate_states(self._kept_numel, layer.optimizer_states))
            if keeps_gradients or layer.gradients == "device":
                state.gradients = self._allocate(self._kept_numel, layer.gradients)
            self._layers.append(state)
        self._weights = self._build_slots("weights", WEIGHT_SLOTS + self.gang.is_sharded)
        self._gradients = self._build_slots("gradients", GRADIENT_SLOTS)
        streamed_states = sum(layer.optimizer_states == "host" for layer in plan.layers)
        self._state_slots = [self._allocate_states(self._kept_numel, "device") for _ in range(min(2, streamed_states))]
        self._whole: WholeLayers | None = None
        if self.gang.is_sharded:
            numel, dtype = self._kept_numel * self.gang.ranks, self.precision.dtype
            self._whole = WholeLayers(self.gang, numel, dtype, device, self._split, self.copy_streams)
        self._turns = list_turns(shape.layers, plan.chunks_per_round, self.gang.ranks, self.gang.rank)
        self._unfinished: Callable[[], None] | None = None  # the rest of the last layer's backward pass
        recipe, states_on = self.precision.recipe, plan.embedding_and_head_states
        self._math = build_block_math(shape, kernel, recipe, compiled=device.type != "cpu", routing=routing)
        self._embedding_and_head = EmbeddingAndHead(
            self._math, device, self.precision, self.copy_streams, states_on, self._allocate_states
        )
        self._saved, self._saved_keys_values = (ActivationStack(arena, device, self.copy_streams) for _ in range(2))
        self._keys_values = self._d_keys_values = torch.empty(0)

    def _allocate(self, numel: int, location: Location, dtype: torch.dtype | None = None) -> Buffer:
        dtype = dtype or self.precision.dtype
        if location == "host":
            return Buffer(self._arena.allocate(numel, dtype))
        return Buffer(torch.zeros(numel, dtype=dtype, device=self.device))

    def _allocate_states(self, numel: int, location: Location) -> tuple[Buffer, ...]:
        vectors = self.precision.list_state_vectors(numel)
        return tuple(self._allocate(size, location, dtype) for size, dtype in vectors)

    def _build_slots(self, name: Literal["weights", "gradients"], shared_slots: int) -> LayerSlots:
        stored = [getattr(layer, name) for layer in self._layers]
        resident = [getattr(layer, name) == "device" for layer in self.plan.layers]
        shared = [self._allocate(self._kept_numel, "device") for _ in range(min(shared_slots, resident.count(False)))]
        split = (lambda _: {}) if self.gang.is_sharded else self._split  # a share has no whole parameters
        return LayerSlots(stored, resident, shared, split, self.copy_streams)

    def _split(self, flat: Tensor) -> NamedTensors:
        parts = flat[: self._layer_numel].split([size.numel() for size in self._shapes.values()])
        return {name: part.view(size) for (name, size), part in zip(self._shapes.items(), parts, strict=True)}

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Train on tokens[rounds, groups, sequences, sequence_length + 1]. Return the mean loss, on the device.

        `tokens` has at most as many rounds as the plan. In a gang, the tokens are this process's own, and the loss is
        the mean over all processes.
        """
        plan, rounds = self.plan, min(len(tokens), self.plan.accumulation_rounds)
        expected = (rounds, plan.groups_per_round, plan.sequences_per_chunk, plan.sequence_length + 1)
        if tuple(tokens.shape) != expected or rounds == 0:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}, the plan needs {expected}")
        self.steps_done += 1
        loss = torch.zeros((), device=self.device)
        for n, groups in enumerate(tokens.to(self.device)):
            loss += self._run_round(groups, rounds, is_first=n == 0, is_last=n == rounds - 1)
        self.gang.sum([loss, *self._embedding_and_head.gradients])
        self._embedding_and_head.update(self.optimizer, self.steps_done)
        return loss

    @torch.no_grad()
    def rehearse(self, groups: Tensor) -> None:
        """Run one or two rounds of `step`'s tokens without an update or exchanges that other processes would wait for.
        Afterwards, kernels are compiled, and the process has used nearly all the memory that it will need."""
        counting, self._math = self._math, copy(self._math)  # the copy counts tokens routed by missing weights
        self.copy_streams.skips_exchanges = True
        for n in range(min(2, self.plan.accumulation_rounds)):  # later rounds add to the gradients of the first one
            self._run_round(groups.to(self.device), 1, is_first=n == 0, is_last=False)
        self.copy_streams.skips_exchanges, self._math = False, counting
        for gradient in self._embedding_and_head.gradients:
            gradient.zero_()
        if self._whole:
            self._whole.invalidate()
        self.synchronize()
        self.copy_streams.take_span_times_s()

    def _run_round(self, groups: Tensor, rounds: int, *, is_first: bool, is_last: bool) -> Tensor:
        """Run forward and backward over all layers; the last round updates them. Return the round's loss."""
        plan, length = self.plan, self.plan.chunk_length
        inputs = [chunk for group in groups for chunk in group[:, :-1].split(length, dim=1)]
        targets = [chunk for group in groups for chunk in group[:, 1:].split(length, dim=1)]
        is_first_home = 0 in self._own_layers
        x = {c: self._embedding_and_head.embed(chunk) for c, chunk in enumerate(inputs) if is_first_home}
        if self.gang.is_ring:
            size, dtype = (plan.chunk_tokens, self.shape.hidden_size), self.precision.dtype
            allocate = partial(torch.empty, size, dtype=dtype, device=self.device)
            x = PassedChunks(self._turns, x, allocate, self.copy_streams)
        for n in range(len(plan.layers)):
            self._forward_layer(n, x)
        self._saved_keys_values.start_backward()
        self._saved.start_backward()
        loss = torch.zeros((), device=self.device)
        share = 1.0 / (plan.chunks_per_round * rounds * self.gang.batches)
        with trace.annotate("head and loss"):
            for c in self.gang.list_own(plan.chunks_per_round):
                chunk_loss, x[c] = self._embedding_and_head.loss(x[c], targets[c], share)
                loss += chunk_loss
        for n in reversed(range(len(plan.layers))):
            self._backward_layer(n, x, is_first=is_first, is_last=is_last)
        if self._unfinished:
            self._unfinished()
            self._unfinished = None
        for c, chunk in enumerate(inputs if is_first_home else ()):
            self._embedding_and_head.embed_backward(chunk, x[c])
        return loss

    def _forward_layer(self, n: int, x: dict[int, Tensor]) -> None:
        """Run block n on all chunks. `x` holds the block's input for each chunk and is overwritten with its output."""
        weights = self._fetch_weights(n)
        for m in [m for m in self._weights.streamed_layers if m > n][:1]:
            self._weights.fetch(m)
        if self._whole and n + 1 < len(self.plan.layers):
            self._fetch_weights(n + 1)
        self.copy_streams.acquire(weights.buffer)
        with trace.annotate(f"layer {n} forward"):
            operands = self._math.cast_weights(weights.tensors, backward=False)
            for c in range(self.plan.chunks_per_round):
                x[c] = self._forward_chunk(n, operands, c, x[c])
        self.copy_streams.release(weights.buffer)

    def _fetch_weights(self, n: int) -> Slot:
        """Return the slot of layer n's whole weights, and queue the transfers that the slot still needs."""
        return self._whole.gather(n, self._weights) if self._whole else self._weights.fetch(n)

    def _forward_chunk(self, n: int, weights: NamedTensors, c: int, x: Tensor) -> Tensor:
        plan, segment = self.plan, c % self.plan.segments_per_sequence
        start, end = segment * plan.chunk_length, (segment + 1) * plan.chunk_length
        if plan.segments_per_sequence > 1 and segment == 0:
            size = (plan.sequences_per_chunk, plan.sequence_length, 2 * self.shape.kv_heads, self.shape.head_size)
            self._keys_values = torch.empty(size, dtype=self.precision.dtype, device=self.device)
        past_kv = self._keys_values[:, :start] if segment else None
        out, activations = self._math.forward(weights, x, self._ropes[segment], past_kv)
        choice, location = plan.layers[n].activations_of(c)
        names = list_saved_tensors(choice, plan.segments_per_sequence)
        self._saved.push({name: activations[name] for name in names}, location)
        if plan.segments_per_sequence > 1:
            self._keys_values[:, start:end] = activations["kv"]
            if segment == plan.segments_per_sequence - 1:
                self._saved_keys_values.push({"keys_values": self._keys_values}, plan.keys_values_on)
        return out

    def _backward_layer(self, n: int, d: dict[int, Tensor], *, is_first: bool, is_last: bool) -> None:
        """Run backward through block n for all chunks, last chunk first. Then finish it or, if sharded, the block
        processed before. `d` holds the gradient of each chunk's output and is overwritten with that of its input."""
        weights, kept_gradients = self._fetch_weights(n), self._gradients.get(n)
        if is_first:
            kept_gradients.layer = n
        else:
            self._gradients.fetch(n)
        gradients = self._whole.gradients(n) if self._whole else kept_gradients
        stored_states = self._layers[n].optimizer_states if is_last else ()
        states = stored_states
        if is_last and self.plan.layers[n].optimizer_states == "host":
            # States are copied before the next layer: the next layer waits for a slot, and states do not.
            states = self._state_slots[n % len(self._state_slots)]
            for target, source in zip(states, stored_states, strict=True):
                self.copy_streams.copy(target, source)
        for slots in [self._weights] if is_first else [self._weights, self._gradients]:
            for m in [m for m in reversed(slots.streamed_layers) if m < n][:1]:
                slots.fetch(m)
        if self._whole and n > 0:
            self._fetch_weights(n - 1)
        self.copy_streams.acquire(weights.buffer, gradients.buffer)
        sums = Unset(gradients.tensors) if is_first or self._whole else gradients.tensors
        with trace.annotate(f"layer {n} backward"):
            recomputes = self.shape.qk_norm or any(choice != "full" for choice, _ in self.plan.layers[n].activations)
            operands = self._math.cast_weights(weights.tensors, forward=bool(recomputes))
            for c in reversed(range(self.plan.chunks_per_round)):
                d[c] = self._backward_chunk(operands, sums, c, d[c])
        self.copy_streams.release(weights.buffer, gradients.buffer)
        finish: Callable[[], None] | None = partial(self._finish_layer, n, stored_states, states, is_first, is_last)
        if self._whole:  # shares are reduced while the next layer computes; this layer is finished later
            self._unfinished, finish = finish, self._unfinished
        elif is_last and self.gang.distribution == "replicas":
            tensor = gradients.buffer.tensor
            received_bytes = 2 * tensor.nbytes * (self.gang.ranks - 1) // self.gang.ranks
            self.copy_streams.exchange(lambda: self.gang.sum([tensor]), received_bytes, gradients.buffer)
        if finish:
            finish()
        if self._whole:
            self._whole.reduce(n)

    def _finish_layer(
        self,
        n: int,
        stored_states: tuple[Buffer, ...],
        states: tuple[Buffer, ...],  # on the device
        is_first: bool,
        is_last: bool,
    ) -> None:
        weights, gradients = self._weights.get(n), self._gradients.get(n)
        if self._whole:
            self._whole.take_reduced(n, gradients.buffer, is_first=is_first)
        if not is_last:
            self._gradients.store(n)
            return
        if self._whole:
            self._whole.invalidate(n)
        updated = (weights.buffer, gradients.buffer, *states)
        self.copy_streams.acquire(*updated)
        with self.copy_streams.span("optimizer"), trace.annotate(f"layer {n} update"):
            self.optimizer.apply(self.steps_done, *(buffer.tensor for buffer in updated))
        self.copy_streams.release(*updated)
        self._weights.store(n)  # before the states: the weights of the layer after next use this slot
        if states is not stored_states:
            for target, source in zip(stored_states, states, strict=True):
                self.copy_streams.copy(target, source)

    def _backward_chunk(self, weights: NamedTensors, gradients: NamedTensors, c: int, d_out: Tensor) -> Tensor:
        plan, segment = self.plan, c % self.plan.segments_per_sequence
        if plan.segments_per_sequence == 1:
            return self._math.backward(weights, gradients, self._saved.pop(), self._ropes[0], d_out)
        if segment == plan.segments_per_sequence - 1:
            self._keys_values = self._d_keys_values = torch.empty(0)  # freed before the next tensors are allocated
            self._keys_values = self._saved_keys_values.pop()["keys_values"]
            self._d_keys_values = torch.zeros_like(self._keys_values, dtype=torch.float32)
        activations = self._saved.pop()
        start, end = segment * plan.chunk_length, (segment + 1) * plan.chunk_length
        earlier = self._keys_values[:, :start] if segment else None
        activations["kv"] = self._keys_values[:, start:end]
        d_keys_values = self._d_keys_values[:, start:end], self._d_keys_values[:, :start]
        return self._math.backward(weights, gradients, activations, self._ropes[segment], d_out, earlier, d_keys_values)

    def load(self, get_weight: Callable[[str], Tensor]) -> None:
        """Copy all weights from `get_weight(name)`, by their names in the decoder."""
        for n in range(self.shape.layers):
            # Read every weight exactly once: a function that draws weights would return different weights next time.
            flat = torch.cat([get_weight(f"blocks.{n}.{name}").flatten() for name in self._shapes])
            if n not in self._own_layers:
                continue
            layer = self._layers[self._own_layers.index(n)]
            if self.gang.is_sharded:
                flat = nn.functional.pad(flat, (0, self._kept_numel * self.gang.ranks - self._layer_numel))
            masters = layer.optimizer_states[-1:] if self.precision.master_weights else ()
            for buffer in (layer.weights, *masters):
                buffer.tensor.copy_(self.gang.select_share(flat))
        self._weights.invalidate()
        self._embedding_and_head.load(get_weight)
        self.synchronize()

    def initialize(self, seed: int) -> None:
        """Draw normal weights with a standard deviation of 0.02, independent of the plan. Norms are 1, biases 0."""
        device, dtype = self.device, self.precision.dtype
        generator = torch.Generator(device).manual_seed(seed)

        def draw(name: str) -> Tensor:
            size = self._embedding_and_head.sizes.get(name) or self._shapes[name.split(".", 2)[2]]
            if len(size) == 1:
                return torch.full(size, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=device)
            return torch.empty(size, dtype=dtype, device=device).normal_(std=0.02, generator=generator)

        self.load(draw)

    def copy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield host copies of all weights, with their names in the decoder. Every process must consume all of them."""
        self.synchronize()
        yield from self._embedding_and_head.copy_weights()
        for n in range(self.shape.layers):
            if n in self._own_layers:
                kept = self._layers[self._own_layers.index(n)].weights.tensor.to(self.device)
            else:
                kept = torch.empty(self._kept_numel, dtype=self.precision.dtype, device=self.device)
            parts = self._split(self.gang.gather(n, kept).cpu())
            yield from ((f"blocks.{n}.{name}", part.clone()) for name, part in parts.items())

    @property
    def peer_bytes(self) -> int:
        """The device memory that other processes write to, which PyTorch's allocator does not count."""
        return self._whole.peers.size_bytes if self._whole and self._whole.peers else 0

    def peak_device_bytes(self) -> int:
        """Return the most GPU memory that this process has reserved; 0 on a CPU, which does not report it."""
        return torch.cuda.max_memory_reserved(self.device) + self.peer_bytes if self.copy_streams.on_gpu else 0

    def close(self) -> None:
        """Free the memory that processes share. All processes call this together; afterwards, do not use the engine."""
        self.synchronize()
        if self._whole and self._whole.peers:
            self._whole.peers.close()

    @property
    def matrix_dtype(self) -> str:
        """The recipe or data type of the blocks' matrix products, read from the objects that compute them."""
        return self._math.recipe or DTYPE_NAMES[self._layers[0].weights.tensor.dtype]

    @property
    def imbalance(self) -> float | None:
        """The busiest expert's tokens divided by the mean, averaged over chunks and layers; None without experts."""
        return self._math.imbalance

    def describe_types(self) -> dict[str, str]:
        """Return the data types of the engine's tensors, read from the tensors themselves."""
        layer, states = self._layers[0], self._layers[0].optimizer_states
        types = {
            "type_of_block_products": self.matrix_dtype,
            "type_of_weights": DTYPE_NAMES[layer.weights.tensor.dtype],
            "type_of_optimizer_states": DTYPE_NAMES[states[0].tensor.dtype],  # of momentum and variance
            # Besides master weights, the optimizer has two vectors, or four with int8.
            "type_of_master_weights": "fp32" if len(states) % 2 == 1 else "none",
            "type_of_embedding_and_head": DTYPE_NAMES[self._embedding_and_head.dtype],
        }
        return types | ({"scales_of_block_products": self._math.scales} if self._math.scales else {})

    def synchronize(self) -> None:
        """Wait for all work that is queued on the device."""
        if self.copy_streams.on_gpu:
            torch.cuda.synchronize(self.device)
