"""The timeline of a pipeline keeps the order of its schedule, and takes as long as its bubble says."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planner_estimates import cluster, job
from workloads.estimator import pipeline
from workloads.estimator.placed_job import PlacedJob
from workloads.estimator.step import _block_time, estimate_job, rank_seconds
from workloads.layouts.layout import V_SCHEDULES, Layout, Schedule
from workloads.layouts.rules import find_violation
from workloads.layouts.trainers import find_efficiency
from workloads.parallel.train import SCHEDULES

SPLIT = ("zero_bubble", *V_SCHEDULES)
KINDS = {  # PyTorch's names
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}


def layout_of(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> Layout:
    return Layout(pp=pp, schedule=schedule, stages_per_rank=chunks, global_batch=microbatches)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Pipelines that a schedule runs."""
    schedule: Schedule = draw(st.sampled_from(["1f1b", "interleaved", *SPLIT]))  # type: ignore[assignment]
    pp = draw(st.integers(2, 6))
    chunks = (
        1 if schedule == "1f1b" else 2 if schedule in V_SCHEDULES else draw(st.integers(1 + (schedule not in SPLIT), 4))
    )
    rounds = draw(st.integers(2, 4))
    even = schedule in ("interleaved", "zero_bubble")
    return layout_of(schedule, pp, chunks, pp * rounds if even else pp * rounds + draw(st.integers(0, pp)))


@given(layouts(), st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0.5, 2))
def test_passes_wait_for_each_other_and_ranks_do_one_thing_at_a_time(
    layout: Layout, forward_s: float, inputs_s: float, weights_s: float
) -> None:
    times = pipeline.PassTimes(forward_s, inputs_s + weights_s, weights_s)
    operations = pipeline.build_timeline(layout, [times] * layout.pp, layout.microbatches)
    by_pass: dict[tuple[int, int, str], pipeline.Operation] = {}
    for item in operations:
        stage = layout.list_stages(item.rank)[item.action.chunk]
        kinds = ("backward_input", "backward_weight") if item.action.kind == "backward" else (item.action.kind,)
        for kind in kinds:
            assert (stage, item.action.microbatch, kind) not in by_pass  # no pass twice
            by_pass[stage, item.action.microbatch, kind] = item
    stages = layout.pp * layout.stages_per_rank
    assert Counter(kind for _, _, kind in by_pass) == dict.fromkeys(
        ("forward", "backward_input", "backward_weight"), stages * layout.microbatches
    )
    for (stage, microbatch, kind), item in by_pass.items():
        if kind == "backward_weight":
            gradient = by_pass[stage, microbatch, "backward_input"]
            assert gradient is item or gradient.stop_s <= item.start_s
            continue
        before = by_pass.get((stage - 1 if kind == "forward" else stage + 1, microbatch, kind))
        assert before is None or before.stop_s <= item.start_s
        assert kind == "forward" or by_pass[stage, microbatch, "forward"].stop_s <= item.start_s
    for rank in range(layout.pp):
        passes = sorted((item.start_s, item.stop_s) for item in operations if item.rank == rank)
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(passes))


@given(layouts(), st.integers(0, 1))
def test_the_step_of_equal_ranks_takes_as_long_as_its_bubble_says(layout: Layout, repeated: int) -> None:
    if repeated and layout.schedule == "dualpipev":  # longer by up to a half, as its pairs are not of equal length
        return
    times = [pipeline.PassTimes(1.0, 2.0 + repeated, 1.0)] * layout.pp
    end_s = max(item.stop_s for item in pipeline.build_timeline(layout, times, layout.microbatches))
    assert end_s == pytest.approx(layout.microbatches * (3.0 + repeated) + pipeline.bubble_s(times, layout))


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_bubbles_are_the_published_ones(pp: int) -> None:
    forward_s, inputs_s, weights_s = 1.0, 1.0, 1.0
    times = [pipeline.PassTimes(forward_s, inputs_s + weights_s, weights_s)] * pp

    def bubble(schedule: Schedule, chunks: int) -> float:
        return pipeline.bubble_s(times, layout_of(schedule, pp, chunks, 4 * pp))

    assert bubble("1f1b", 1) == pytest.approx((pp - 1) * (forward_s + inputs_s + weights_s))
    assert bubble("zero_bubble", 1) == pytest.approx((pp - 1) * (forward_s + inputs_s - weights_s))  # ZB-H1
    # DualPipe's table has (stages / 2 - 1) (F&B + B - 3 W) for stages of half a rank, where F&B is a forward pass
    # beside a backward pass: as long as the backward pass alone if all of the forward pass is hidden.
    backward_s = inputs_s + weights_s
    published = (pp - 1) * (backward_s + backward_s - 3 * weights_s) / 2
    assert bubble("dualpipev", 2) == pytest.approx(published)
    # arXiv 2405.15362: half and two thirds of 1F1B's, beside a constant.
    for schedule, share in (("v_half", 1 / 2), ("v_min", 2 / 3)) if pp > 2 else ():
        assert bubble(schedule, 2) == pytest.approx(share * bubble("1f1b", 1), abs=1.5)


@pytest.mark.parametrize("pp", [4, 8, 16])
def test_v_min_waits_in_each_micro_batch_where_its_passes_are_not_equal(pp: int) -> None:
    """A micro-batch takes six of the longest passes, as in the code of Primus, which publishes 0.80 of 1F1B's rate."""
    layout, times = layout_of("v_min", pp, 2, 20 * pp), [pipeline.PassTimes(2.0, 4.0, 1.2)] * pp  # 1, 1.4 and 0.6
    rounds = [pipeline.bubble_s(times, replace(layout, global_batch=count * pp)) for count in (20, 19)]
    assert rounds[0] - rounds[1] == pytest.approx(pp * 6 * (1.4 - 1))


@given(layouts())
def test_a_rank_holds_no_more_micro_batches_than_its_memory_is_estimated_for(layout: Layout) -> None:
    for rank in range(layout.pp):
        held = most = 0
        actions = pipeline.list_actions(layout.schedule, rank, layout.pp, layout.stages_per_rank, layout.microbatches)
        for action in actions:
            held += {"forward": 1, "backward_weight": 0}.get(action.kind, -1)
            most = max(most, held)
        assert most / layout.stages_per_rank <= pipeline.in_flight(rank, layout)


@given(layouts())
def test_the_order_is_that_of_pytorch(layout: Layout) -> None:
    if layout.stages_per_rank == 1 or layout.schedule not in SCHEDULES:  # of which PyTorch writes no list
        return
    rounds = max(1, layout.microbatches // layout.pp)
    stages = layout.pp * layout.stages_per_rank
    schedule = SimpleNamespace(
        pp_group_size=layout.pp,
        n_local_stages=layout.stages_per_rank,
        number_of_rounds=rounds,
        microbatches_per_round=layout.microbatches // rounds,
        num_stages=stages,
        _num_stages=stages,
        _n_microbatches=layout.microbatches,
    )
    for rank in range(layout.pp):
        theirs = SCHEDULES[layout.schedule]._calculate_single_rank_operations(schedule, rank)
        passes = [part for action in theirs if action is not None for part in action.sub_actions or (action,)]
        ours = pipeline.list_actions(layout.schedule, rank, layout.pp, layout.stages_per_rank, layout.microbatches)
        own_stages = layout.list_stages(rank)
        assert [(own_stages[action.chunk], action.kind, action.microbatch) for action in ours] == [
            (part.stage_index, KINDS[part.computation_type.name], part.microbatch_index) for part in passes
        ]


@pytest.mark.parametrize("is_gathered_again", [False, True])  # data parallel communication in each micro-batch
def test_the_slowest_rank_takes_the_seconds_of_the_estimate(is_gathered_again: bool) -> None:
    layers: dict[str, Any] = {"sharding": "zero1", "reshard_after_forward": False}
    if is_gathered_again:
        layers = {
            "sharding": "fsdp2",
            "reshard_after_forward": True,
            "first_stage_less_layers": 8,
            "last_stage_less_layers": 8,
        }
    work = job("llama3_70b", pp=4, dp_shard=16, tp=1, global_batch=256, trainer="megatron", **layers)
    target = cluster(64)
    placed, step = PlacedJob(work, target), estimate_job(work, target).step
    busy_s = step.total_s - step.bubble - step.pipeline - step.optimizer - step.data_parallel
    if is_gathered_again:  # of the second rank, which has neither embedding nor head
        block = _block_time(placed, 0, find_efficiency(work.trainer, target.device.name), with_data_parallel=True)
        busy_s += 24 * block.data * work.layout.microbatches
    slowest_s = max(times.total for times in rank_seconds(work, target))
    assert slowest_s * work.layout.microbatches == pytest.approx(busy_s)


@pytest.mark.parametrize(("schedule", "microbatches"), [("dualpipev", 4), ("zero_bubble", 9)])
def test_schedules_that_pytorch_does_not_fill_are_refused(schedule: Schedule, microbatches: int) -> None:
    layout = {"pp": 4, "dp_shard": 1, "stages_per_rank": 2, "schedule": schedule, "global_batch": microbatches}
    work = job("llama3_70b", trainer="torchtitan", state="bf16", **layout)
    violation = find_violation(work, cluster(4))
    assert violation is not None and violation.reason.startswith(f"schedule {schedule} needs")
    fitting = replace(work, layout=replace(work.layout, global_batch=8))
    assert find_violation(fitting, cluster(4)) is None
