"""The search for the fastest plan within memory budgets, by the measured rates of the device. No torch.

Every plan that fits a budget fits every larger one, and the search takes the fastest of them. So a larger budget is
never predicted to be slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache
from itertools import product

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
    count_fixed_device_bytes,
    count_fixed_host_bytes,
    count_layer_saved_bytes,
    count_transfer_bytes,
    predict_embedding_and_head_times,
    predict_layer_times,
)
from workloads.offload.plan import SAVED_ACTIVATIONS, LayerPlan, Location, Plan, SavedActivations

MAX_CHUNK_TOKENS = 32768
LayerCounts = dict[tuple[SavedActivations, Location], int]  # layers by what they save and where


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
    layer_counts: LayerCounts
    times: StepTimes


def find_fastest_plan(
    model: ModelSizes, sequence_length: int, sequences_per_step: int, budget: MemoryBudget, rates: DeviceRates
) -> Prediction:
    """Return the plan within the budget that is predicted to be the fastest.

    Raises:
        Infeasible: no plan fits; the message has the GiB that are missing.
    """
    best: _Candidate | None = None
    smallest: Shortfall | None = None
    shapes = _list_chunk_shapes(sequence_length, sequences_per_step, rates.min_chunk_tokens, model.token_multiple)
    for placement in _enumerate_placements(model.shape.layers, sequence_length, sequences_per_step, shapes):
        memory = compute_activation_memory(placement, model, budget, rates)
        if isinstance(memory, Shortfall):
            smallest = min(smallest, memory) if smallest else memory
            continue
        candidate = _choose_saved_activations(placement, memory, model, rates)
        if candidate and (best is None or candidate.times.is_better_than(best.times)):
            best = candidate
    if best is None:
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
                        yield Placement(
                            sequence_length, sequences, segments, chunks, rounds, resident, resident_states, location
                        )


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


def _choose_saved_activations(
    placement: Placement, memory: ActivationMemory, model: ModelSizes, rates: DeviceRates
) -> _Candidate | None:
    """Return the placement with the fastest choice of saved activations, or None if none fits into `memory`.

    The activations of as many layers as fit are saved on the device, those of the others on the host. The ways to
    divide the layers among the choices are rows of a table [ways, choices], so that all of them are judged at once.
    """
    counts = _list_divisions(model.shape.layers)
    layer_bytes = np.array(
        [count_layer_saved_bytes(placement, model, saved) for saved in SAVED_ACTIVATIONS], dtype=float
    )
    transfer_bytes = np.array(
        [count_transfer_bytes(placement, model, saved) for saved in SAVED_ACTIVATIONS], dtype=float
    )
    all_on_device = counts @ layer_bytes <= memory.device_bytes
    # The choice that saves the most of those in a row needs the largest buffers for copies.
    free_bytes = memory.device_bytes - np.where(all_on_device, 0, transfer_bytes[np.argmax(counts > 0, axis=1)])
    on_device = np.zeros_like(counts)
    for column, size in enumerate(layer_bytes):
        on_device[:, column] = np.clip(free_bytes // size, 0, counts[:, column])
        free_bytes = free_bytes - on_device[:, column] * size
    on_host = counts - on_device
    fits = (free_bytes >= 0) & (on_host @ layer_bytes <= memory.host_bytes)
    if not fits.any():
        return None
    on_device, on_host = on_device[fits], on_host[fits]
    layer_times = {
        location: np.array(
            [astuple(predict_layer_times(placement, saved, location, model, rates)) for saved in SAVED_ACTIVATIONS]
        )
        for location in ("device", "host")
    }
    other_times = astuple(predict_embedding_and_head_times(placement, model, rates))
    times = on_device @ layer_times["device"] + on_host @ layer_times["host"] + other_times
    fastest = times[:, 0] <= times[:, 0].min() * (1 + 1e-9)
    best = np.flatnonzero(fastest)[np.argmin(times[fastest, 2])]
    layer_counts = _count_layers(on_device[best].tolist(), on_host[best].tolist())
    return _Candidate(placement, layer_counts, StepTimes(*times[best].tolist()))


def _count_layers(on_device: list[int], on_host: list[int]) -> LayerCounts:
    """Return the layers of each choice and location that has any. The lists are in the order of SAVED_ACTIVATIONS."""
    layer_counts = LayerCounts()
    for saved, device_layers, host_layers in zip(SAVED_ACTIVATIONS, on_device, on_host, strict=True):
        layer_counts |= {(saved, "device"): device_layers, (saved, "host"): host_layers}
    return {choice: count for choice, count in layer_counts.items() if count}


@cache
def _list_divisions(layers: int) -> NDArray[np.int64]:
    """Return the ways to divide layers among the choices of saved activations, [ways, choices].

    More than 16 layers are divided in multiples of a sixteenth of them, or all are given to one choice.
    """
    counts = sorted({*range(0, layers, math.ceil(layers / 16)), layers})
    ways = [way for way in product(counts, repeat=len(SAVED_ACTIVATIONS) - 1) if sum(way) <= layers]
    return np.array([(*way, layers - sum(way)) for way in ways])


def _build_prediction(candidate: _Candidate, model: ModelSizes, rates: DeviceRates) -> Prediction:
    placement, layer_counts = candidate.placement, candidate.layer_counts
    plan = Plan(
        _build_layer_plans(placement, layer_counts, model.shape.layers),
        embedding_and_head_states=placement.embedding_and_head_states,
        sequence_length=placement.sequence_length,
        sequences_per_chunk=placement.sequences_per_chunk,
        chunks_per_round=placement.chunks_per_round,
        accumulation_rounds=placement.accumulation_rounds,
        segments_per_sequence=placement.segments_per_sequence,
    )
    device_bytes = count_fixed_device_bytes(placement, model, rates)
    host_bytes = count_fixed_host_bytes(placement, model)
    for (saved, location), count in layer_counts.items():
        saved_bytes = count * count_layer_saved_bytes(placement, model, saved)
        if location == "host":
            host_bytes += saved_bytes
        else:
            device_bytes += saved_bytes
    on_host = [saved for saved, location in layer_counts if location == "host"]
    device_bytes += max((count_transfer_bytes(placement, model, saved) for saved in on_host), default=0)
    return Prediction(plan, candidate.times, device_bytes * ALLOCATOR_SLACK, host_bytes)


def _build_layer_plans(placement: Placement, layer_counts: LayerCounts, layers: int) -> tuple[LayerPlan, ...]:
    choices = _spread_evenly(layer_counts)
    plans = []
    for n in range(layers):
        weights: Location = "device" if _is_resident(n, placement.resident_layers, layers) else "host"
        states: Location = "device" if n < placement.resident_state_layers else "host"
        plans.append(LayerPlan(weights, weights, states, *choices[n]))
    return tuple(plans)


def _is_resident(n: int, resident: int, layers: int) -> bool:
    """Return whether layer n is one of `resident` layers that are spread evenly over all.

    So the copies of a streamed layer overlap with the computation of the resident ones beside it.
    """
    return (n + 1) * resident // layers > n * resident // layers


def _spread_evenly(layer_counts: LayerCounts) -> list[tuple[SavedActivations, Location]]:
    """Return what each layer saves and where, each choice spread evenly over the layers."""
    positions = [((n + 0.5) / count, choice) for choice, count in layer_counts.items() for n in range(count)]
    return [choice for _, choice in sorted(positions)]
