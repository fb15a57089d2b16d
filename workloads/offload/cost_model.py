"""Compute the memory and time that a placement needs, using the device's measured rates. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from workloads.models.model import Model
from workloads.offload import plan

Array = NDArray[np.float64]
Number = TypeVar("Number", float, Array)
# Seconds that concurrent computation loses per second of a collective: 0.9 for shards of 8B and 0.65 for 32B on two
# H100s, where clocks fell by 2% and 5% (benchmarks/results/offload_gang_h100.md).
CONTENTION = 0.75
# Seconds of waiting for other GPUs per second of ring computation, beyond the wait that its chunks explain: 70B on two
# H200s waited 6.4% of a step, while the plan predicted 3.3% (benchmarks/results/offload_70b_h200.md).
RING_WAIT = 0.03
ALLOCATOR_SLACK = 1.03  # the bytes that an allocator reserves, divided by the allocated bytes


@dataclass(frozen=True)
class DeviceRates:
    """The measured rates of one device, for one model and sequence length."""

    # For one block with every activation saved. Longer sequences run in segments of `min_chunk_tokens`.
    forward_s_per_token: float
    backward_s_per_token: float
    recompute_s_per_token: Mapping[plan.SavedActivations, float]  # added to one block's backward pass
    lm_head_s_per_token: float  # LM head and loss, forward and backward
    h2d_s_per_byte: float  # copies from host to device while copies in the other direction also run
    d2h_s_per_byte: float
    optimizer_s_per_byte: float  # AdamW, per byte of weights
    workspace_bytes_per_token: float  # the peak that one block's backward pass allocates
    min_chunk_tokens: int  # the smallest chunk for which these rates hold
    weight_cast_s: float = 0.0  # per pass over a block; 0 if its GEMMs read the weights without a cast
    gradient_sum_s: float = 0.0  # adding a chunk's weight gradients of a block; 0 if the GEMMs add them
    split_forward_s_per_token: float = 0.0  # one block, per additional segment of a sequence
    split_backward_s_per_token: float = 0.0
    link_s_per_byte: float = 0.0  # per byte that a GPU receives from other GPUs of its host
    links_are_the_hosts: bool = False  # GPUs communicate over their links to the host
    peer_copy_s_per_byte: float = 0.0  # shares sent by copy engines (`peer_copies`); 0 if collectives send them
    sum_s_per_byte: float = 0.0  # adding one vector to another, per byte

    def pass_s_per_token(self, sequence_length: int, segments: int) -> tuple[float, float]:
        """Return the seconds per token of a block's forward and backward pass over sequences in `segments` segments."""
        added = segments - max(1.0, sequence_length / self.min_chunk_tokens)
        return (
            self.forward_s_per_token + added * self.split_forward_s_per_token,
            self.backward_s_per_token + added * self.split_backward_s_per_token,
        )


@dataclass(frozen=True)
class MemoryBudget:
    device_gib: float  # per GPU
    host_gib: float  # of the host, for all GPUs together


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, and the number of GPUs that train it."""

    shape: Model
    element_bytes: int  # per element of weights, gradients and activations
    state_bytes_per_parameter: float  # of the optimizer's states
    cast_bytes_per_parameter: int = 0  # of the current block, whose weights are cast for its GEMMs
    token_multiple: int = 1  # the tokens of a chunk must be a multiple of this
    padded_tokens: int = 0  # padding adds the expert rows of a chunk with this number of tokens
    gpus: int = 1
    distribution: plan.Distribution | None = None  # None: for one GPU, or not chosen yet

    def distribute(self, distribution: plan.Distribution | None, gpus: int) -> ModelSizes:
        """Return the sizes for one GPU; in a ring, for the GPU with the most layers (0 layers if some GPU has none)."""
        layers = self.shape.layers
        if distribution == "ring":
            layers = -(-layers // gpus) if gpus <= layers else 0
        shape = replace(self.shape, layers=layers)
        return replace(self, shape=shape, distribution=distribution, gpus=gpus)

    @cached_property
    def embedding_and_head_parameters(self) -> int:
        return self.shape.embedding_and_head_parameters

    @cached_property
    def layer_parameters(self) -> int:
        return self.shape.block_parameters(0)

    @property
    def kept_parameters(self) -> float:  # per layer, on one GPU
        return self.layer_parameters / (self.gpus if self.distribution == "sharded" else 1)

    @property
    def layer_weight_bytes(self) -> float:
        return self.kept_parameters * self.element_bytes

    @property
    def layer_state_bytes(self) -> float:
        return self.kept_parameters * self.state_bytes_per_parameter

    @property
    def reduced_share(self) -> float:
        """The bytes that a GPU receives per byte of a vector that is reduced over, or gathered from, all GPUs."""
        return (self.gpus - 1) / self.gpus


class ActivationMemory(NamedTuple):
    """The bytes of a budget left for saved activations, and the GiB by which a placement exceeds the budget."""

    device_bytes: float
    host_bytes: float
    missing_gib: float


@dataclass(frozen=True)
class Placement(plan.Division):
    """How a step is divided and which state stays on the device, before the saved activations are chosen."""

    model: ModelSizes
    resident_layers: int  # layers whose weights and gradients stay on the device
    resident_state_layers: int  # layers whose optimizer states stay on the device

    def activation_memory(self, budget: MemoryBudget, rates: DeviceRates) -> ActivationMemory:
        """Return the memory left. A placement exceeds the budget if saving only each layer's input does not fit."""
        device = budget.device_gib * plan.GIB / ALLOCATOR_SLACK - self.fixed_device_bytes(rates)
        host = budget.host_gib * plan.GIB - self.fixed_host_bytes()
        fewest = self.fewest_activation_bytes()
        missing = max(0.0, -device) + max(0.0, fewest - max(0.0, device) - max(0.0, host)) + max(0.0, -host)
        return ActivationMemory(device, host, missing / plan.GIB)

    def fewest_activation_bytes(self) -> int:
        """Return the bytes that a round saves if every layer saves only its input."""
        return self.model.shape.layers * self.chunks_per_round * self.saved_bytes("input")

    def saved_bytes(self, saved: plan.SavedActivations) -> int:  # per chunk and layer
        shape, element_bytes = self.model.shape, self.model.element_bytes
        tokens = self.chunk_tokens + (self.model.padded_tokens if saved in ("full", "gate") else 0)
        return tokens * plan.count_saved_bytes_per_token(shape, saved, element_bytes, self.segments_per_sequence)

    def transfer_bytes(self, saved: plan.SavedActivations) -> int:
        """Return the device memory for chunks that are saved on the host: chunks in flight and the chunk in use."""
        return (plan.CHUNKS_IN_FLIGHT + 1) * self.saved_bytes(saved)

    def _kv_bytes(self, tokens: int) -> int:
        if self.segments_per_sequence == 1:
            return 0
        return tokens * plan.count_kv_bytes_per_token(self.model.shape, self.model.element_bytes)

    def host_kv_bytes(self) -> int:  # per layer in a round
        return self._kv_bytes(self.round_tokens) if self.keys_values_on == "host" else 0

    def fixed_device_bytes(self, rates: DeviceRates) -> float:
        """Return the device memory that is needed in addition to the saved activations."""
        model, shape, element_bytes = self.model, self.model.shape, self.model.element_bytes
        streamed_layers = shape.layers - self.resident_layers
        total = 2.0 * model.embedding_and_head_parameters * element_bytes
        # States on the host are copied to the device for one weight at a time; the embedding is the largest weight.
        states_on_device = self.embedding_and_head_states == "device"
        parameters = model.embedding_and_head_parameters if states_on_device else shape.vocabulary * shape.hidden_size
        total += parameters * model.state_bytes_per_parameter
        is_sharded = model.distribution == "sharded"
        # A share is updated while the next layer computes, which needs one more slot.
        layer_vectors = 2 * self.resident_layers + min(plan.WEIGHT_SLOTS + is_sharded, streamed_layers)
        total += model.layer_weight_bytes * (layer_vectors + min(plan.GRADIENT_SLOTS, streamed_layers))
        if is_sharded:  # whole weights and gradients, and the gradients that other GPUs send
            total += (2 * plan.GATHERED_SLOTS + model.reduced_share) * model.layer_parameters * element_bytes
        state_layers = self.resident_state_layers + min(2, shape.layers - self.resident_state_layers)
        total += model.layer_state_bytes * state_layers
        total += model.layer_parameters * model.cast_bytes_per_parameter
        # Hidden states between two blocks, and the buffers of the embedding and the LM head.
        total += (self.round_tokens + 4 * self.chunk_tokens) * shape.hidden_size * element_bytes
        # Keys and values of the current sequences, with their gradients in fp32, and the saved keys and values.
        group_kv_bytes = self._kv_bytes(self.sequences_per_chunk * self.sequence_length)
        total += group_kv_bytes * (1 + 4 / element_bytes)
        if self.keys_values_on == "device":
            total += shape.layers * self._kv_bytes(self.round_tokens)
        else:
            total += plan.CHUNKS_IN_FLIGHT * group_kv_bytes
        loss = 3 * min(plan.LOGIT_TOKENS, self.chunk_tokens) * shape.vocabulary * max(element_bytes, 2)
        return total + max(loss, self.chunk_tokens * rates.workspace_bytes_per_token)

    def fixed_host_bytes(self) -> float:
        """Return the host memory needed besides saved activations, with gradients only if there are several rounds."""
        model, layers, vectors = self.model, self.model.shape.layers, 2 if self.accumulation_rounds > 1 else 1
        total = model.layer_state_bytes * (layers - self.resident_state_layers) + layers * self.host_kv_bytes()
        if self.embedding_and_head_states == "host":
            total += model.embedding_and_head_parameters * model.state_bytes_per_parameter
        return total + (layers - self.resident_layers) * model.layer_weight_bytes * vectors


class StepTimes(NamedTuple, Generic[Number]):
    """The predicted time of a step or part of a step; an array has one entry per choice of saved activations."""

    step_s: Number
    copy_wait_s: Number  # the part of `step_s` in which computation waits for copies or, in a ring, for other GPUs
    copied_bytes: Number  # in both directions


def predict_step_times(
    placement: Placement, recompute_s_per_token: Array, host_bytes: Array, rates: DeviceRates
) -> StepTimes[Array]:
    """Predict the times of a step.

    Copies and computation overlap. Each pass over a layer takes as long as the slower of the two, since weights are
    copied at most one layer ahead. Chunks that are saved in the same way are spread evenly over all layers, so every
    layer copies equally many activations. `recompute_s_per_token` is a mean over layers and chunks. `host_bytes` is the
    total size of a round's activations on the host, over all layers. Both arrays have the same last dimension.
    """
    model, rounds = placement.model, placement.accumulation_rounds
    layers, weight_bytes = model.shape.layers, model.layer_weight_bytes
    is_ring = model.distribution == "ring"
    # For each kind of pass: how many times a step runs it; how many vectors (weights or gradients) of a streamed layer
    # are copied to the device, and back; whether it is a backward pass; and whether it updates the layers, which copies
    # their states in both directions. After the first round, the accumulated gradients are also copied to the device.
    passes = (
        (rounds, 1, 0, False, False),
        (1, 2 if rounds > 1 else 1, 1, True, True),  # the last round
        (min(1, rounds - 1), 1, 1, True, False),  # the first of several
        (max(0, rounds - 2), 2, 1, True, False),
    )
    # The bytes copied per layer, and the share of layers that they apply to: streamed, then resident.
    resident, resident_states = placement.resident_layers / layers, placement.resident_state_layers / layers
    vectors = ((weight_bytes, 1 - resident), (0, resident))
    optimizer_states = ((model.layer_state_bytes, 1 - resident_states), (0, resident_states))
    activations = host_bytes / layers + placement.host_kv_bytes()
    forward_s_per_token, backward_s_per_token = rates.pass_s_per_token(
        placement.sequence_length, placement.segments_per_sequence
    )
    forward_s = np.full_like(activations, placement.round_tokens * forward_s_per_token)
    backward_s = placement.round_tokens * (backward_s_per_token + recompute_s_per_token)
    backward_s = backward_s + placement.chunks_per_round * rates.gradient_sum_s
    times = StepTimes(*(np.zeros_like(activations) for _ in range(3)))
    if is_ring:  # every GPU waits for the first chunk of a pass, and for one chunk per GPU
        chunk_s = (forward_s + backward_s) / placement.chunks_per_round
        times.step_s[:] += rounds * ((model.gpus - 1) * chunk_s + RING_WAIT * layers * (forward_s + backward_s))
        times.copy_wait_s[:] += times.step_s
        waits = max(1.0, model.gpus / placement.chunks_per_round)
        forward_s, backward_s = forward_s * waits, backward_s * waits
    for layer_pass, (vector_bytes, share), (state_bytes, state_share) in product(passes, vectors, optimizer_states):
        pass_count, h2d_vectors, d2h_vectors, is_backward, updates = layer_pass
        count = layers * pass_count * share * state_share
        if count == 0:
            continue
        state_copy_bytes = state_bytes if updates else 0
        h2d_bytes = h2d_vectors * vector_bytes + state_copy_bytes + is_backward * activations
        d2h_bytes = d2h_vectors * vector_bytes + state_copy_bytes + (not is_backward) * activations
        update_s = weight_bytes * rates.optimizer_s_per_byte if updates else 0.0
        # All GPUs of a ring wait for the GPU that starts or updates a layer; each GPU does so in a different turn.
        once_s = (rates.weight_cast_s + update_s) * (model.gpus if is_ring else 1)
        compute_s = (backward_s if is_backward else forward_s) + once_s
        received_bytes = _count_received_bytes(placement, is_backward, updates)
        if model.distribution == "sharded" and is_backward:
            # One kernel reads the shares that other GPUs have copied, this GPU's share and the kept share, and writes
            # the kept share. `sum_s_per_byte` covers three accesses.
            accesses = 3 / model.gpus + (model.reduced_share if rates.peer_copy_s_per_byte else 0)
            summed_bytes = accesses / 3 * model.layer_parameters * model.element_bytes
            compute_s = compute_s + summed_bytes * rates.sum_s_per_byte
        if model.distribution == "sharded" and rates.peer_copy_s_per_byte:
            link_s = received_bytes * rates.peer_copy_s_per_byte
        else:
            link_s = received_bytes * rates.link_s_per_byte
            # Shards are exchanged during computation. Replicas average a layer's gradients before its update, and a
            # ring passes chunks on before the next turn.
            compute_s = compute_s + link_s * (CONTENTION if model.distribution == "sharded" else 1)
        if rates.links_are_the_hosts:
            h2d_bytes, d2h_bytes = h2d_bytes + received_bytes, d2h_bytes + received_bytes
        copies_s = np.maximum(h2d_bytes * rates.h2d_s_per_byte, d2h_bytes * rates.d2h_s_per_byte)
        pass_s = np.maximum(compute_s, np.maximum(copies_s, link_s))
        times.step_s[:] += count * pass_s
        times.copy_wait_s[:] += count * (pass_s - compute_s + (link_s if is_ring else 0))
        times.copied_bytes[:] += count * (h2d_bytes + d2h_bytes)
    # Outside the blocks: embedding, last norm, LM head and their update, which every GPU repeats. States on the host
    # are copied to the device, updated and copied back, and nothing is computed meanwhile.
    parameters, states_on_host = model.embedding_and_head_parameters, placement.embedding_and_head_states == "host"
    head_chunks = -(-placement.chunks_per_round // model.gpus) if is_ring else placement.chunks_per_round
    head_s = rounds * head_chunks * placement.chunk_tokens * rates.lm_head_s_per_token
    head_s += 2 * model.reduced_share * parameters * model.element_bytes * rates.link_s_per_byte
    head_s += parameters * model.element_bytes * rates.optimizer_s_per_byte
    state_bytes = parameters * model.state_bytes_per_parameter if states_on_host else 0
    wait_s = state_bytes * (rates.h2d_s_per_byte + rates.d2h_s_per_byte)
    return StepTimes(times.step_s + (head_s + wait_s), times.copy_wait_s + wait_s, times.copied_bytes + 2 * state_bytes)


def _count_received_bytes(placement: Placement, is_backward: bool, updates: bool) -> float:
    model, whole_bytes = placement.model, placement.model.layer_parameters * placement.model.element_bytes
    if model.distribution == "ring":  # the round's hidden states, or their gradients
        return placement.round_tokens * model.shape.hidden_size * model.element_bytes
    if model.distribution == "sharded":  # weights for each pass, and gradients
        return (2 if is_backward else 1) * model.reduced_share * whole_bytes
    return 2 * model.reduced_share * whole_bytes if updates else 0.0
