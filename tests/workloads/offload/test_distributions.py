"""Plans of gangs: which distribution is the fastest, and how long its rounds take."""

from dataclasses import replace
from typing import get_args

import pytest

from tests.support import replay
from tests.support.offload_plans import H200, MODEL, SHAPE, SLOW_LINK, find_plan
from workloads.api.contract import Infeasible
from workloads.offload.cost_model import DeviceRates, MemoryBudget
from workloads.offload.gang import Gang
from workloads.offload.plan import GIB, Distribution
from workloads.offload.plan_search import find_fastest_plan, find_fastest_plans

NVLINK = replace(H200, link_s_per_byte=1 / 350e9)
THROUGH_HOST = replace(H200, link_s_per_byte=H200.h2d_s_per_byte, links_are_the_hosts=True)


@pytest.mark.parametrize(
    ("rates", "gpus", "device_gib", "fastest"),
    [(NVLINK, 4, 16, "sharded"), (NVLINK, 8, 20, "sharded"), (THROUGH_HOST, 2, 30, "replicas")],
)
def test_the_fastest_distribution_depends_on_gpus_links_and_memory(
    rates: DeviceRates, gpus: int, device_gib: float, fastest: str
) -> None:
    budget, step_s = [MemoryBudget(device_gib, 12.0 * gpus)], dict[str, float]()
    for distribution in get_args(Distribution):
        model = MODEL.distribute(distribution, gpus)
        (found,) = find_fastest_plans(model, 8192, 32, budget, rates)
        assert found is not None
        step_s[distribution] = found.times.step_s
    assert min(step_s, key=step_s.__getitem__) == fastest


@pytest.mark.parametrize(("peer_copy_s_per_byte", "sums"), [(0.0, 3 / 2 / 3), (1 / 350e9, 4 / 2 / 3)])
def test_shares_of_gradients_are_added_in_each_round(peer_copy_s_per_byte: float, sums: float) -> None:
    sum_s_per_byte, budget = 7e-13, [MemoryBudget(130, 24)]  # where nothing waits for copies
    rates = replace(NVLINK, peer_copy_s_per_byte=peer_copy_s_per_byte)
    without, found = (
        find_fastest_plans(MODEL.distribute("sharded", 2), 8192, 8, budget, each)[0]
        for each in (rates, replace(rates, sum_s_per_byte=sum_s_per_byte))
    )
    assert without is not None and found is not None and found.plan == without.plan
    layers = found.plan.accumulation_rounds * MODEL.shape.layers
    expected_s = layers * sums * MODEL.layer_weight_bytes * sum_s_per_byte
    assert found.times.step_s - without.times.step_s == pytest.approx(expected_s)


@pytest.mark.parametrize("distribution", get_args(Distribution))
def test_gangs_take_as_long_as_predicted(distribution: Distribution, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = find_fastest_plans(MODEL.distribute(distribution, 2), 8192, 8, [MemoryBudget(16, 24)], NVLINK)
    assert found is not None
    gang = Gang(distribution, ranks=2)
    one_step_s, two_steps_s = (
        replay.simulate_steps_s(SHAPE, found.plan, NVLINK, monkeypatch, steps, gang) for steps in (1, 2)
    )
    assert 0.96 < (two_steps_s - one_step_s) / found.times.step_s <= 1.015


def test_gpus_share_the_hosts_memory_and_shards_need_the_least_of_it() -> None:
    """Two replicas of 8 layers keep their whole state twice."""
    budget, sizes = MemoryBudget(14, 24), (MODEL.distribute("replicas", 2), MODEL.distribute("sharded", 2))
    replicas, sharded = (find_fastest_plans(model, 8192, 32, [budget], NVLINK)[0] for model in sizes)
    assert replicas is None and sharded is not None and sharded.host_bytes <= 12 * GIB
    with pytest.raises(Infeasible, match=r"at least [\d.]+ GiB more needed on each of 2 GPUs \(device "):
        find_fastest_plan(sizes[0], 8192, 32, budget, NVLINK)
    with pytest.raises(Infeasible, match="31 sequences cannot be divided among 2 GPUs"):
        find_fastest_plan(sizes[1], 8192, 31, budget, NVLINK)
    with pytest.raises(Infeasible, match="layers cannot be divided among 16 GPUs"):
        find_fastest_plan(MODEL.distribute("ring", 16), 8192, 32, budget, NVLINK)


def test_a_ring_of_few_chunks_waits_for_its_first_and_last_gpu() -> None:
    """With 32 chunks 4 GPUs wait for 3 of them in each round; with 4 chunks for as many as they compute, nearly."""
    many, few = (
        find_fastest_plans(MODEL.distribute("ring", 4), 8192, chunks, [MemoryBudget(60, 200)], NVLINK)[0]
        for chunks in (32, 4)
    )
    assert many is not None and few is not None
    assert 1.3 < (few.times.step_s / 4) / (many.times.step_s / 32) < 1.75


def test_slower_copies_make_rounds_of_more_tokens() -> None:
    """Layers are copied in every round, so with a link ten times slower a step has fewer rounds of more tokens."""
    fast, slow = (find_plan(16, 200, 32, rates).plan for rates in (H200, SLOW_LINK))
    assert slow.accumulation_rounds < fast.accumulation_rounds
    assert slow.chunks_per_round * slow.chunk_tokens > fast.chunks_per_round * fast.chunk_tokens
    assert slow.tokens_per_step == fast.tokens_per_step == 32 * 8192
