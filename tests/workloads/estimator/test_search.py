"""The search finds the layouts that an estimate of all layouts would find."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.conftest import examples
from tests.support.planner import LLAMA_8B, cluster, flatten, job
from workloads.estimator import search
from workloads.estimator.estimate import JobEstimate, StageMemory, StepTime, find_band
from workloads.estimator.search import SearchResult
from workloads.estimator.step import step_bound_s
from workloads.hardware.cluster import Cluster
from workloads.layouts.enumeration import divisors, list_families
from workloads.layouts.layout import Job, Layout, Schedule
from workloads.layouts.rules import find_violation

OPTIONS: Mapping[str, Sequence[Any]] = {
    "schedule": ["1f1b", "interleaved"],
    "sharding": ["fsdp2"],
    "checkpointing": ["none", "full"],
    "reshard_after_forward": [False, True],
}


def toy_estimate(seed: int, job: Job, cluster: Cluster) -> JobEstimate:
    """Return an arbitrary time and memory: slower and smaller with checkpointing, larger with larger micro-batches."""
    layout = job.layout
    digits = (layout.dp * 7 + layout.tp * 13 + layout.pp * 29 + seed) % 101
    saved = 2 * (layout.checkpointing == "full") + layout.reshard_after_forward
    needed_gib = 20 + digits + 20 * layout.micro_batch + 9 * layout.dp_replicate - 15 * saved
    memory = StageMemory(needed_gib, *[0.0] * 6, reserved=needed_gib / 10)
    step = StepTime(1 + digits / 100 + saved / 5, 0, 0, 0, data_parallel=layout.dp_shard % 5 / 10)
    return JobEstimate(step, (memory,), 1, 1.0, 989, cluster.gpus)


def find_by(estimate: Callable[[Job, Cluster], JobEstimate], template: Job, target: Cluster, keep: int) -> SearchResult:
    """Return the layouts that a search by this estimate finds."""

    def bound_s(job: Job, cluster: Cluster, *, any_stages: int) -> float:
        step = estimate(replace(job, layout=replace(job.layout, reshard_after_forward=False)), cluster).step
        return step.total_s - step.data_parallel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "estimate_job", estimate)
        patch.setattr(search, "step_seconds", lambda job, cluster: estimate(job, cluster).step.total_s)
        patch.setattr(search, "step_bound_s", bound_s)
        patch.setattr(search, "peak_memory", lambda job, cluster: estimate(job, cluster).memory)
        return search.find_layouts(template, target, OPTIONS, {}, keep)


def all_layouts(gpus: int, batch: int, fixed: Mapping[str, Any]) -> list[Layout]:
    template = job(Layout(global_batch=batch))
    families = list(list_families(template, cluster(gpus), OPTIONS, fixed))
    assert sum(map(len, families)) == len(flatten(families))
    return flatten(families)


@examples(4)
@given(st.sampled_from([1, 6, 8]), st.integers(1, 3))
def test_every_layout_is_valid_and_none_is_repeated(gpus: int, multiple: int) -> None:
    layouts = all_layouts(gpus, multiple * gpus, {})
    assert layouts and max(Counter(layouts).values()) == 1
    for layout in layouts:
        assert find_violation(job(layout), cluster(gpus)) is None


def test_all_degrees_that_the_number_of_gpus_allows_are_listed() -> None:
    layouts = all_layouts(72, 72, {})
    assert {layout.dp_shard for layout in layouts} == set(divisors(72))
    assert {layout.tp for layout in layouts} == {1, 2, 4, 8}  # what divides heads and 72, within a node of 8
    assert {layout.pp for layout in layouts} >= {1, 2, 3, 4, 6, 8, 9, 12, 18, 24}
    assert {layout.cp for layout in layouts} >= {1, 2, 4, 8}


@pytest.mark.parametrize(
    "fixed", [{"tp": 4}, {"dp_replicate": 2, "pp": 1}, {"checkpointing": "full"}, {"micro_batch": 2, "tp": 2}]
)
def test_fixed_fields_have_one_value(fixed: Mapping[str, Any]) -> None:
    layouts = all_layouts(8, 16, fixed)
    assert layouts and all(getattr(layout, name) == value for layout in layouts for name, value in fixed.items())
    others = [layout for layout in all_layouts(8, 16, {}) if all(getattr(layout, n) == v for n, v in fixed.items())]
    assert Counter(others) == Counter(layouts)


@examples(8)
@given(st.sampled_from([2, 3, 4]), st.integers(0, 100), st.integers(1, 30))
def test_the_bound_leaves_out_no_layout_that_is_among_the_best(gpus: int, seed: int, keep: int) -> None:
    template, target = job(Layout(global_batch=2 * gpus)), cluster(gpus)
    estimate = partial(toy_estimate, seed)
    result = find_by(estimate, template, target, keep)
    estimates = [estimate(replace(template, layout=layout), target) for layout in all_layouts(gpus, 2 * gpus, {})]
    for share in (find_band(template, target, "memory").ends.above, 0.0):  # no bound may fit
        fitting = [e.step.total_s for e in estimates if e.memory.needed_gib * (1 + share) <= target.usable_gib]
        if fitting:
            break
    assert [candidate.estimate.step.total_s for candidate in result.best] == sorted(fitting)[:keep]
    assert result.estimated + result.too_large + result.slower == len(estimates)


def test_what_fits_nowhere_gives_the_smallest_layout() -> None:
    def estimate(job: Job, cluster: Cluster) -> JobEstimate:
        return replace(toy_estimate(0, job, cluster), stages=(StageMemory(100.0 + job.layout.micro_batch, *[0.0] * 6),))

    result = find_by(estimate, job(Layout(global_batch=8)), cluster(4), 5)
    assert result.best == () and result.estimated == 0 and result.too_large == len(all_layouts(4, 8, {}))
    assert result.smallest is not None and result.smallest.layout.micro_batch == 1


@examples(20)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 4), st.integers(-1, 5), st.integers(0, 12), st.booleans())
def test_the_bound_of_any_stages_is_below_all_of_them(
    pp: int, stages: int, first: int, last: int, has_experts: bool
) -> None:
    experts: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "expert_intermediate_size": 2048}
    layout = Layout(pp=pp, dp_shard=8, global_batch=128)
    template = replace(job(layout, replace(LLAMA_8B, **(experts if has_experts else {}))), trainer="torchtitan")
    target = cluster(8 * pp)
    schedule: Schedule = "interleaved" if stages > 1 else "1f1b"
    divided = replace(layout, first_stage_less_layers=first, last_stage_less_layers=last)
    divided = replace(divided, schedule=schedule, stages_per_rank=stages)
    assume(find_violation(replace(template, layout=divided), target) is None)
    bound_s = step_bound_s(template, target, any_stages=stages)
    assert bound_s <= step_bound_s(replace(template, layout=divided), target) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("trainer", "layers", "ends"),
    [
        ("megatron", 94, dict.fromkeys((2, 3, 4, 6, 8, 12), (1, 1))),
        ("torchtitan", 61, {2: (0, 3), 4: (0, 3)}),
        ("megatron", 61, {}),  # 3 fewer do not divide into the stages of a rank
        ("megatron", 96, dict.fromkeys((2, 3, 4, 6, 8, 12), (0, 0))),
    ],
)
def test_interleaved_stages_may_have_fewer_layers_at_the_ends(
    trainer: str, layers: int, ends: dict[int, tuple[int, int]]
) -> None:
    template = replace(job(Layout(global_batch=64), replace(LLAMA_8B, layers=layers)), trainer=trainer)
    options: dict[str, Any] = {**OPTIONS, "schedule": ["1f1b", "interleaved"]}
    families = list_families(template, cluster(16), options, {"pp": 4, "tp": 2, "cp": 1, "micro_batch": 1})
    found = [family.template for family in families if family.template.schedule == "interleaved"]
    assert {layout.stages_per_rank: layout.less_layers for layout in found} == ends


def test_experts_bring_expert_parallel() -> None:
    model = replace(LLAMA_8B, experts=8, experts_per_token=2, expert_intermediate_size=512)
    template = replace(job(Layout(global_batch=8), model), trainer="torchtitan")
    degrees = {family.template.ep for family in list_families(template, cluster(8), OPTIONS, {"pp": 1})}
    assert degrees == {1, 2, 4, 8}
