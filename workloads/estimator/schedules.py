"""The order of a rank's passes in each pipeline schedule, as PyTorch's schedules carry them out.

Sources: arXiv 2104.04473 (1F1B, interleaved), 2401.10241 (zero bubble), 2405.15362 (ZBV), DeepSeek's DualPipe
(DualPipeV). A pass is named by its kind and the stage of the rank: `F0`, `I1`. W without a number is the oldest
backward pass for weights that is waiting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from workloads.layouts.layout import Schedule

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


@dataclass(frozen=True)
class Action:
    """A pass of a micro-batch through a stage of a rank.

    Attributes:
        kind: `backward` is the whole backward pass, of which `backward_input` and `backward_weight` are the parts.
        chunk: which of the rank's stages, from 0.
        microbatch: from 0.
    """

    kind: Kind
    chunk: int
    microbatch: int


def list_actions(schedule: Schedule, rank: int, pp: int, chunks: int, microbatches: int) -> list[Action]:
    """Return the passes of a rank in their order.

    Args:
        chunks: stages of each rank.
    """
    steps = STEPS[schedule](rank, pp, chunks, microbatches)
    return [action for action in _number(steps) if action.microbatch < microbatches]


def _number(steps: Iterable[str]) -> Iterator[Action]:
    """Yield the passes with their micro-batches, which go through each stage by number, in each direction."""
    done, waiting = Counter[str](), deque[Action]()
    for step in steps:
        if step == "W":
            oldest = waiting.popleft()
            yield Action("backward_weight", oldest.chunk, oldest.microbatch)
            continue
        count = step.replace("B", "I")  # a whole backward pass is one for inputs too
        action = Action(KINDS[step[0]], int(step[1:]), done[count])
        done[count] += 1
        if step[0] == "I":
            waiting.append(action)
        yield action


def _list_looped(rank: int, pp: int, chunks: int, microbatches: int, *, hops: int, is_split: bool) -> Iterator[str]:
    """Yield the passes where each rank has every `pp`-th stage: after a warm-up one forward and one backward in turns.

    Args:
        hops: forward passes more in the warm-up for each rank that follows.
        is_split: weights' gradients wait for as many passes as ranks are before this one.
    """
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


Steps = Callable[[int, int, int, int], Iterable[str]]
STEPS: dict[Schedule, Steps] = {
    "1f1b": lambda *sizes: _list_looped(*sizes, hops=1, is_split=False),
    "interleaved": lambda *sizes: _list_looped(*sizes, hops=2, is_split=False),
    "zero_bubble": lambda *sizes: _list_looped(*sizes, hops=1, is_split=True),
    "zbv": _list_zbv,
    "dualpipev": _list_dualpipev,
}
