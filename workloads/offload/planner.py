"""Choosing where everything lives: the fastest plan that fits, by this machine's measured rates. No torch.

Every plan that fits a budget fits every larger one, and the fastest of them is taken, so more memory is never predicted
to be slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

from workloads.contract import Infeasible
from workloads.llama.shapes import LlamaShape
from workloads.offload.layout import Keeps, LayerPlan, Place, Plan, kept_bytes, keys_values_bytes

GIB = 2**30
WEIGHT_SLOTS = 2  # for layers that stream: the one that computes, and the next on its way
GRADIENT_SLOTS = 3  # and one on its way home
AHEAD = 2  # so many chunks' activations are on their way back before they are needed
LOGIT_TOKENS = 2048  # what the loss takes at a time
MOST_CHUNK_TOKENS = 32768
UPDATE_PIECE = 1 << 24  # what the optimizer takes at a time on a CPU
SLACK = 1.02  # of what an allocator holds, over what is asked of it
KINDS: tuple[Keeps, ...] = ("full", "projections", "attention", "input")  # from the most that is kept


@dataclass(frozen=True)
class Rates:
    """What one machine was measured to do for one model and sequence length. Seconds for a token and a block, forward,
    and backward with all kept; `again_s` more where less is kept; for a token and the head with its loss; for a byte
    up, down, and of weights updated.

    workspace_bytes: what the backward pass of a block needs for a token while it runs
    chunk_tokens: the fewest in a chunk that this holds for
    """

    forward_s: float
    backward_s: float
    again_s: Mapping[Keeps, float]
    head_s: float
    up_s_per_byte: float
    down_s_per_byte: float
    update_s_per_byte: float
    workspace_bytes: float
    chunk_tokens: int


@dataclass(frozen=True)
class Budget:
    device_gib: float
    host_gib: float


@dataclass(frozen=True)
class Prediction:
    """A plan with what it is expected to take: seconds a step, and bytes of each memory."""

    plan: Plan
    step_s: float
    device_bytes: float
    host_bytes: float
    waiting_s: float  # of the step, for copies that the matrix units cannot hide
    copied_bytes: float


@dataclass(frozen=True)
class Model:
    """What is to be trained: a shape, bytes of a number, and bytes of the optimizer's states for a parameter."""

    shape: LlamaShape
    width: int
    state_bytes: int

    @cached_property
    def layer_parameters(self) -> int:
        return replace(self.shape, layers=1).parameters - self.ends_parameters

    @cached_property
    def ends_parameters(self) -> int:
        """Of embedding, last norm and head."""
        return replace(self.shape, layers=0).parameters

    @property
    def layer_bytes(self) -> int:
        return self.layer_parameters * self.width

    @property
    def layer_state_bytes(self) -> int:
        return self.layer_parameters * self.state_bytes


@dataclass(frozen=True)
class Homes:
    """How a step is divided, how many layers' weights and gradients stay on the device, how many layers' states do, and
    where those of the ends are. What is kept of activations is decided after."""

    sequence_length: int
    sequences: int
    pieces: int
    chunks: int
    rounds: int
    resident: int
    states_resident: int
    ends_states: Place

    @property
    def chunk_tokens(self) -> int:
        return self.sequences * self.sequence_length // self.pieces

    @property
    def round_tokens(self) -> int:
        return self.chunk_tokens * self.chunks

    @property
    def tokens_per_step(self) -> int:
        return self.round_tokens * self.rounds


Kept = dict[tuple[Keeps, Place], int]  # how many layers keep what, and where
Times = tuple[float, float, float]  # seconds of a step, seconds of it waiting, bytes copied


def choose(model: Model, sequence_length: int, sequences_per_step: int, budget: Budget, rates: Rates) -> Prediction:
    """The fastest plan within the budget. Raises Infeasible, by how much it lacks."""
    best: tuple[Times, Homes, Kept] | None = None
    lacking: tuple[float, str] | None = None
    for homes in _homes(model.shape.layers, sequence_length, sequences_per_step, rates.chunk_tokens):
        room = _room(homes, model, budget, rates)
        if isinstance(room, tuple):
            lacking = min(lacking, room) if lacking else room
            continue
        best = _best_kept(homes, room, model, rates, best)
    if best is None:
        why = lacking[1] if lacking else "no plan has such a shape"
        raise Infeasible(f"device_gib={budget.device_gib:g} and host_gib={budget.host_gib:g}: {why}")
    return _prediction(*best, model, rates)


def _best_kept(
    homes: Homes, room: Room, model: Model, rates: Rates, best: tuple[Times, Homes, Kept] | None
) -> tuple[Times, Homes, Kept] | None:
    """The best of `best` and what can be kept in this room.

    A choice is passed over when its matrix work alone takes longer than the best, and so are all that keep less.
    """
    sizes = {keeps: _layer_kept_bytes(homes, model, keeps) for keeps in KINDS}
    works_s, again_s = _work_s(homes, model, rates), [homes.tokens_per_step * rates.again_s[keeps] for keeps in KINDS]

    def hopeless(*counts: int) -> bool:
        return best is not None and works_s + sum(map(mul, counts, again_s)) > best[0][0] * (1 + 1e-9)

    layers = model.shape.layers
    for full in range(layers, -1, -1):
        if hopeless(full, layers - full, 0, 0):
            break
        for projections in range(layers - full, -1, -1):
            left = layers - full - projections
            if hopeless(full, projections, left, 0):
                break
            for attention in range(left, -1, -1):
                counts = full, projections, attention, left - attention
                if hopeless(*counts):
                    break
                if (kept := _filled(dict(zip(KINDS, counts, strict=True)), sizes, homes, model, room)) is None:
                    continue
                times = _times(homes, kept, model, rates)
                if best is None or _is_better(times, best[0]):
                    best = times, homes, kept
    return best


def _is_better(one: Times, other: Times) -> bool:
    """Faster; of two that are as fast, the one that copies less."""
    if abs(one[0] - other[0]) > 1e-9 * other[0]:
        return one[0] < other[0]
    return one[2] < other[2]


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


# ── memory ──


@dataclass(frozen=True)
class Room:
    """Bytes that are left for activations."""

    device: float
    host: float


def _room(homes: Homes, model: Model, budget: Budget, rates: Rates) -> Room | tuple[float, str]:
    """What is left for activations, or by how many GiB it does not fit at all."""
    device, host = fixed_device_bytes(homes, model, rates), fixed_host_bytes(homes, model)
    room = Room(budget.device_gib * GIB / SLACK - device, budget.host_gib * GIB - host)
    least = model.shape.layers * _layer_kept_bytes(homes, model, "input")
    on_device = max(0.0, room.device)
    lacks = max(0.0, -room.device) + max(0.0, least - on_device - max(0.0, room.host)) + max(0.0, -room.host)
    if lacks == 0:
        return room
    parts = f"device {device / GIB:.3g}, host {host / GIB:.3g}, activations {least / GIB:.3g} GiB"
    return lacks / GIB, f"{lacks / GIB:.3g} GiB too little at best ({parts})"


def _layer_kept_bytes(homes: Homes, model: Model, keeps: Keeps) -> int:
    """Of the activations that a layer keeps of a round."""
    sequence = keys_values_bytes(model.shape, model.width) if homes.pieces > 1 else 0
    return homes.round_tokens * (kept_bytes(model.shape, keeps, model.width) + sequence)


def _moving_bytes(homes: Homes, model: Model, keeps: Keeps) -> int:
    """On the device, of activations that wait on the host: those on their way, and those in use or leaving."""
    chunk = homes.chunk_tokens * kept_bytes(model.shape, keeps, model.width)
    sequence = keys_values_bytes(model.shape, model.width) * homes.sequences * homes.sequence_length
    return (AHEAD + 1) * chunk + (2 * sequence if homes.pieces > 1 else 0)


def _filled(counts: dict[Keeps, int], sizes: dict[Keeps, int], homes: Homes, model: Model, room: Room) -> Kept | None:
    """Where so many layers of each kind keep it, on the device first, the rest on the host; None if it does not fit."""
    if sum(counts[keeps] * sizes[keeps] for keeps in KINDS) <= room.device:
        return {(keeps, "device"): count for keeps, count in counts.items() if count}
    largest = next(keeps for keeps in KINDS if counts[keeps])
    left, host, kept = room.device - _moving_bytes(homes, model, largest), room.host, Kept()
    for keeps, count in counts.items():
        here = max(0, min(count, int(left // sizes[keeps])))
        kept[keeps, "device"], kept[keeps, "host"] = here, count - here
        left -= here * sizes[keeps]
        host -= (count - here) * sizes[keeps]
    return {kind: count for kind, count in kept.items() if count} if left >= 0 and host >= 0 else None


def fixed_device_bytes(homes: Homes, model: Model, rates: Rates) -> float:
    """What a plan needs on the device beside the activations that it keeps."""
    shape, width, layer = model.shape, model.width, model.layer_bytes
    streamed, moving = shape.layers - homes.resident, shape.layers - homes.states_resident
    vocabulary = shape.vocabulary * shape.width
    total = 2.0 * model.ends_parameters * width
    states_of_ends = model.ends_parameters if homes.ends_states == "device" else vocabulary
    total += states_of_ends * model.state_bytes
    total += 2 * layer * homes.resident + model.layer_state_bytes * homes.states_resident
    total += layer * (min(WEIGHT_SLOTS, streamed) + min(GRADIENT_SLOTS, streamed)) + model.layer_state_bytes * min(
        2, moving
    )
    total += (homes.round_tokens + 2 * homes.chunk_tokens) * shape.width * width  # between two blocks
    if homes.pieces > 1:  # keys and values of a sequence, and their gradients in fp32
        sequence = keys_values_bytes(shape, width) * homes.sequences * homes.sequence_length
        total += sequence * (1 + 4 / width)
    loss = 3 * min(LOGIT_TOKENS, homes.chunk_tokens) * shape.vocabulary * max(width, 2)
    return total + max(loss, homes.chunk_tokens * rates.workspace_bytes)


def fixed_host_bytes(homes: Homes, model: Model) -> float:
    """What a plan keeps on the host beside activations."""
    streamed, moving = model.shape.layers - homes.resident, model.shape.layers - homes.states_resident
    total = float(model.ends_parameters * model.state_bytes) if homes.ends_states == "host" else 0.0
    total += model.layer_state_bytes * moving
    return total + streamed * model.layer_bytes * (2 if homes.rounds > 1 else 1)


# ── time ──


def _times(homes: Homes, kept: Kept, model: Model, rates: Rates) -> Times:
    """Seconds of a step, how many of them the matrix units wait for copies, and the bytes copied.

    Copies and computation overlap; in each layer the longer of them is what it takes. Weights, gradients and states of
    the layers that stream are on their way during those that stay, so each layer bears its share of them.
    """
    layers, layer = model.shape.layers, model.layer_bytes
    weights = (1 - homes.resident / layers) * layer
    states = (1 - homes.states_resident / layers) * model.layer_state_bytes
    update_s = layer * rates.update_s_per_byte
    passes = [_Pass(homes.rounds, up=weights)]
    if homes.rounds > 1:
        passes += [_Pass(1, up=weights, down=weights, backward=True)]
        passes += [_Pass(homes.rounds - 2, up=2 * weights, down=weights, backward=True)]
    last_up = (2 if homes.rounds > 1 else 1) * weights + states
    passes += [_Pass(1, up=last_up, down=weights + states, backward=True, update_s=update_s)]
    work_s = total_s = copied = 0.0
    for (keeps, place), count in kept.items():
        activations = _layer_kept_bytes(homes, model, keeps) if place == "host" else 0
        forward_s = homes.round_tokens * rates.forward_s
        backward_s = homes.round_tokens * (rates.backward_s + rates.again_s[keeps])
        for p in passes:
            up, down = (p.up + activations, p.down) if p.backward else (p.up, p.down + activations)
            own_s = (backward_s if p.backward else forward_s) + p.update_s
            work_s += count * p.times * own_s
            total_s += count * p.times * max(own_s, up * rates.up_s_per_byte, down * rates.down_s_per_byte)
            copied += count * p.times * (up + down)
    waiting_s = total_s - work_s
    if homes.ends_states == "host":  # fetched, updated and sent back, with nothing else to do
        moved = model.ends_parameters * model.state_bytes
        waiting_s += moved * (rates.up_s_per_byte + rates.down_s_per_byte)
        copied += 2 * moved
    again_s = sum(count * rates.again_s[keeps] for (keeps, _), count in kept.items()) * homes.tokens_per_step
    return _work_s(homes, model, rates) + again_s + waiting_s, waiting_s, copied


def _work_s(homes: Homes, model: Model, rates: Rates) -> float:
    """Seconds of computation in a step that keeps everything."""
    token_s = model.shape.layers * (rates.forward_s + rates.backward_s) + rates.head_s
    parameters = model.shape.layers * model.layer_parameters + model.ends_parameters
    return homes.tokens_per_step * token_s + parameters * model.width * rates.update_s_per_byte


@dataclass(frozen=True)
class _Pass:
    """So many times over all layers, with so many bytes of each layer copied up and down beside its activations."""

    times: int
    up: float
    down: float = 0.0
    backward: bool = False
    update_s: float = 0.0


# ── the plan ──


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
    step_s, waiting_s, copied = times
    device, host = fixed_device_bytes(homes, model, rates), fixed_host_bytes(homes, model)
    for (keeps, place), count in kept.items():
        host += count * _layer_kept_bytes(homes, model, keeps) if place == "host" else 0
        device += count * _layer_kept_bytes(homes, model, keeps) if place == "device" else 0
    device += max((_moving_bytes(homes, model, keeps) for keeps, place in kept if place == "host"), default=0)
    return Prediction(plan, step_s, device * SLACK, host, waiting_s, copied)


def _evenly(n: int, chosen: int, of: int) -> bool:
    """Whether n is among `chosen` of `of`, spread evenly: one that streams has the ones that stay to hide behind."""
    return (n + 1) * chosen // of > n * chosen // of


def _spread(kept: Kept) -> list[tuple[Keeps, Place]]:
    """What each layer keeps, each kind spread evenly over the layers."""
    places = [((n + 0.5) / count, kind) for kind, count in kept.items() for n in range(count)]
    return [kind for _, kind in sorted(places)]
