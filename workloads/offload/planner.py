"""Choosing where everything lives: the fastest plan that fits, by this machine's measured rates. No torch.

Every plan that fits a budget fits every larger one, and the fastest of them is taken, so more memory is never predicted
to be slower.
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
    SLACK,
    Budget,
    Homes,
    Model,
    Rates,
    Room,
    Times,
    ends_times,
    fixed_device_bytes,
    fixed_host_bytes,
    layer_kept_bytes,
    layer_times,
    moving_bytes,
    room_within,
)
from workloads.offload.plan import KINDS, Keeps, LayerPlan, Place, Plan

MOST_CHUNK_TOKENS = 32768


@dataclass(frozen=True)
class Prediction:
    """A plan with what it is expected to take."""

    plan: Plan
    times: Times
    device_bytes: float
    host_bytes: float


Kept = dict[tuple[Keeps, Place], int]  # how many layers keep what, and where


def choose(model: Model, sequence_length: int, sequences_per_step: int, budget: Budget, rates: Rates) -> Prediction:
    """The fastest plan within the budget. Raises Infeasible, by how much it lacks."""
    best: tuple[Times, Homes, Kept] | None = None
    lacking: tuple[float, str] | None = None
    for homes in _homes(model.shape.layers, sequence_length, sequences_per_step, rates.chunk_tokens):
        room = room_within(homes, model, budget, rates)
        if isinstance(room, tuple):
            lacking = min(lacking, room) if lacking else room
            continue
        found = _best_kept(homes, room, model, rates)
        if found and (best is None or found[0].is_better_than(best[0])):
            best = found[0], homes, found[1]
    if best is None:
        why = lacking[1] if lacking else "no plan has such a shape"
        raise Infeasible(f"device_gib={budget.device_gib:g} and host_gib={budget.host_gib:g}: {why}")
    return _prediction(*best, model, rates)


def _homes(layers: int, sequence_length: int, sequences_per_step: int, chunk_tokens: int) -> Iterator[Homes]:
    """Every division of a step into rounds and chunks, with so many layers' weights and states on the device."""
    coarse = max(1, layers // 16)
    for sequences, pieces in _chunks(sequence_length, sequences_per_step, chunk_tokens):
        for rounds in _divisors(sequences_per_step // sequences):
            chunks = sequences_per_step // sequences // rounds * pieces
            for resident in sorted({*range(0, layers, coarse), layers}):
                for states in sorted({0, layers // 2, layers}):
                    for ends in ("device", "host"):
                        yield Homes(sequence_length, sequences, pieces, chunks, rounds, resident, states, ends)


def _chunks(sequence_length: int, sequences_per_step: int, at_least: int) -> list[tuple[int, int]]:
    """Sequences in a chunk and pieces of a sequence, so that a chunk has tokens enough to be worth it, and not more
    than a chunk's memory allows; the smallest of those with enough, if that is too many."""
    whole = [(sequences, 1) for sequences in _divisors(sequences_per_step)]
    found = whole + [(1, pieces) for pieces in _divisors(sequence_length)[1:]]
    at_least = min(at_least, sequence_length * sequences_per_step)
    found = [(s, p) for s, p in found if s * sequence_length // p >= at_least]
    tokens = min(s * sequence_length // p for s, p in found)
    return [(s, p) for s, p in found if s * sequence_length // p <= max(MOST_CHUNK_TOKENS, tokens)]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _best_kept(homes: Homes, room: Room, model: Model, rates: Rates) -> tuple[Times, Kept] | None:
    """What layers best keep in this room, on the device first and the rest on the host; None if nothing fits.

    All ways to divide the layers among the kinds are rows of a table, so that one look at each is cheap.
    """
    counts = _divisions(model.shape.layers)
    sizes = np.array([layer_kept_bytes(homes, model, keeps) for keeps in KINDS], dtype=float)
    moving = np.array([moving_bytes(homes, model, keeps) for keeps in KINDS], dtype=float)
    all_fit = counts @ sizes <= room.device
    left = room.device - np.where(all_fit, 0, moving[np.argmax(counts > 0, axis=1)])
    here = np.zeros_like(counts)
    for kind, size in enumerate(sizes):
        here[:, kind] = np.clip(left // size, 0, counts[:, kind])
        left = left - here[:, kind] * size
    there = counts - here
    fits = (left >= 0) & (there @ sizes <= room.host)
    if not fits.any():
        return None
    here, there = here[fits], there[fits]
    of_layers = {
        place: np.array([astuple(layer_times(homes, keeps, place, model, rates)) for keeps in KINDS])
        for place in ("device", "host")
    }
    times = here @ of_layers["device"] + there @ of_layers["host"] + astuple(ends_times(homes, model, rates))
    fast = times[:, 0] <= times[:, 0].min() * (1 + 1e-9)
    best = np.flatnonzero(fast)[np.argmin(times[fast, 2])]
    kept = Kept()
    for keeps, on_device, on_host in zip(KINDS, here[best].tolist(), there[best].tolist(), strict=True):
        kept |= {(keeps, "device"): on_device, (keeps, "host"): on_host}
    return Times(*times[best].tolist()), {kind: count for kind, count in kept.items() if count}


@cache
def _divisions(layers: int) -> NDArray[np.int64]:
    """All ways to divide layers among the kinds [ways, kinds]; of many layers, in twos and more, or all of one."""
    counts = sorted({*range(0, layers, math.ceil(layers / 16)), layers})
    ways = [c for c in product(counts, repeat=len(KINDS) - 1) if sum(c) <= layers]
    return np.array([(*c, layers - sum(c)) for c in ways])


def _prediction(times: Times, homes: Homes, kept: Kept, model: Model, rates: Rates) -> Prediction:
    layers = model.shape.layers
    kinds = _spread(kept)
    plan = Plan(
        tuple(
            LayerPlan(
                *(("device", "device") if _evenly(n, homes.resident, layers) else ("host", "host")),
                "device" if n < homes.states_resident else "host",
                *kinds[n],
            )
            for n in range(layers)
        ),
        homes.ends_states,
        homes.sequence_length,
        homes.sequences,
        homes.chunks,
        homes.rounds,
        homes.pieces,
    )
    device, host = fixed_device_bytes(homes, model, rates), fixed_host_bytes(homes, model)
    for (keeps, place), count in kept.items():
        host += count * layer_kept_bytes(homes, model, keeps) if place == "host" else 0
        device += count * layer_kept_bytes(homes, model, keeps) if place == "device" else 0
    device += max((moving_bytes(homes, model, keeps) for keeps, place in kept if place == "host"), default=0)
    return Prediction(plan, times, device * SLACK, host)


def _evenly(n: int, chosen: int, of: int) -> bool:
    """Whether n is among `chosen` of `of`, spread evenly: one that streams has the ones that stay to hide behind."""
    return (n + 1) * chosen // of > n * chosen // of


def _spread(kept: Kept) -> list[tuple[Keeps, Place]]:
    """What each layer keeps, each kind spread evenly over the layers."""
    places = [((n + 0.5) / count, kind) for kind, count in kept.items() for n in range(count)]
    return [kind for _, kind in sorted(places)]
