"""Search for the fastest plan within memory budgets, using the measured rates of the device. Does not import torch.

Every plan that fits a budget also fits every larger budget, and the search chooses the fastest plan. A larger budget is
therefore never predicted to be slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, product
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from workloads.api.contract import Infeasible
from workloads.layouts.enumeration import divisors
from workloads.offload.cost_model import (
    ALLOCATOR_SLACK,
    ActivationMemory,
    DeviceRates,
    MemoryBudget,
    ModelSizes,
    Placement,
    StepTimes,
    predict_step_times,
)
from workloads.offload.plan import (
    GIB,
    SAVED_ACTIVATIONS,
    ActivationPlan,
    Distribution,
    Division,
    LayerPlan,
    Location,
    Plan,
)

MAX_CHUNK_TOKENS = 32768
MAX_DIVISIONS = 64  # parts into which all layers' chunks are divided between two choices of saved activations
ChunkCounts = dict[ActivationPlan, int]  # number of chunks over all layers, by saved activations and location


@dataclass(frozen=True)
class Prediction:
    """A plan with its predicted times and memory, per GPU if several GPUs train together."""

    plan: Plan
    times: StepTimes[float]
    device_bytes: float
    host_bytes: float
    model: ModelSizes


class _Candidate(NamedTuple):
    placement: Placement
    chunk_counts: ChunkCounts
    times: StepTimes[float]


def find_fastest_plan(
    model: ModelSizes, sequence_length: int, sequences_per_step: int, budget: MemoryBudget, rates: DeviceRates
) -> Prediction:
    """Return the fastest plan within the budget. Raises Infeasible, with the missing GiB, if no plan fits."""
    if prediction := find_fastest_plans(model, sequence_length, sequences_per_step, [budget], rates)[0]:
        return prediction
    reason = explain_too_small(model, sequence_length, sequences_per_step, budget, rates)
    raise Infeasible(f"device_gib={budget.device_gib:g} and host_gib={budget.host_gib:g} are too small: {reason}")


def explain_too_small(
    model: ModelSizes, sequence_length: int, sequences_per_step: int, budget: MemoryBudget, rates: DeviceRates
) -> str:
    """Return a sentence that states by how many GiB the smallest plan exceeds a budget, or what cannot be divided."""
    own = _share_budget(model, budget)
    missing = [
        (gib, placement)
        for distributed in _list_distributions(model)
        for _, placement in _list_placements(distributed, sequence_length, sequences_per_step, rates)
        if (gib := placement.activation_memory(own, rates).missing_gib) > 0
    ]
    if not missing:
        divided = "layers" if model.distribution == "ring" else f"{sequences_per_step} sequences"
        return f"{divided} cannot be divided among {model.gpus} GPUs"
    gib, placement = min(missing, key=lambda pair: pair[0])
    device, host = placement.fixed_device_bytes(rates) / GIB, placement.fixed_host_bytes() / GIB
    needs = f"device {device:.3g}, host {host:.3g}, activations {placement.fewest_activation_bytes() / GIB:.3g}"
    each = f" on each of {model.gpus} GPUs" if model.gpus > 1 else ""
    return f"at least {gib:.3g} GiB more needed{each} ({needs} GiB)"


def _list_distributions(model: ModelSizes) -> list[ModelSizes]:
    if model.gpus == 1 or model.distribution:
        return [model]
    return [model.distribute(distribution, model.gpus) for distribution in get_args(Distribution)]


def _share_budget(model: ModelSizes, budget: MemoryBudget) -> MemoryBudget:
    return replace(budget, host_gib=budget.host_gib / model.gpus)


def find_fastest_plans(
    model: ModelSizes,
    sequence_length: int,
    sequences_per_step: int,
    budgets: Sequence[MemoryBudget],
    rates: DeviceRates,
) -> list[Prediction | None]:
    """Return each budget's fastest plan, or None if none fits; faster than one search per budget."""
    distributed = _list_distributions(model)
    if len(distributed) > 1:
        found = [find_fastest_plans(one, sequence_length, sequences_per_step, budgets, rates) for one in distributed]
        fitting = [[plan for plan in plans if plan] for plans in zip(*found, strict=True)]
        return [min(plans, key=lambda plan: plan.times.step_s) if plans else None for plans in fitting]
    budgets = [_share_budget(model, budget) for budget in budgets]
    best: list[_Candidate | None] = [None] * len(budgets)
    for bound_s, placement in _list_placements(model, sequence_length, sequences_per_step, rates):
        # Bounds are sorted, fastest first: once a bound is slower than a budget's best plan, so are all later bounds.
        open_numbers = [n for n, plan in enumerate(best) if plan is None or bound_s <= plan.times.step_s * (1 + 1e-9)]
        if not open_numbers:
            break
        memories = {n: placement.activation_memory(budgets[n], rates) for n in open_numbers}
        enough = {n: memory for n, memory in memories.items() if memory.missing_gib == 0}
        for n, candidate in _choose_saved_activations(placement, enough, rates).items():
            if current := best[n]:
                a, b = candidate.times, current.times
                is_as_fast = abs(a.step_s - b.step_s) <= 1e-9 * b.step_s  # then fewer copied bytes are better
                if (a.copied_bytes >= b.copied_bytes) if is_as_fast else (a.step_s >= b.step_s):
                    continue
            best[n] = candidate
    return [_build_prediction(candidate, rates) if candidate else None for candidate in best]


def _list_placements(
    model: ModelSizes, sequence_length: int, sequences_per_step: int, rates: DeviceRates
) -> list[tuple[float, Placement]]:
    """Return all placements, fastest first, each with a lower bound on the seconds per step. Placements combine each
    division of a GPU's sequences into rounds and chunks with every number of resident layers, in steps of a sixteenth
    of the layers. A chunk has a multiple of `token_multiple` tokens: at least `min_chunk_tokens` or the whole step's
    tokens, and at most MAX_CHUNK_TOKENS. If all chunk shapes are larger, the smallest ones are kept."""
    if model.distribution != "ring":
        if sequences_per_step % model.gpus:
            return []
        sequences_per_step //= model.gpus
    elif model.shape.layers == 0:  # a GPU would have no layers
        return []
    shapes = [(sequences, 1) for sequences in divisors(sequences_per_step)]
    shapes += [(1, segments) for segments in divisors(sequence_length)[1:]]
    tokens = {(sequences, segments): sequences * sequence_length // segments for sequences, segments in shapes}
    min_tokens = min(rates.min_chunk_tokens, sequence_length * sequences_per_step)
    shapes = [shape for shape in shapes if tokens[shape] >= min_tokens and tokens[shape] % model.token_multiple == 0]
    max_tokens = max(MAX_CHUNK_TOKENS, min(tokens[shape] for shape in shapes))
    layers = model.shape.layers
    resident_layers = sorted({*range(0, layers, max(1, layers // 16)), layers})
    resident_states = sorted({0, layers // 2, layers})
    locations: tuple[Location, ...] = ("device", "host")
    bounds = []
    for sequences, segments in (shape for shape in shapes if tokens[shape] <= max_tokens):
        groups_per_step = sequences_per_step // sequences
        keys_values_locations = locations if segments > 1 else locations[:1]
        for rounds, *resident, states_on, keys_values_on in product(
            divisors(groups_per_step), resident_layers, resident_states, locations, keys_values_locations
        ):
            placement = Placement(
                model,
                *resident,
                sequence_length=sequence_length,
                sequences_per_chunk=sequences,
                segments_per_sequence=segments,
                chunks_per_round=groups_per_step // rounds * segments,
                accumulation_rounds=rounds,
                embedding_and_head_states=states_on,
                keys_values_on=keys_values_on,
            )
            # The bound assumes that every activation is saved on the device.
            times = predict_step_times(placement, np.zeros(1), np.zeros(1), rates)
            bounds.append((float(times.step_s[0]), placement))
    return sorted(bounds, key=lambda pair: pair[0])


def _choose_saved_activations(
    placement: Placement, memories: Mapping[int, ActivationMemory], rates: DeviceRates
) -> dict[int, _Candidate]:
    """Return the placement with the fastest choice of saved activations for each memory size in which some choice fits.
    As many chunks as possible save their activations on the device, the others on the host. The ways to divide the
    chunks of all layers among the choices are rows of a table [ways, choices], so all ways are evaluated at once for
    all memory sizes."""
    if not memories:
        return {}
    counts = _list_divisions(placement.model.shape.layers * placement.chunks_per_round)
    chunk_bytes = [placement.saved_bytes(saved) for saved in SAVED_ACTIVATIONS]
    transfer_bytes = np.array([placement.transfer_bytes(saved) for saved in SAVED_ACTIVATIONS])
    total_bytes = counts @ np.array(chunk_bytes, dtype=float)
    device_bytes = np.array([[memory.device_bytes] for memory in memories.values()])
    max_host_bytes = np.array([[memory.host_bytes] for memory in memories.values()])
    # Arrays from here on are [memories, ways]. For each way, the choice that saves the most needs the largest buffers
    # for copies.
    free_bytes = device_bytes - np.where(total_bytes <= device_bytes, 0, transfer_bytes[np.argmax(counts > 0, axis=1)])
    host_bytes = np.zeros_like(free_bytes)
    on_device = np.zeros((*free_bytes.shape, counts.shape[1]), dtype=np.int64)
    for column, size in enumerate(chunk_bytes):
        on_device[..., column] = np.clip(free_bytes // size, 0, counts[:, column])
        free_bytes = free_bytes - on_device[..., column] * size
        host_bytes += (counts[:, column] - on_device[..., column]) * size
    recompute_s = np.array([rates.recompute_s_per_token[saved] for saved in SAVED_ACTIVATIONS])
    mean_recompute_s = counts @ recompute_s / counts.sum(axis=1)
    predicted = predict_step_times(placement, mean_recompute_s, host_bytes, rates)
    step_s = np.where((free_bytes >= 0) & (host_bytes <= max_host_bytes), predicted.step_s, np.inf)
    candidates = {}
    for row, n in enumerate(memories):
        if not np.isfinite(fastest_s := step_s[row].min()):
            continue
        ways = np.flatnonzero(step_s[row] <= fastest_s * (1 + 1e-9))
        way = ways[np.argmin(predicted.copied_bytes[row, ways])]
        times = StepTimes(*(float(part[row, way]) for part in predicted))
        chunk_counts: ChunkCounts = {}
        for column, saved in enumerate(SAVED_ACTIVATIONS):
            kept, count = int(on_device[row, way, column]), int(counts[way, column])
            chunk_counts |= {ActivationPlan(saved, "device"): kept, ActivationPlan(saved, "host"): count - kept}
        candidates[n] = _Candidate(placement, {choice: count for choice, count in chunk_counts.items() if count}, times)
    return candidates


@cache
def _list_divisions(chunks: int) -> NDArray[np.int64]:
    """Return the ways to divide the chunks of all layers among the choices of saved activations, [ways, choices]. Each
    way uses one or two choices: the recomputation time is a function of the saved bytes, and a mix of two choices
    reaches every point of its convex hull."""
    step = -(-chunks // MAX_DIVISIONS)
    rows = {
        tuple(first if n == i else chunks - first if n == j else 0 for n in range(len(SAVED_ACTIVATIONS)))
        for i, j in combinations(range(len(SAVED_ACTIVATIONS)), 2)
        for first in (*range(0, chunks, step), chunks)
    }
    return np.array(sorted(rows))


def _build_prediction(candidate: _Candidate, rates: DeviceRates) -> Prediction:
    placement, chunk_counts, times = candidate
    layers, chunks, resident = placement.model.shape.layers, placement.chunks_per_round, placement.resident_layers
    # The choice for each chunk at each layer. Every choice is spread evenly over chunks and layers.
    positions = [((n + 0.5) / count, choice) for choice, count in chunk_counts.items() for n in range(count)]
    choices = [choice for _, choice in sorted(positions)]
    layer_plans = []
    for n in range(layers):
        # Resident layers are spread evenly over all layers, so that the copies of a streamed layer overlap with the
        # computation of the resident layers next to it.
        is_resident = (n + 1) * resident // layers > n * resident // layers
        weights: Location = "device" if is_resident else "host"
        states: Location = "device" if n < placement.resident_state_layers else "host"
        layer_plans.append(LayerPlan(weights, weights, states, tuple(choices[n * chunks : (n + 1) * chunks])))
    division = {item.name: getattr(placement, item.name) for item in fields(Division)}
    used_bytes = {"device": placement.fixed_device_bytes(rates), "host": placement.fixed_host_bytes()}
    for (saved, location), count in chunk_counts.items():
        used_bytes[location] += count * placement.saved_bytes(saved)
    on_host = [saved for saved, location in chunk_counts if location == "host"]
    used_bytes["device"] += max(map(placement.transfer_bytes, on_host), default=0)
    device_bytes = used_bytes["device"] * ALLOCATOR_SLACK
    return Prediction(Plan(tuple(layer_plans), **division), times, device_bytes, used_bytes["host"], placement.model)
