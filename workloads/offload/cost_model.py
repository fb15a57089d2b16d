"""The memory and the time that a placement needs, by the measured rates of the device. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from workloads.models.model import Model
from workloads.offload.plan import (
    CHUNKS_IN_FLIGHT,
    GIB,
    GRADIENT_SLOTS,
    LOGIT_TOKENS,
    WEIGHT_SLOTS,
    Division,
    SavedActivations,
    count_kv_bytes_per_token,
    count_saved_bytes_per_token,
)

Array = NDArray[np.float64]
Number = TypeVar("Number", float, Array)
ALLOCATOR_SLACK = 1.03  # bytes that an allocator reserves, over the bytes that are allocated from it


@dataclass(frozen=True)
class DeviceRates:
    """The measured rates of one device for one model and sequence length."""

    # Of one block with every activation saved; for sequences of more than `min_chunk_tokens` in segments of as many.
    forward_s_per_token: float
    backward_s_per_token: float
    recompute_s_per_token: Mapping[SavedActivations, float]  # added to the backward pass of one block
    lm_head_s_per_token: float  # of the LM head with its loss, forward and backward
    h2d_s_per_byte: float  # of copies from the host to the device, while those back run too
    d2h_s_per_byte: float
    optimizer_s_per_byte: float  # of AdamW, for each byte of weights
    workspace_bytes_per_token: float  # the most that the backward pass of one block allocates
    min_chunk_tokens: int  # the fewest tokens of a chunk that these rates hold for
    weight_cast_s: float = 0.0  # of one block for a pass over it; 0 if its products take the weights as they are
    gradient_sum_s: float = 0.0  # of adding a chunk's weight gradients of one block; 0 if the products add them
    split_forward_s_per_token: float = 0.0  # of one block, for each further segment of a sequence
    split_backward_s_per_token: float = 0.0

    def pass_s_per_token(self, sequence_length: int, segments: int) -> tuple[float, float]:
        """Return the seconds per token of a block's forward and backward pass over sequences in `segments` segments."""
        added = segments - max(1.0, sequence_length / self.min_chunk_tokens)
        return (
            self.forward_s_per_token + added * self.split_forward_s_per_token,
            self.backward_s_per_token + added * self.split_backward_s_per_token,
        )


@dataclass(frozen=True)
class MemoryBudget:
    device_gib: float
    host_gib: float


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of the model to train."""

    shape: Model
    element_bytes: int  # of one number of weights, gradients and activations
    state_bytes_per_parameter: float  # of the optimizer's states
    cast_bytes_per_parameter: int = 0  # of the block that computes, cast for its products
    token_multiple: int = 1  # the tokens of a chunk are a multiple of it

    @cached_property
    def embedding_and_head_parameters(self) -> int:
        return self.shape.embedding_and_head_parameters

    @cached_property
    def layer_parameters(self) -> int:
        return self.shape.block_parameters(0)

    @property
    def layer_weight_bytes(self) -> int:
        return self.layer_parameters * self.element_bytes

    @property
    def layer_state_bytes(self) -> float:
        return self.layer_parameters * self.state_bytes_per_parameter


@dataclass(frozen=True)
class Placement(Division):
    """The division of a step and the state that stays on the device, before the saved activations are chosen."""

    resident_layers: int  # whose weights and gradients stay on the device
    resident_state_layers: int  # whose optimizer states stay on the device


class ActivationMemory(NamedTuple):
    """Bytes of a budget that are left for saved activations, and by how many GiB a placement exceeds the budget."""

    device_bytes: float
    host_bytes: float
    missing_gib: float


def compute_activation_memory(
    placement: Placement, model: ModelSizes, budget: MemoryBudget, rates: DeviceRates
) -> ActivationMemory:
    """Return what is left; a placement exceeds the budget if even layers that save their input alone do not fit."""
    device = budget.device_gib * GIB / ALLOCATOR_SLACK - count_fixed_device_bytes(placement, model, rates)
    host = budget.host_gib * GIB - count_fixed_host_bytes(placement, model)
    fewest = count_fewest_activation_bytes(placement, model)
    missing = max(0.0, -device) + max(0.0, fewest - max(0.0, device) - max(0.0, host)) + max(0.0, -host)
    return ActivationMemory(device, host, missing / GIB)


def count_fewest_activation_bytes(placement: Placement, model: ModelSizes) -> int:
    """Return the bytes that a round saves if every layer saves its input alone."""
    return model.shape.layers * placement.chunks_per_round * count_chunk_saved_bytes(placement, model, "input")


def count_chunk_saved_bytes(placement: Placement, model: ModelSizes, saved_activations: SavedActivations) -> int:
    return placement.chunk_tokens * count_saved_bytes_per_token(
        model.shape, saved_activations, model.element_bytes, placement.segments_per_sequence
    )


def count_transfer_bytes(placement: Placement, model: ModelSizes, saved_activations: SavedActivations) -> int:
    """Return the device memory for chunks that are saved on the host: those in flight, and the one in use."""
    return (CHUNKS_IN_FLIGHT + 1) * count_chunk_saved_bytes(placement, model, saved_activations)


def _count_segmented_kv_bytes(placement: Placement, model: ModelSizes, tokens: int) -> int:
    """Return the bytes of a layer's keys and values of `tokens` if sequences are in several segments, or 0."""
    if placement.segments_per_sequence == 1:
        return 0
    return tokens * count_kv_bytes_per_token(model.shape, model.element_bytes)


def _count_host_kv_bytes(placement: Placement, model: ModelSizes) -> int:  # of a layer in a round
    tokens = placement.round_tokens if placement.keys_values_on == "host" else 0
    return _count_segmented_kv_bytes(placement, model, tokens)


def count_fixed_device_bytes(placement: Placement, model: ModelSizes, rates: DeviceRates) -> float:
    """Return the device memory that a placement needs in addition to the saved activations."""
    shape, element_bytes, layer = model.shape, model.element_bytes, model.layer_weight_bytes
    streamed_layers = shape.layers - placement.resident_layers
    streamed_state_layers = shape.layers - placement.resident_state_layers
    total = 2.0 * model.embedding_and_head_parameters * element_bytes
    # States on the host are copied to the device for one weight at a time, of which the embedding is the largest.
    states_on_device = placement.embedding_and_head_states == "device"
    parameters = model.embedding_and_head_parameters if states_on_device else shape.vocabulary * shape.hidden_size
    total += parameters * model.state_bytes_per_parameter
    total += 2 * layer * placement.resident_layers + model.layer_state_bytes * placement.resident_state_layers
    total += layer * (min(WEIGHT_SLOTS, streamed_layers) + min(GRADIENT_SLOTS, streamed_layers))
    total += model.layer_state_bytes * min(2, streamed_state_layers)
    total += model.layer_parameters * model.cast_bytes_per_parameter
    # Hidden states between two blocks, and what the embedding and the LM head compute with.
    total += (placement.round_tokens + 4 * placement.chunk_tokens) * shape.hidden_size * element_bytes
    # Keys and values of the sequences that are computed, with their gradients in fp32, and those that are saved.
    group_kv_bytes = _count_segmented_kv_bytes(
        placement, model, placement.sequences_per_chunk * placement.sequence_length
    )
    total += group_kv_bytes * (1 + 4 / element_bytes)
    if placement.keys_values_on == "device":
        total += shape.layers * _count_segmented_kv_bytes(placement, model, placement.round_tokens)
    else:
        total += CHUNKS_IN_FLIGHT * group_kv_bytes
    loss = 3 * min(LOGIT_TOKENS, placement.chunk_tokens) * shape.vocabulary * max(element_bytes, 2)
    return total + max(loss, placement.chunk_tokens * rates.workspace_bytes_per_token)


def count_fixed_host_bytes(placement: Placement, model: ModelSizes) -> float:
    """Return the host memory that a placement needs in addition to the saved activations.

    Gradients of streamed layers are stored on the host between accumulation rounds, so not if there is one round only.
    """
    layers, vectors, total = model.shape.layers, 2 if placement.accumulation_rounds > 1 else 1, 0.0
    if placement.embedding_and_head_states == "host":
        total += model.embedding_and_head_parameters * model.state_bytes_per_parameter
    total += model.layer_state_bytes * (layers - placement.resident_state_layers)
    total += layers * _count_host_kv_bytes(placement, model)
    return total + (layers - placement.resident_layers) * model.layer_weight_bytes * vectors


class StepTimes(NamedTuple, Generic[Number]):
    """The predicted time of a step, or of a part of it; as arrays, for several choices of saved activations."""

    step_s: Number
    copy_wait_s: Number  # of `step_s`, in which computation waits for copies
    copied_bytes: Number  # in both directions


@dataclass(frozen=True)
class _Pass:
    """A pass over all layers, forward or backward."""

    count: int  # passes of this kind in a step
    h2d_vectors: int  # weights or gradients of a streamed layer that are copied
    d2h_vectors: int
    backward: bool
    updates: bool  # the optimizer updates each layer, and streamed states are copied in both directions


def predict_block_times(
    placement: Placement, recompute_s_per_token: Array, host_bytes: Array, model: ModelSizes, rates: DeviceRates
) -> StepTimes[Array]:
    """Predict the part of a step in the blocks.

    Copies and computation overlap. Each pass over a layer takes as long as the longest of them, since weights are
    copied no further ahead than one layer. Chunks that are saved alike are spread evenly over all layers, so that
    every layer copies as many activations. `recompute_s_per_token` is the mean over layers and chunks, and `host_bytes`
    are the activations of a round, of all layers, that are saved on the host; its last dimension is that of the former.
    """
    layers, weight_bytes, rounds = model.shape.layers, model.layer_weight_bytes, placement.accumulation_rounds
    # After the first round the accumulated gradients are copied to the device too.
    passes = (
        _Pass(rounds, 1, 0, backward=False, updates=False),
        _Pass(1, 2 if rounds > 1 else 1, 1, backward=True, updates=True),  # the last round
        _Pass(min(1, rounds - 1), 1, 1, backward=True, updates=False),  # the first of several
        _Pass(max(0, rounds - 2), 2, 1, backward=True, updates=False),
    )
    # Bytes that are copied of a layer, and the share of the layers that it holds for: streamed, then resident.
    resident, resident_states = placement.resident_layers / layers, placement.resident_state_layers / layers
    vectors = ((weight_bytes, 1 - resident), (0, resident))
    optimizer_states = ((model.layer_state_bytes, 1 - resident_states), (0, resident_states))
    activations = host_bytes / layers + _count_host_kv_bytes(placement, model)
    forward_s_per_token, backward_s_per_token = rates.pass_s_per_token(
        placement.sequence_length, placement.segments_per_sequence
    )
    forward_s = np.full_like(activations, placement.round_tokens * forward_s_per_token)
    backward_s = placement.round_tokens * (backward_s_per_token + recompute_s_per_token)
    backward_s = backward_s + placement.chunks_per_round * rates.gradient_sum_s
    times = StepTimes(*(np.zeros_like(activations) for _ in range(3)))
    for layer_pass, (vector_bytes, share), (state_bytes, state_share) in product(passes, vectors, optimizer_states):
        count = layers * layer_pass.count * share * state_share
        if count == 0:
            continue
        state_copy_bytes = state_bytes if layer_pass.updates else 0
        h2d_bytes = layer_pass.h2d_vectors * vector_bytes + state_copy_bytes + layer_pass.backward * activations
        d2h_bytes = layer_pass.d2h_vectors * vector_bytes + state_copy_bytes + (not layer_pass.backward) * activations
        update_s = weight_bytes * rates.optimizer_s_per_byte if layer_pass.updates else 0.0
        compute_s = (backward_s if layer_pass.backward else forward_s) + rates.weight_cast_s + update_s
        copy_s = np.maximum(h2d_bytes * rates.h2d_s_per_byte, d2h_bytes * rates.d2h_s_per_byte)
        pass_s = np.maximum(compute_s, copy_s)
        times.step_s[:] += count * pass_s
        times.copy_wait_s[:] += count * (pass_s - compute_s)
        times.copied_bytes[:] += count * (h2d_bytes + d2h_bytes)
    return times


def predict_embedding_and_head_times(placement: Placement, model: ModelSizes, rates: DeviceRates) -> StepTimes[float]:
    """Predict the part of a step outside the blocks: embedding, last norm, LM head and their update.

    States on the host are copied to the device, updated and copied back, with nothing to compute meanwhile.
    """
    tokens = placement.round_tokens * placement.accumulation_rounds
    weight_bytes = model.embedding_and_head_parameters * model.element_bytes
    compute_s = tokens * rates.lm_head_s_per_token + weight_bytes * rates.optimizer_s_per_byte
    states_on_host = placement.embedding_and_head_states == "host"
    state_bytes = model.embedding_and_head_parameters * model.state_bytes_per_parameter if states_on_host else 0
    copy_wait_s = state_bytes * (rates.h2d_s_per_byte + rates.d2h_s_per_byte)
    return StepTimes(compute_s + copy_wait_s, copy_wait_s, 2 * state_bytes)
