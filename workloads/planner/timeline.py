"""The timeline of a pipeline: when each rank computes which micro-batch of which of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workloads.planner.job import TrainingLayout

DRAWN_SCHEDULES = ("1f1b", "interleaved")


@dataclass(frozen=True)
class Operation:
    """The forward or backward pass of a micro-batch through a stage.

    Attributes:
        rank: of the pipeline.
        chunk: which of the rank's stages, from 0.
        microbatch: from 0.
    """

    rank: int
    chunk: int
    microbatch: int
    is_forward: bool
    start_s: float
    stop_s: float


def build_timeline(layout: TrainingLayout, rank_s: Sequence[tuple[float, float]], microbatches: int) -> list[Operation]:
    """Return the operations of a step with so many micro-batches, in the order in which they end.

    Args:
        rank_s: seconds of each rank's forward and backward pass of a micro-batch through all its stages.

    Raises:
        ValueError: the schedule is not one of `DRAWN_SCHEDULES`.
    """
    if layout.schedule not in DRAWN_SCHEDULES:
        raise ValueError(f"schedule {layout.schedule}: no timeline. Available: {', '.join(DRAWN_SCHEDULES)}")
    pp, chunks = layout.pp, layout.stages_per_rank
    waiting = [list(_order(rank, pp, chunks, microbatches)) for rank in range(pp)]
    free_s, ends_s = [0.0] * pp, dict[tuple[int, int, bool], float]()
    done: list[Operation] = []
    while any(waiting):
        for rank in range(pp):
            while waiting[rank]:
                chunk, microbatch, is_forward = waiting[rank][0]
                stage = chunk * pp + rank
                needs = _needs(stage, microbatch, is_forward, pp * chunks)
                if needs is not None and needs not in ends_s:
                    break
                start_s = max(free_s[rank], 0.0 if needs is None else ends_s[needs])
                stop_s = start_s + rank_s[rank][0 if is_forward else 1] / chunks
                free_s[rank] = ends_s[stage, microbatch, is_forward] = stop_s
                done.append(Operation(rank, chunk, microbatch, is_forward, start_s, stop_s))
                waiting[rank].pop(0)
    return sorted(done, key=lambda operation: operation.stop_s)


def _needs(stage: int, microbatch: int, is_forward: bool, stages: int) -> tuple[int, int, bool] | None:
    """Return what has to end before a pass through a stage: its stage, micro-batch and direction; None for nothing."""
    if is_forward:
        return (stage - 1, microbatch, True) if stage else None
    return (stage + 1, microbatch, False) if stage < stages - 1 else (stage, microbatch, True)


def _order(rank: int, pp: int, chunks: int, microbatches: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the chunk, micro-batch and direction of a rank's operations, in Megatron-LM's order (arXiv 2104.04473)."""
    total = microbatches * chunks
    warm_up = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp
    warm_up = min(warm_up, total)

    def pass_of(place: int, is_forward: bool) -> tuple[int, int, bool]:
        group, inside = divmod(place, pp * chunks)
        chunk = inside // pp
        return chunk if is_forward else chunks - 1 - chunk, group * pp + inside % pp, is_forward

    for place in range(warm_up):
        yield pass_of(place, True)
    for place in range(warm_up, total):
        yield pass_of(place, True)
        yield pass_of(place - warm_up, False)
    for place in range(total - warm_up, total):
        yield pass_of(place, False)
