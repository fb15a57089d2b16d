"""Model pipelines: each rank's layers, the order of its passes in each schedule, the timeline, and the bubble.

Schedules are modeled as PyTorch executes them, and V-Half and V-Min as Primus does. Sources: arXiv 2104.04473 (1F1B,
interleaved), 2401.10241 (zero bubble), 2405.15362 (ZBV, V-Half, V-Min), DeepSeek's DualPipe (DualPipeV).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from workloads.layouts.layout import CONTROLLED_SCHEDULES, SPLIT_SCHEDULES, V_SCHEDULES, Layout, Schedule
from workloads.models.model import Model


class RankLayers(NamedTuple):
    """Identical layers on a pipeline rank: the index of one of them, and their number."""

    layer: int
    number: int


def rank_layers(model: Model, layout: Layout) -> tuple[tuple[RankLayers, ...], ...]:
    """Return each pipeline rank's layers, divided into stages by `stage_layers`."""
    return _rank_layers(model, layout.pp, layout.stages_per_rank, layout.schedule in V_SCHEDULES, layout.less_layers)


@cache
def peak_ranks(ranks: tuple[tuple[RankLayers, ...], ...], head: int) -> Sequence[int]:
    """Return the candidates for the rank that needs the most memory.

    The candidates are the ranks with the embedding or the head, and the first of the other ranks for each set of
    layers. No rank holds activations of more micro-batches than an earlier rank (see `in_flight`).
    """
    firsts = {layers: rank for rank, layers in reversed(list(enumerate(ranks))) if rank not in (0, head)}
    return sorted({0, head, *firsts.values()})


@cache
def _rank_layers(
    model: Model, pp: int, stages: int, is_folded: bool, less_layers: tuple[int, int]
) -> tuple[tuple[RankLayers, ...], ...]:
    chunks = stage_layers(model.layers, pp * stages, *less_layers)
    ranks = [[layer for chunk in chunks[rank::pp] for layer in chunk] for rank in range(pp)]
    if is_folded:
        ranks = [[*chunks[rank], *chunks[-1 - rank]] for rank in range(pp)]
    ranks[0 if is_folded else -1] += [model.layers - 1] * model.prediction_layers  # on the head's rank
    samples = model.layer_kinds
    counts = (Counter(model.layer_kind(layer) for layer in layers) for layers in ranks)
    return tuple(tuple(RankLayers(samples[kind], number) for kind, number in rank.items()) for rank in counts)


def stage_layers(layers: int, stages: int, first_less: int = 0, last_less: int = 0) -> list[range]:
    """Return each stage's layers. The first and last stages, which have the embedding and the head, have this many
    fewer. If the rest does not divide evenly, they get fewer too or, if numbers are given, the last stages do, as in
    torchtitan (`generate_llm_fqn_per_model_part`)."""
    base, remainder = divmod(layers + first_less + last_less, stages)
    ends = () if first_less or last_less else (0, stages - 1)
    longer_stages = sorted(range(stages), key=lambda stage: (stage in ends, stage))[:remainder]
    sizes = [base + (stage in longer_stages) for stage in range(stages)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def head_rank(layout: Layout) -> int:
    """Return the rank with the output layer: the first rank in V schedules, else the last rank."""
    return 0 if layout.schedule in V_SCHEDULES and layout.stages_per_rank > 1 else layout.pp - 1


Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


@dataclass(frozen=True)
class PassTimes:
    """A micro-batch's pass times in seconds through all stages of a rank. The names are those of `Kind`."""

    forward: float
    backward: float
    backward_weight: float

    @property
    def backward_input(self) -> float:
        return self.backward - self.backward_weight

    @property
    def total(self) -> float:
        return self.forward + self.backward


def bubble_s(ranks: Sequence[PassTimes], layout: Layout) -> float:
    """Estimate how many seconds the slowest rank waits while the pipeline fills and drains.

    The bubble is one stage's forward and backward pass per other rank (arXiv 2104.04473, section 2.2). With split
    backward passes, the bubble is F + I - W (forward, input, weight passes): waiting ranks compute weight gradients
    (ZB-H1, 2401.10241). For passes of equal length, this also holds for ZBV and DualPipeV (`build_timeline`), because
    the optimizer waits for the last rank. ZBV's paper reports no bubble: its ranks start their optimizers one by one
    and do not clip by the global norm. DualPipe's authors report this bubble if forward and backward passes overlap.

    V-Half and V-Min also wait in every micro-batch unless all passes take the same time. Their timeline shows these
    waits, and repeats after three rounds of `pp` micro-batches.
    """
    slowest = max(ranks, key=lambda rank: rank.total)
    if layout.schedule in CONTROLLED_SCHEDULES:
        few = min(layout.microbatches, 4 * layout.pp + layout.microbatches % layout.pp)
        end_s = build_timeline(layout, ranks, few)[-1].stop_s
        if rounds := (layout.microbatches - few) // layout.pp:
            end_s += rounds * (end_s - build_timeline(layout, ranks, few - layout.pp)[-1].stop_s)
        return end_s - layout.microbatches * slowest.total
    hidden = 2 if layout.schedule in SPLIT_SCHEDULES else 0
    *others_s, slowest_s = (rank.total - hidden * rank.backward_weight for rank in (*ranks, slowest))
    return (sum(others_s) - slowest_s) / layout.stages_per_rank


def in_flight(rank: int, layout: Layout) -> float:
    """Return the peak activations of a rank, in units of one micro-batch's activations in all the rank's layers.

    A 1F1B rank holds one unit for itself and each later rank. Interleaved ranks hold their warm-up's chunks. PyTorch's
    interleaved zero bubble warms up with one chunk, not two, per later rank; no rank holds more than `pp` units.
    """
    pp, chunks = layout.pp, layout.stages_per_rank
    if layout.schedule in CONTROLLED_SCHEDULES:
        return min(layout.microbatches, 1 + (pp // 2 if layout.schedule == "v_half" else (pp + 1) // 3))
    if layout.schedule in V_SCHEDULES:
        return min(layout.microbatches, pp + (0.5 if layout.schedule == "dualpipev" else 0.0))
    if layout.schedule == "zero_bubble":
        return min(layout.microbatches, pp)
    if chunks == 1:
        return min(layout.microbatches, pp - rank)
    warm_up = 2 * (pp - rank - 1) + (chunks - 1) * pp + 1
    return min(warm_up, layout.microbatches * chunks) / chunks


@dataclass(frozen=True)
class Action:
    """A micro-batch's pass through one stage on a rank."""

    kind: Kind  # `backward` is a whole backward pass; `backward_input` and `backward_weight` are its parts
    chunk: int  # the index of the stage on the rank, from 0
    microbatch: int  # from 0


def list_actions(schedule: Schedule, rank: int, pp: int, chunks: int, microbatches: int) -> list[Action]:
    """Return the passes of a rank with `chunks` stages, in execution order."""
    actions = list[Action]()
    done, waiting = Counter[str](), deque[Action]()  # each stage runs micro-batches in order, in each direction
    for step in STEPS[schedule](rank, pp, chunks, microbatches):
        if step == "W":
            oldest = waiting.popleft()
            actions.append(Action("backward_weight", oldest.chunk, oldest.microbatch))
            continue
        count = step.replace("B", "I")  # a whole backward pass includes the pass for inputs
        actions.append(Action(KINDS[step[0]], int(step[1:]), done[count]))
        done[count] += 1
        if step[0] == "I":
            waiting.append(actions[-1])
    return [action for action in actions if action.microbatch < microbatches]


def _list_looped(rank: int, pp: int, chunks: int, microbatches: int, *, hops: int, is_split: bool) -> Iterator[str]:
    """Yield the passes of a rank with every `pp`-th stage: after a warm-up, alternating forward and backward passes.
    During warm-up, a rank runs `hops` extra passes per later rank. Weight gradients lag a pass per earlier rank."""
    in_round = microbatches // max(1, microbatches // pp)
    total = microbatches * chunks
    warm_up = min((chunks - 1) * in_round + hops * (pp - 1 - rank), total)
    forward = [f"F{place // in_round % chunks}" for place in range(total)]
    backward = [f"{'I' if is_split else 'B'}{chunks - 1 - place // in_round % chunks}" for place in range(total)]
    yield from forward[:warm_up]
    for place in range(total):
        yield from forward[warm_up + place : warm_up + place + 1]
        yield backward[place]
        if is_split and place >= rank:
            yield "W"
    if is_split:
        yield from ["W"] * min(rank, total)


def _list_zbv(rank: int, pp: int, _: int, microbatches: int) -> list[str]:
    count, later = max(2 * pp - 1, microbatches), pp - rank
    return [
        *["F0"] * (2 * later - 1),
        *["F1", "F0"] * rank,
        *["F1", "I1", "W1"] * later,
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (count - 2 * pp + 1 + rank),
        *["I0", "W0", "F1", "I1", "W1"] * (later - 1),
        *["I0", "I1"] * rank,
        *["I0", "W0"] * later,
        *["W1"] * rank,
        *["W0"] * rank,
    ]


def _list_dualpipev(rank: int, pp: int, _: int, microbatches: int) -> list[str]:
    earlier, later = rank + 1, pp - rank - 1
    drain = ["B1", "B0"] * earlier
    return [
        *["F0"] * (2 * later),
        *["F0", "F1"] * earlier,
        *["I1", "W", "F1"] * later,
        *["F0", "B1", "F1", "B0"] * (microbatches - 2 * pp + earlier),
        *["B1", "F1", "B0"] * later,
        *drain[:earlier],
        *[step.replace("B", "I") for step in drain[earlier:]],
        *["W", "I0"] * later,
        *["W"] * earlier,
    ]


def _list_controlled(rank: int, pp: int, _: int, microbatches: int, *, hops: int) -> Iterator[str]:
    """Yield the passes of V-Half or V-Min (arXiv 2405.15362, in time slots of one pass).

    A first forward pass starts `hops` slots after that of the rank before, and the passes of a micro-batch start six
    slots after those of the micro-batch before. Weight gradients fill free slots, the oldest first. After the last
    forward pass they fill every second slot, so that backward passes do not wait for them.
    """
    turn, gap = (hops + 1) * pp, 3 * (pp % 2 == 0) if hops == 2 else 2 * (pp % 3 == 0)
    starts = (hops * rank, turn - rank - hops, turn + gap + hops * rank - hops + 1, 2 * turn + gap - rank - hops)
    pairs = list(zip(("F0", "F1", "I1", "I0"), starts, strict=True))
    slots = {start + 6 * number: name for name, start in pairs for number in range(microbatches)}
    last_forward, waiting = starts[1] + 6 * (microbatches - 1), 0
    for slot in range(max(slots) + 1):
        is_used = waiting and (slot < last_forward or slot % 2 == 0)
        if name := slots.get(slot, "W" if is_used else ""):
            yield name
            waiting += {"I": 1, "W": -1}.get(name[0], 0)
    yield from ["W"] * waiting


# A pass is named by its kind and the stage on the rank, such as `F0` or `I1`. W without a number is the oldest waiting
# backward pass for weights.
Steps = Callable[[int, int, int, int], Iterable[str]]
STEPS: dict[Schedule, Steps] = {
    "1f1b": lambda *sizes: _list_looped(*sizes, hops=1, is_split=False),
    "interleaved": lambda *sizes: _list_looped(*sizes, hops=2, is_split=False),
    "zero_bubble": lambda *sizes: _list_looped(*sizes, hops=1, is_split=True),
    "zbv": _list_zbv,
    "dualpipev": _list_dualpipev,
    "v_half": lambda *sizes: _list_controlled(*sizes, hops=2),
    "v_min": lambda *sizes: _list_controlled(*sizes, hops=1),
}


End = tuple[int, int, str]  # stage, micro-batch and direction of a pass that has ended


@dataclass(frozen=True)
class Operation:
    rank: int
    action: Action
    start_s: float
    stop_s: float


def build_timeline(layout: Layout, ranks: Sequence[PassTimes], microbatches: int) -> list[Operation]:
    """Return the passes of a step with `microbatches` micro-batches, in the order in which they end.

    Sends take no time, and a rank runs one pass at a time. Forward and backward passes that DualPipeV combines run one
    after the other, as in PyTorch. Each stage takes an equal share of its rank's time.
    """
    pp, chunks = layout.pp, layout.stages_per_rank
    stages = [layout.list_stages(rank) for rank in range(pp)]
    waiting = [list_actions(layout.schedule, rank, pp, chunks, microbatches)[::-1] for rank in range(pp)]
    free_s, ends_s = [0.0] * pp, dict[End | None, float]({None: 0.0})
    done: list[Operation] = []
    while any(waiting):
        for rank in range(pp):
            while waiting[rank]:
                action = waiting[rank][-1]
                stage = stages[rank][action.chunk]
                needed = _needed_end(action, stage, layout.stages)
                if needed not in ends_s:
                    break
                start_s = max(free_s[rank], ends_s[needed])
                free_s[rank] = start_s + getattr(ranks[rank], action.kind) / chunks
                direction = "backward" if action.kind == "backward_input" else action.kind
                ends_s[stage, action.microbatch, direction] = free_s[rank]
                done.append(Operation(rank, waiting[rank].pop(), start_s, free_s[rank]))
    return sorted(done, key=lambda operation: operation.stop_s)


def _needed_end(action: Action, stage: int, stages: int) -> End | None:
    if action.kind == "forward":
        return (stage - 1, action.microbatch, "forward") if stage else None
    if action.kind == "backward_weight":
        return stage, action.microbatch, "backward"
    return (stage + 1, action.microbatch, "backward") if stage < stages - 1 else (stage, action.microbatch, "forward")
