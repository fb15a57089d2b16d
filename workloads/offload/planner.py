"""Choosing where everything lives: the fastest plan that fits, by this machine's measured rates. No torch.

Every plan that fits a budget fits every larger one, and the fastest of them is taken, so more memory is never predicted
to be slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from workloads.contract import Infeasible
from workloads.llama.shapes import LlamaShape
from workloads.offload.layout import Activations, LayerPlan, Place, Plan

GIB = 2**30
LOGIT_TOKENS = 4096  # what the loss takes at a time: `workloads.llama.model.Llama`
UPDATE_PIECE = 1 << 24  # what the optimizer takes at a time, with this many fp32 copies of it
UPDATE_COPIES = 6


@dataclass(frozen=True)
class Rates:
    """What one machine was measured to do for one model. Seconds for a token and a block, forward, and backward without
    computing anything again; for a token and the head with its loss; for a byte up, down, and updated.

    full_bytes: what the backward pass of a block keeps for a token
    """

    forward_s: float
    backward_s: float
    head_s: float
    up_s_per_byte: float
    down_s_per_byte: float
    update_s_per_byte: float
    full_bytes: float


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


def choose(
    shape: LlamaShape, sequence_length: int, sequences_per_step: int, budget: Budget, rates: Rates, *, width: int
) -> Prediction:
    """The fastest plan within the budget; `width` is the bytes of a number. Raises Infeasible, by how much it lacks."""
    best: Prediction | None = None
    lacking: tuple[float, str] | None = None
    for skeleton in _skeletons(shape.layers, sequence_length, sequences_per_step):
        found = _with_activations(skeleton, shape, budget, rates, width)
        if isinstance(found, str):
            continue
        if isinstance(found, tuple):
            lacking = min(lacking, found) if lacking else found
        elif best is None or _is_better(found, best):
            best = found
    if best is None:
        why = lacking[1] if lacking else "no plan has such a shape"
        raise Infeasible(f"device_gib={budget.device_gib:g} and host_gib={budget.host_gib:g}: {why}")
    return best


def _is_better(one: Prediction, other: Prediction) -> bool:
    """Faster; of two that are as fast, the one that copies less."""
    if abs(one.step_s - other.step_s) > 1e-9 * other.step_s:
        return one.step_s < other.step_s
    return one.copied_bytes < other.copied_bytes


def _skeletons(layers: int, sequence_length: int, sequences_per_step: int) -> Iterator[Plan]:
    """Every division of a step into rounds and chunks, with so many layers resident and so many states on the device;
    what is kept of activations is left to be decided."""
    for sequences in [s for s in _divisors(sequences_per_step) if s == 1 or s * sequence_length <= 32768]:
        for rounds in _divisors(sequences_per_step // sequences):
            chunks = sequences_per_step // sequences // rounds
            for resident in range(layers + 1):
                for with_states in sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers}):
                    for ends in ("device", "host"):
                        plan = tuple(
                            LayerPlan(
                                *_homes(_evenly(n, resident, layers)), "device" if n < with_states else "host", "input"
                            )
                            for n in range(layers)
                        )
                        yield Plan(plan, ends, sequence_length, sequences, chunks, rounds)


def _homes(resident: bool) -> tuple[Place, Place]:
    return ("device", "device") if resident else ("host", "host")


def _evenly(n: int, chosen: int, of: int) -> bool:
    """Whether n is among `chosen` of `of`, spread evenly: one that streams has the ones that stay to hide behind."""
    return (n + 1) * chosen // of > n * chosen // of


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


# ── memory ──


def _with_activations(
    plan: Plan, shape: LlamaShape, budget: Budget, rates: Rates, width: int
) -> Prediction | tuple[float, str] | str:
    """The plan with the fastest activations that fit, or by how much it does not fit at all.

    Inputs go to the host until the rest fits, and whatever room is left on the device then keeps whole layers.
    """
    tokens = plan.sequence_length * plan.sequences * plan.chunks
    input_bytes = tokens * shape.width * width
    device, host = fixed_device_bytes(plan, shape, rates, width), fixed_host_bytes(plan, shape, width)
    room = budget.device_gib * GIB - device
    host_room = budget.host_gib * GIB - host
    layers = len(plan.layers)
    on_device = max(0, min(layers, int(room // input_bytes))) if room > 0 else 0
    on_host = layers - on_device
    if room < 0 or on_host * input_bytes > host_room:
        short = max(0.0, -room) / GIB + max(0.0, on_host * input_bytes - host_room) / GIB
        return short, f"{short:.3g} GiB too little at best (device {device / GIB:.3g}, host {host / GIB:.3g} and more)"
    room -= on_device * input_bytes
    full_bytes = tokens * rates.full_bytes
    full = min(on_device, int(room // (full_bytes - input_bytes))) if full_bytes > input_bytes else on_device
    counts: list[tuple[Activations, int]] = [
        ("input_on_host", on_host),
        ("input", on_device - full),
        ("full", full),
    ]
    kinds = [kind for kind, count in counts for _ in range(count)]
    # The last layers are the first to be gone through backward: what they keep is kept for the shortest time.
    plan = replace(plan, layers=tuple(replace(p, activations=k) for p, k in zip(plan.layers, kinds, strict=True)))
    step_s, waiting_s, copied = predict(plan, shape, rates, width)
    used = device + (on_device - full) * input_bytes + full * full_bytes
    return Prediction(plan, step_s, used, host + on_host * input_bytes, waiting_s, copied)


def layer_bytes(shape: LlamaShape, width: int) -> int:
    """Of one block's parameters."""
    inner = replace(shape, layers=1).parameters - replace(shape, layers=0).parameters
    return inner * width


def ends_bytes(shape: LlamaShape, width: int) -> int:
    """Of embedding, last norm and head."""
    return replace(shape, layers=0).parameters * width


def fixed_device_bytes(plan: Plan, shape: LlamaShape, rates: Rates, width: int) -> float:
    """What a plan needs on the device beside the activations that it keeps."""
    layer, ends = layer_bytes(shape, width), ends_bytes(shape, width)
    chunk = plan.sequence_length * plan.sequences
    streamed = [p for p in plan.layers if p.weights == "host"]
    total = 2.0 * ends + (2 * ends if plan.ends_states == "device" else shape.vocabulary * shape.width * width * 2)
    total += sum(2 * layer * (p.weights == "device") + 2 * layer * (p.states == "device") for p in plan.layers)
    total += 2 * layer * min(2, len(streamed))
    total += 4 * layer if any(p.states == "host" for p in plan.layers) else 0
    total += 3 * plan.chunks * chunk * shape.width * width  # every chunk on its way up or down, and what comes of it
    total += chunk * rates.full_bytes * 1.5  # one chunk of one layer computed again, with its gradients
    total += 3 * min(LOGIT_TOKENS, chunk) * shape.vocabulary * max(width, 2)
    total += UPDATE_COPIES * 4 * min(UPDATE_PIECE, max(layer // width, shape.vocabulary * shape.width))
    return total


def fixed_host_bytes(plan: Plan, shape: LlamaShape, width: int) -> float:
    """What a plan keeps on the host beside activations."""
    layer, ends = layer_bytes(shape, width), ends_bytes(shape, width)
    total = 2.0 * ends if plan.ends_states == "host" else 0.0
    for p in plan.layers:
        total += layer * (p.weights == "host") + 2 * layer * (p.states == "host")
        total += layer if p.gradients == "host" and plan.rounds > 1 else 0
    return total


# ── time ──


def predict(plan: Plan, shape: LlamaShape, rates: Rates, width: int) -> tuple[float, float, float]:
    """Seconds of a step, how many of them the matrix units wait for copies, and the bytes copied.

    Within a pass over the layers copies and computation overlap; the longer of them is what it takes.
    """
    layer, tokens = layer_bytes(shape, width), plan.sequence_length * plan.sequences * plan.chunks
    input_bytes = tokens * shape.width * width
    streamed = sum(p.weights == "host" for p in plan.layers)
    states = sum(p.states == "host" for p in plan.layers)
    on_host = sum(p.activations == "input_on_host" for p in plan.layers)
    again = sum(p.activations != "full" for p in plan.layers)
    step_s = waiting_s = copied = 0.0
    for number in range(plan.rounds):
        first, last = number == 0, number == plan.rounds - 1
        up, down = streamed * layer, on_host * input_bytes
        work = len(plan.layers) * tokens * rates.forward_s
        copies = max(up * rates.up_s_per_byte, down * rates.down_s_per_byte)
        step_s += max(work, copies) + tokens * rates.head_s
        waiting_s += max(0.0, copies - work)
        copied += up + down
        up = (streamed * (1 + (not first)) + 2 * states * last) * layer + on_host * input_bytes
        down = streamed * layer + 2 * states * last * layer
        work = tokens * (len(plan.layers) * rates.backward_s + again * rates.forward_s)
        work += last * (len(plan.layers) * layer + ends_bytes(shape, width)) * rates.update_s_per_byte
        copies = max(up * rates.up_s_per_byte, down * rates.down_s_per_byte)
        step_s += max(work, copies)
        waiting_s += max(0.0, copies - work)
        copied += up + down
    return step_s, waiting_s, copied
