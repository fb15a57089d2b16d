"""The timeline of a pipeline keeps the order of its schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.planner_estimates import cluster, job
from workloads.planner.job import TrainingLayout
from workloads.planner.step import estimate_job, rank_seconds
from workloads.planner.timeline import build_timeline


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (4, 1), (4, 2), (3, 5)])
def test_every_pass_waits_for_the_one_before_and_ranks_do_one_thing_at_a_time(pp: int, chunks: int) -> None:
    layout = TrainingLayout(pp=pp, stages_per_rank=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
    microbatches = 2 * pp
    operations = build_timeline(layout, [(1.0, 2.0)] * pp, microbatches)
    assert len(operations) == 2 * pp * chunks * microbatches
    ends = {(item.chunk * pp + item.rank, item.microbatch, item.is_forward): item for item in operations}
    for (stage, microbatch, is_forward), item in ends.items():
        before = ends.get((stage - 1 if is_forward else stage + 1, microbatch, is_forward))
        assert before is None or before.stop_s <= item.start_s
        assert is_forward or ends[stage, microbatch, True].stop_s <= item.start_s
    for rank in range(pp):
        passes = sorted((item.start_s, item.stop_s) for item in operations if item.rank == rank)
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(passes))


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_equal_ranks_wait_as_long_as_the_bubble(chunks: int) -> None:
    pp, microbatches = 4, 8
    layout = TrainingLayout(pp=pp, stages_per_rank=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
    end_s = max(item.stop_s for item in build_timeline(layout, [(1.0, 2.0)] * pp, microbatches))
    assert end_s == pytest.approx((microbatches + (pp - 1) / chunks) * 3.0)  # arXiv 2104.04473, section 2.2


def test_the_slowest_rank_takes_the_seconds_of_the_estimate() -> None:
    work = job("llama3_70b", pp=4, dp_shard=16, tp=1, global_batch=256, sharding="zero1", trainer="megatron")
    target = cluster(64)
    step = estimate_job(work, target).step
    busy_s = step.total_s - step.bubble - step.pipeline - step.optimizer - step.data_parallel
    slowest_s = max(sum(pair) for pair in rank_seconds(work, target))
    assert slowest_s * work.layout.microbatches == pytest.approx(busy_s)


def test_a_schedule_without_a_timeline_is_named() -> None:
    with pytest.raises(ValueError, match=r"schedule zbv: no timeline\. Available: 1f1b, interleaved"):
        build_timeline(TrainingLayout(pp=2, stages_per_rank=2, schedule="zbv"), [(1.0, 2.0)] * 2, 4)
