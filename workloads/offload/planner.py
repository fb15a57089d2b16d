"""The search for the fastest plan within memory budgets, by the measured rates of the device. No torch.

Every plan that fits a budget fits every larger one, and the search takes the fastest of them. So a larger budget is
never predicted to be slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from workloads.api.contract import Infeasible
from workloads.offload.cost_model import (
    ALLOCATOR_SLACK,
    ActivationMemory,
    DeviceRates,
    MemoryBudget,
    ModelSizes,
    Placement,
    Shortfall,
    StepTimes,
    compute_activation_memory,
    count_chunk_saved_bytes,
    count_fixed_device_bytes,
    count_fixed_host_bytes,
    count_transfer_bytes,
    predict_block_times,
    predict_embedding_and_head_times,
)
from workloads.offload.plan import SAVED_ACTIVATIONS, ActivationPlan, LayerPlan, Location, Plan

MAX_CHUNK_TOKENS = 32768
MAX_DIVISIONS = 64  # parts that the chunks of all layers are divided into between two choices of saved activations
ChunkCounts = dict[ActivationPlan, int]  # chunks of all layers by what is saved of them and where


@dataclass(frozen=True)
class Prediction:
    """A plan with its predicted times and memory."""

    plan: Plan
    times: StepTimes
    device_bytes: float
    host_bytes: float


@dataclass(frozen=True)
class _Candidate:
    placement: Placement
    chunk_counts: ChunkCounts
    times: StepTimes


def find_fastest_plan(
    model: ModelSizes, sequence_length: int, sequences_per_step: int, budget: MemoryBudget, rates: DeviceRates
) -> Prediction:
    """Return the plan within the budget that is predicted to be the fastest.

    Raises:
        Infeasible: no plan fits; the message has the GiB that are missing.
    """
    shapes = _list_chunk_shapes(sequence_length, sequences_per_step, rates.min_chunk_tokens, model.token_multiple)
    placements = list(_enumerate_placements(model.shape.layers, sequence_length, sequences_per_step, shapes))
    memories = [compute_activation_memory(placement, model, budget, rates) for placement in placements]
    bounded = [
        (_predict_lower_bound_s(placement, model, rates), placement, memory)
        for placement, memory in zip(placements, memories, strict=True)
        if isinstance(memory, ActivationMemory)
    ]
    best: _Candidate | None = None
    # The fastest bound first: once it is slower than the best plan, so are all that follow.
    for bound_s, placement, memory in sorted(bounded, key=lambda entry: entry[0]):
        if best and bound_s > best.times.step_s * (1 + 1e-9):
            break
        candidate = _choose_saved_activations(placement, memory, model, rates)
        if candidate and (best is None or candidate.times.is_better_than(best.times)):
            best = candidate
    if best is None:
        smallest = min((memory for memory in memories if isinstance(memory, Shortfall)), default=None)
        reason = f"at least {smallest.gib:.3g} GiB more needed ({smallest.needs})" if smallest else "no plan fits"
        raise Infeasible(f"device_gib={budget.device_gib:g} and host_gib={budget.host_gib:g} are too small: {reason}")
    return _build_prediction(best, model, rates)


def _enumerate_placements(
    layers: int, sequence_length: int, sequences_per_step: int, chunk_shapes: list[tuple[int, int]]
) -> Iterator[Placement]:
    """Yield every division of a step into rounds and chunks with every number of resident layers.

    Numbers of resident layers go in steps of a sixteenth of the layers.
    """
    resident_step = max(1, layers // 16)
    for sequences, segments in chunk_shapes:
        groups_per_step = sequences_per_step // sequences
        for rounds in _list_divisors(groups_per_step):
            chunks = groups_per_step // rounds * segments
            for resident in sorted({*range(0, layers, resident_step), layers}):
                for resident_states in sorted({0, layers // 2, layers}):
                    for location in ("device", "host"):
                        fields = (sequence_length, sequences, segments, chunks, rounds, resident, resident_states)
                        yield Placement(*fields, location)
                        if segments > 1:
                            yield Placement(*fields, location, keys_values_on="host")


def _list_chunk_shapes(
    sequence_length: int, sequences_per_step: int, min_chunk_tokens: int, token_multiple: int
) -> list[tuple[int, int]]:
    """Return the sequences of a chunk and the segments of a sequence that a plan may have.

    A chunk has a multiple of `token_multiple` tokens, at least `min_chunk_tokens` or those of the whole step, and at
    most MAX_CHUNK_TOKENS. If every shape has more, the smallest ones remain.
    """
    whole = [(sequences, 1) for sequences in _list_divisors(sequences_per_step)]
    shapes = whole + [(1, segments) for segments in _list_divisors(sequence_length)[1:]]
    tokens = {(sequences, segments): sequences * sequence_length // segments for sequences, segments in shapes}
    min_tokens = min(min_chunk_tokens, sequence_length * sequences_per_step)
    shapes = [shape for shape in shapes if tokens[shape] >= min_tokens and tokens[shape] % token_multiple == 0]
    max_tokens = max(MAX_CHUNK_TOKENS, min(tokens[shape] for shape in shapes))
    return [shape for shape in shapes if tokens[shape] <= max_tokens]


def _list_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _predict_lower_bound_s(placement: Placement, model: ModelSizes, rates: DeviceRates) -> float:
    """Return the time of a step that saves every activation on the device."""
    blocks = predict_block_times(placement, np.zeros(1), np.zeros(1), model, rates)
    return float(blocks.step_s[0]) + predict_embedding_and_head_times(placement, model, rates).step_s


def _choose_saved_activations(
    placement: Placement, memory: ActivationMemory, model: ModelSizes, rates: DeviceRates
) -> _Candidate | None:
    """Return the placement with the fastest choice of saved activations, or None if none fits into `memory`.

    The activations of as many chunks as fit are saved on the device, those of the others on the host. The ways to
    divide the chunks of all layers among the choices are rows of a table [ways, choices], so that all of them are
    judged at once.
    """
    counts = _list_divisions(model.shape.layers * placement.chunks_per_round)
    chunk_bytes = np.array(
        [count_chunk_saved_bytes(placement, model, saved) for saved in SAVED_ACTIVATIONS], dtype=float
    )
    transfer_bytes = np.array(
        [count_transfer_bytes(placement, model, saved) for saved in SAVED_ACTIVATIONS], dtype=float
    )
    all_on_device = counts @ chunk_bytes <= memory.device_bytes
    # The choice that saves the most of those in a row needs the largest buffers for copies.
    free_bytes = memory.device_bytes - np.where(all_on_device, 0, transfer_bytes[np.argmax(counts > 0, axis=1)])
    on_device = np.zeros_like(counts)
    for column, size in enumerate(chunk_bytes):
        on_device[:, column] = np.clip(free_bytes // size, 0, counts[:, column])
        free_bytes = free_bytes - on_device[:, column] * size
    host_bytes = (counts - on_device) @ chunk_bytes
    fits = (free_bytes >= 0) & (host_bytes <= memory.host_bytes)
    if not fits.any():
        return None
    counts, on_device = counts[fits], on_device[fits]
    recompute_s = np.array([rates.recompute_s_per_token[saved] for saved in SAVED_ACTIVATIONS])
    mean_recompute_s = counts @ recompute_s / counts.sum(axis=1)
    blocks = predict_block_times(placement, mean_recompute_s, host_bytes[fits], model, rates)
    fastest = blocks.step_s <= blocks.step_s.min() * (1 + 1e-9)
    best = np.flatnonzero(fastest)[np.argmin(blocks.copied_bytes[fastest])]
    others = predict_embedding_and_head_times(placement, model, rates)
    times = StepTimes(*(float(column[best]) + other for column, other in zip(blocks, astuple(others), strict=True)))
    chunk_counts = _count_chunks(on_device[best].tolist(), (counts - on_device)[best].tolist())
    return _Candidate(placement, chunk_counts, times)


def _count_chunks(on_device: list[int], on_host: list[int]) -> ChunkCounts:
    """Return the chunks of each choice and location that has any. The lists are in the order of SAVED_ACTIVATIONS."""
    locations: tuple[tuple[Location, list[int]], ...] = (("device", on_device), ("host", on_host))
    return {
        ActivationPlan(saved, location): counts[column]
        for column, saved in enumerate(SAVED_ACTIVATIONS)
        for location, counts in locations
        if counts[column]
    }


@cache
def _list_divisions(chunks: int) -> NDArray[np.int64]:
    """Return the ways to divide the chunks of all layers among the choices of saved activations, [ways, choices].

    Each way has one or two choices. The time that is recomputed is a function of the bytes that are saved; two choices
    reach every point of its convex hull.
    """
    step = -(-chunks // MAX_DIVISIONS)
    rows = {
        tuple(first if n == i else chunks - first if n == j else 0 for n in range(len(SAVED_ACTIVATIONS)))
        for i, j in combinations(range(len(SAVED_ACTIVATIONS)), 2)
        for first in (*range(0, chunks, step), chunks)
    }
    return np.array(sorted(rows))


def _build_prediction(candidate: _Candidate, model: ModelSizes, rates: DeviceRates) -> Prediction:
    placement, chunk_counts = candidate.placement, candidate.chunk_counts
    plan = Plan(
        _build_layer_plans(placement, chunk_counts, model.shape.layers),
        embedding_and_head_states=placement.embedding_and_head_states,
        sequence_length=placement.sequence_length,
        sequences_per_chunk=placement.sequences_per_chunk,
        chunks_per_round=placement.chunks_per_round,
        accumulation_rounds=placement.accumulation_rounds,
        segments_per_sequence=placement.segments_per_sequence,
        keys_values_on=placement.keys_values_on,
    )
    device_bytes = count_fixed_device_bytes(placement, model, rates)
    host_bytes = count_fixed_host_bytes(placement, model)
    for (saved, location), count in chunk_counts.items():
        saved_bytes = count * count_chunk_saved_bytes(placement, model, saved)
        if location == "host":
            host_bytes += saved_bytes
        else:
            device_bytes += saved_bytes
    on_host = [saved for saved, location in chunk_counts if location == "host"]
    device_bytes += max((count_transfer_bytes(placement, model, saved) for saved in on_host), default=0)
    return Prediction(plan, candidate.times, device_bytes * ALLOCATOR_SLACK, host_bytes)


def _build_layer_plans(placement: Placement, chunk_counts: ChunkCounts, layers: int) -> tuple[LayerPlan, ...]:
    choices, chunks = _spread_evenly(chunk_counts), placement.chunks_per_round
    plans = []
    for n in range(layers):
        weights: Location = "device" if _is_resident(n, placement.resident_layers, layers) else "host"
        states: Location = "device" if n < placement.resident_state_layers else "host"
        activations = tuple(choices[n * chunks : (n + 1) * chunks])
        plans.append(LayerPlan(weights, weights, states, activations))
    return tuple(plans)


def _is_resident(n: int, resident: int, layers: int) -> bool:
    """Return whether layer n is one of `resident` layers that are spread evenly over all.

    So the copies of a streamed layer overlap with the computation of the resident ones beside it.
    """
    return (n + 1) * resident // layers > n * resident // layers


def _spread_evenly(chunk_counts: ChunkCounts) -> list[ActivationPlan]:
    """Return what is saved of each chunk of each layer and where, each choice spread evenly over all of them."""
    positions = [((n + 0.5) / count, choice) for choice, count in chunk_counts.items() for n in range(count)]
    return [choice for _, choice in sorted(positions)]
