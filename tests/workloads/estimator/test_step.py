"""Laws that every estimate has to obey."""

import pytest

from tests.support.planner_estimates import cluster, job
from workloads.estimator.estimate import JobEstimate
from workloads.estimator.step import estimate_job
from workloads.layouts.layout import Job


def estimate(work: Job, **topology: float) -> JobEstimate:
    return estimate_job(work, cluster(work.layout.gpus, **topology))


def test_the_parts_add_up_and_the_tokens_are_those_of_the_batch() -> None:
    result = estimate(job())
    assert result.tokens == 64 * 8192
    assert result.step.total_s == pytest.approx(sum(vars(result.step).values()))
    assert 0.3 < (result.mfu or 0) < 0.7


@pytest.mark.parametrize("part", ["tensor_parallel", "context_parallel", "expert_parallel", "pipeline", "bubble"])
def test_a_degree_of_one_costs_nothing(part: str) -> None:
    assert getattr(estimate(job()).step, part) == 0


def test_one_gpu_has_no_communication() -> None:
    step = estimate(job(dp_shard=1)).step
    assert step.data_parallel == 0


@pytest.mark.parametrize("layout", [{"tp": 8, "dp_shard": 8}, {"pp": 4, "dp_shard": 16}, {"dp_shard": 64}])
def test_more_bandwidth_is_never_slower(layout: dict[str, int]) -> None:
    work = job("llama3_70b", **layout)
    for key in ("link_gb_s", "network_gb_s"):
        slow, fast = (estimate(work, **{key: gb_s}).step.total_s for gb_s in (20.0, 40.0))
        assert fast <= slow


def test_more_data_parallel_ranks_do_not_gain_tokens_per_gpu() -> None:
    replicas = [job(dp_shard=8, dp_replicate=n, global_batch=64 * n) for n in (1, 8, 64, 512)]
    rates = [estimate(each).tokens_per_s_per_gpu for each in replicas]
    assert rates == sorted(rates, reverse=True)


def test_memory_falls_with_sharding() -> None:
    sizes = [estimate(job(sharding=kind)).memory.total_gib for kind in ("none", "zero1", "fsdp2")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    shards = [estimate(job(dp_shard=n)).memory.total_gib for n in (2, 8, 64)]
    assert shards == sorted(shards, reverse=True) and shards[0] > shards[-1]


def test_recomputation_costs_time_and_saves_memory() -> None:
    kept, full = estimate(job()), estimate(job(checkpointing="full"))
    assert full.step.total_s > kept.step.total_s
    assert full.memory.activations < kept.memory.activations


def test_interleaving_shortens_the_bubble() -> None:
    plain = estimate(job(pp=4, dp_shard=2))
    interleaved = estimate(job(pp=4, dp_shard=2, stages_per_rank=4, schedule="interleaved"))
    assert interleaved.step.bubble < plain.step.bubble
