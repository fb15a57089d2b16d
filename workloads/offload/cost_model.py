"""What a plan needs of memory and time, by this machine's measured rates. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from workloads.llama.shapes import LlamaShape
from workloads.offload.plan import (
    AHEAD,
    GIB,
    GRADIENT_SLOTS,
    LOGIT_TOKENS,
    WEIGHT_SLOTS,
    Keeps,
    Place,
    kept_bytes,
    keys_values_bytes,
)

SLACK = 1.03  # of what an allocator holds, over what is asked of it


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
class Model:
    """What is to be trained: a shape, bytes of a number, and bytes of the optimizer's states for a parameter."""

    shape: LlamaShape
    element_bytes: int
    state_bytes: int

    @cached_property
    def ends_parameters(self) -> int:
        return self.shape.embedding_and_head_parameters

    @cached_property
    def layer_bytes(self) -> int:
        return self.shape.layer_parameters * self.element_bytes

    @cached_property
    def layer_state_bytes(self) -> int:
        return self.shape.layer_parameters * self.state_bytes


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


# ── memory ──


@dataclass(frozen=True)
class Room:
    """Bytes that are left for activations."""

    device: float
    host: float


def room_within(homes: Homes, model: Model, budget: Budget, rates: Rates) -> Room | tuple[float, str]:
    """What is left for activations, or by how many GiB it does not fit at all."""
    device, host = fixed_device_bytes(homes, model, rates), fixed_host_bytes(homes, model)
    room = Room(budget.device_gib * GIB / SLACK - device, budget.host_gib * GIB - host)
    least = model.shape.layers * layer_kept_bytes(homes, model, "input")
    on_device = max(0.0, room.device)
    lacks = max(0.0, -room.device) + max(0.0, least - on_device - max(0.0, room.host)) + max(0.0, -room.host)
    if lacks == 0:
        return room
    parts = f"device {device / GIB:.3g}, host {host / GIB:.3g}, activations {least / GIB:.3g} GiB"
    return lacks / GIB, f"{lacks / GIB:.3g} GiB too little at best ({parts})"


def layer_kept_bytes(homes: Homes, model: Model, keeps: Keeps) -> int:
    """Of the activations that a layer keeps of a round."""
    sequence = keys_values_bytes(model.shape, model.element_bytes) if homes.pieces > 1 else 0
    return homes.round_tokens * (kept_bytes(model.shape, keeps, model.element_bytes, homes.pieces) + sequence)


def moving_bytes(homes: Homes, model: Model, keeps: Keeps) -> int:
    """On the device, of activations that wait on the host: those on their way, and those in use or leaving."""
    chunk = homes.chunk_tokens * kept_bytes(model.shape, keeps, model.element_bytes, homes.pieces)
    sequence = keys_values_bytes(model.shape, model.element_bytes) * homes.sequences * homes.sequence_length
    return (AHEAD + 1) * chunk + (2 * sequence if homes.pieces > 1 else 0)


def fixed_device_bytes(homes: Homes, model: Model, rates: Rates) -> float:
    """What a plan needs on the device beside the activations that it keeps."""
    shape, element_bytes, layer = model.shape, model.element_bytes, model.layer_bytes
    streamed, moving = shape.layers - homes.resident, shape.layers - homes.states_resident
    vocabulary = shape.vocabulary * shape.hidden_size
    total = 2.0 * model.ends_parameters * element_bytes
    states_of_ends = model.ends_parameters if homes.ends_states == "device" else vocabulary
    total += states_of_ends * model.state_bytes
    total += 2 * layer * homes.resident + model.layer_state_bytes * homes.states_resident
    total += layer * (min(WEIGHT_SLOTS, streamed) + min(GRADIENT_SLOTS, streamed))
    total += model.layer_state_bytes * min(2, moving)
    total += (
        (homes.round_tokens + 4 * homes.chunk_tokens) * shape.hidden_size * element_bytes
    )  # between two blocks, and in the ends
    if homes.pieces > 1:  # keys and values of a sequence, and their gradients in fp32
        sequence = keys_values_bytes(shape, element_bytes) * homes.sequences * homes.sequence_length
        total += sequence * (1 + 4 / element_bytes)
    loss = 3 * min(LOGIT_TOKENS, homes.chunk_tokens) * shape.vocabulary * max(element_bytes, 2)
    return total + max(loss, homes.chunk_tokens * rates.workspace_bytes)


def fixed_host_bytes(homes: Homes, model: Model) -> float:
    """What a plan keeps on the host beside activations."""
    streamed, moving = model.shape.layers - homes.resident, model.shape.layers - homes.states_resident
    total = float(model.ends_parameters * model.state_bytes) if homes.ends_states == "host" else 0.0
    total += model.layer_state_bytes * moving
    return total + streamed * model.layer_bytes * (2 if homes.rounds > 1 else 1)


# ── time ──


@dataclass(frozen=True)
class Times:
    """Seconds of a step, how many of them the matrix units wait for copies, and the bytes copied."""

    step_s: float
    waiting_s: float
    copied_bytes: float

    def is_better_than(self, other: Times) -> bool:
        """Faster; of two that are as fast, the one that copies less."""
        if abs(self.step_s - other.step_s) > 1e-9 * other.step_s:
            return self.step_s < other.step_s
        return self.copied_bytes < other.copied_bytes


@dataclass(frozen=True)
class _Pass:
    """So many times over all layers; up and down: how many vectors of a layer that streams are copied each way, its
    weights or its gradients; states: whether the optimizer's states come and go."""

    times: int
    up: int
    down: int = 0
    backward: bool = False
    states: bool = False


def layer_times(homes: Homes, keeps: Keeps, place: Place, model: Model, rates: Rates) -> Times:
    """A layer's part of a step, the mean of those that stream and those that stay.

    Copies and computation overlap; in each pass over a layer the longer of them is what it takes, since little is sent
    further ahead than one layer.
    """
    layers, layer = model.shape.layers, model.layer_bytes
    # What comes and goes of a layer, and the share of layers of which it does: of weights, and of states.
    vectors = ((layer, 1 - homes.resident / layers), (0, homes.resident / layers))
    all_states = ((model.layer_state_bytes, 1 - homes.states_resident / layers), (0, homes.states_resident / layers))
    activations = layer_kept_bytes(homes, model, keeps) if place == "host" else 0
    forward_s = homes.round_tokens * rates.forward_s
    backward_s = homes.round_tokens * (rates.backward_s + rates.again_s[keeps])
    more = homes.rounds > 1  # then what the rounds before have gathered comes up too
    passes = [_Pass(homes.rounds, up=1), _Pass(1, up=1 + more, down=1, backward=True, states=True)]
    if more:
        passes += [_Pass(1, up=1, down=1, backward=True), _Pass(homes.rounds - 2, up=2, down=1, backward=True)]
    total_s = waiting_s = copied = 0.0
    for p, (vector, share), (states, share_of_states) in product(passes, vectors, all_states):
        times = p.times * share * share_of_states
        up = p.up * vector + p.states * states + p.backward * activations
        down = p.down * vector + p.states * states + (not p.backward) * activations
        own_s = (backward_s if p.backward else forward_s) + p.states * layer * rates.update_s_per_byte
        takes_s = max(own_s, up * rates.up_s_per_byte, down * rates.down_s_per_byte)
        total_s += times * takes_s
        waiting_s += times * (takes_s - own_s)
        copied += times * (up + down)
    return Times(total_s, waiting_s, copied)


def ends_times(homes: Homes, model: Model, rates: Rates) -> Times:
    tokens = homes.round_tokens * homes.rounds
    work_s = tokens * rates.head_s + model.ends_parameters * model.element_bytes * rates.update_s_per_byte
    moved = model.ends_parameters * model.state_bytes if homes.ends_states == "host" else 0
    # fetched, updated and sent back, with nothing else to do
    waiting_s = moved * (rates.up_s_per_byte + rates.down_s_per_byte)
    return Times(work_s + waiting_s, waiting_s, 2 * moved)
