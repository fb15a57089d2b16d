"""The search for the fastest plan within memory budgets, by the measured rates of the device. No torch.

Every plan that fits a budget fits every larger one, and the search takes the fastest of them. So a larger budget is
never predicted to be slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    placements = _list_placements(model, sequence_length, sequences_per_step, rates)
    if prediction := _search(placements, model, [budget], rates)[0]:
        return prediction
    memories = (compute_activation_memory(placement, model, budget, rates) for _, placement in placements)
    smallest = min((memory for memory in memories if isinstance(memory, Shortfall)), default=None)
    reason = f"at least {smallest.gib:.3g} GiB more needed ({smallest.needs})" if smallest else "no plan fits"
    raise Infeasible(f"device_gib={budget.device_gib:g} and host_gib={budget.host_gib:g} are too small: {reason}")


def find_fastest_plans(
    model: ModelSizes,
    sequence_length: int,
    sequences_per_step: int,
    budgets: Sequence[MemoryBudget],
    rates: DeviceRates,
) -> list[Prediction | None]:
    """Return the same as `find_fastest_plan` for each of many budgets, or None where no plan fits, in less time."""
    placements = _list_placements(model, sequence_length, sequences_per_step, rates)
    return _search(placements, model, budgets, rates)


def _search(
    placements: list[tuple[float, Placement]], model: ModelSizes, budgets: Sequence[MemoryBudget], rates: DeviceRates
) -> list[Prediction | None]:
    """Return the fastest plan for each budget. `placements` are those of `_list_placements`."""
    best: list[_Candidate | None] = [None] * len(budgets)
    for bound_s, placement in placements:
        # The fastest bound comes first: once it is slower than a budget's best plan, so are all that follow.
        open_numbers = [n for n, plan in enumerate(best) if plan is None or bound_s <= plan.times.step_s * (1 + 1e-9)]
        if not open_numbers:
            break
        memories = {n: compute_activation_memory(placement, model, budgets[n], rates) for n in open_numbers}
        enough = {n: memory for n, memory in memories.items() if isinstance(memory, ActivationMemory)}
        for n, candidate in _choose_saved_activations(placement, enough, model, rates).items():
            current = best[n]
            if current is None or candidate.times.is_better_than(current.times):
                best[n] = candidate
    return [_build_prediction(candidate, model, rates) if candidate else None for candidate in best]


def _list_placements(
    model: ModelSizes, sequence_length: int, sequences_per_step: int, rates: DeviceRates
) -> list[tuple[float, Placement]]:
    """Return all placements with the seconds that a step takes at least, the fastest first."""
    shapes = _list_chunk_shapes(sequence_length, sequences_per_step, rates.min_chunk_tokens, model.token_multiple)
    placements = _enumerate_placements(model.shape.layers, sequence_length, sequences_per_step, shapes)
    bounds = [(_predict_lower_bound_s(placement, model, rates), placement) for placement in placements]
    return sorted(bounds, key=lambda pair: pair[0])


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
    placement: Placement, memories: Mapping[int, ActivationMemory], model: ModelSizes, rates: DeviceRates
) -> dict[int, _Candidate]:
    """Return the placement with the fastest choice of saved activations for each memory that any choice fits into.

    The activations of as many chunks as fit are saved on the device, those of the others on the host. The ways to
    divide the chunks of all layers among the choices are rows of a table [ways, choices], so that all of them are
    judged at once, for all memories.
    """
    if not memories:
        return {}
    device_bytes = np.array([[memory.device_bytes] for memory in memories.values()])
    max_host_bytes = np.array([[memory.host_bytes] for memory in memories.values()])
    counts = _list_divisions(model.shape.layers * placement.chunks_per_round)
    on_device, host_bytes, fits = _fill_device(placement, counts, device_bytes, model)
    recompute_s = np.array([rates.recompute_s_per_token[saved] for saved in SAVED_ACTIVATIONS])
    mean_recompute_s = counts @ recompute_s / counts.sum(axis=1)
    blocks = predict_block_times(placement, mean_recompute_s, host_bytes, model, rates)
    step_s = np.where(fits & (host_bytes <= max_host_bytes), blocks.step_s, np.inf)
    others = astuple(predict_embedding_and_head_times(placement, model, rates))
    candidates = {}
    for row, n in enumerate(memories):
        if not np.isfinite(fastest_s := step_s[row].min()):
            continue
        ways = np.flatnonzero(step_s[row] <= fastest_s * (1 + 1e-9))
        way = ways[np.argmin(blocks.copied_bytes[row, ways])]
        times = StepTimes(*(float(part[row, way]) + other for part, other in zip(blocks, others, strict=True)))
        chunks_on_device = on_device[row, way]
        chunk_counts = _count_chunks(chunks_on_device.tolist(), (counts[way] - chunks_on_device).tolist())
        candidates[n] = _Candidate(placement, chunk_counts, times)
    return candidates


def _fill_device(
    placement: Placement, counts: NDArray[np.int64], device_bytes: NDArray[np.float64], model: ModelSizes
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return the chunks that are saved on the device, the bytes that are left for the host, and whether it all fits.

    Args:
        counts: the chunks by choice, [ways, choices].
        device_bytes: of several memories, [memories, 1]; the results have the shape [memories, ways] in front.
    """
    chunk_bytes = [count_chunk_saved_bytes(placement, model, saved) for saved in SAVED_ACTIVATIONS]
    transfer_bytes = np.array([count_transfer_bytes(placement, model, saved) for saved in SAVED_ACTIVATIONS])
    total_bytes = counts @ np.array(chunk_bytes, dtype=float)
    # The choice that saves the most of those in a row needs the largest buffers for copies.
    free_bytes = device_bytes - np.where(total_bytes <= device_bytes, 0, transfer_bytes[np.argmax(counts > 0, axis=1)])
    host_bytes = np.zeros_like(free_bytes)
    on_device = np.zeros((*free_bytes.shape, counts.shape[1]), dtype=np.int64)
    for column, size in enumerate(chunk_bytes):
        on_device[..., column] = np.clip(free_bytes // size, 0, counts[:, column])
        free_bytes = free_bytes - on_device[..., column] * size
        host_bytes += (counts[:, column] - on_device[..., column]) * size
    return on_device, host_bytes, free_bytes >= 0


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
