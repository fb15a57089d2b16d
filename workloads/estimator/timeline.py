"""The timeline of a pipeline: when each rank computes which micro-batch of which of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workloads.estimator.schedules import Action, Kind, list_actions
from workloads.layouts.layout import V_SCHEDULES, Layout

End = tuple[int, int, str]  # stage, micro-batch, and the direction that has ended


@dataclass(frozen=True)
class Operation:
    """A pass of a micro-batch through a stage, with its time."""

    rank: int
    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a rank's passes of a micro-batch through all its stages; `weights` is a part of `backward`."""

    forward_s: float
    backward_s: float
    weights_s: float

    @property
    def by_kind(self) -> Mapping[Kind, float]:
        return {
            "forward": self.forward_s,
            "backward": self.backward_s,
            "backward_input": self.backward_s - self.weights_s,
            "backward_weight": self.weights_s,
        }


def build_timeline(layout: Layout, ranks: Sequence[PassTimes], microbatches: int) -> list[Operation]:
    """Return the passes of a step with so many micro-batches, in the order in which they end.

    Sends take no time, and a rank does one thing at a time: a forward and a backward pass that DualPipeV has together
    are one after the other, as PyTorch runs them.

    Args:
        ranks: the times of each rank; each of its stages takes an equal part.
    """
    pp, chunks = layout.pp, layout.stages_per_rank
    waiting = [list_actions(layout.schedule, rank, pp, chunks, microbatches)[::-1] for rank in range(pp)]
    seconds = [{kind: value / chunks for kind, value in times.by_kind.items()} for times in ranks]
    free_s, ends_s = [0.0] * pp, dict[End | None, float]({None: 0.0})
    done: list[Operation] = []
    while any(waiting):
        for rank in range(pp):
            while waiting[rank]:
                action = waiting[rank][-1]
                stage = find_stage(layout, rank, action.chunk)
                needed = _needed_end(action, stage, pp * chunks)
                if needed not in ends_s:
                    break
                start_s = max(free_s[rank], ends_s[needed])
                free_s[rank] = start_s + seconds[rank][action.kind]
                ends_s[stage, action.microbatch, _direction(action.kind)] = free_s[rank]
                done.append(Operation(rank, waiting[rank].pop(), start_s, free_s[rank]))
    return sorted(done, key=lambda operation: operation.stop_s)


def find_stage(layout: Layout, rank: int, chunk: int) -> int:
    """Return which stage of the pipeline a rank's stage is."""
    if layout.schedule in V_SCHEDULES and chunk:
        return layout.pp * layout.stages_per_rank - 1 - rank
    return chunk * layout.pp + rank


def _direction(kind: Kind) -> str:
    return "backward" if kind == "backward_input" else kind


def _needed_end(action: Action, stage: int, stages: int) -> End | None:
    """Return what has to end before a pass; None for nothing."""
    if action.kind == "forward":
        return (stage - 1, action.microbatch, "forward") if stage else None
    if action.kind == "backward_weight":
        return stage, action.microbatch, "backward"
    return (stage + 1, action.microbatch, "backward") if stage < stages - 1 else (stage, action.microbatch, "forward")
