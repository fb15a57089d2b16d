"""Energy and money from what devices drew: laws that hold for any figures, and figures done by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.metrics.derivation import Prices, cost_metrics, derive, energy_metrics
from workloads.api.contract import Energy, Measurement

positive = st.floats(1e-3, 1e6)
energies = st.builds(Energy, joules=positive, seconds=positive, steps=st.floats(1, 1e4), source=st.just("counter"))
ranks = st.builds(
    Measurement,
    executed=st.just({}),
    step_times_s=st.just((1.0,)),
    flops_per_step=st.floats(1e9, 1e18),
    tokens_per_step=st.integers(1, 10**7),
    energy=energies,
)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


@given(st.lists(ranks, min_size=1, max_size=5))
def test_the_energy_of_a_gang_is_the_sum_over_its_ranks(gang: list[Measurement]) -> None:
    metrics = energy_metrics(gang, len(gang))
    alone = [energy_metrics([rank], 1) for rank in gang]
    assert metrics["joules_per_token"] * metrics["tokens_per_joule"] == close(1)
    for name in ("joules_per_step", "average_power_w"):
        assert metrics[name] == close(sum(rank[name] for rank in alone))
    assert metrics["joules_per_token"] * sum(rank.tokens_per_step for rank in gang) == close(metrics["joules_per_step"])
    assert metrics["tflop_per_joule"] * metrics["joules_per_step"] == close(
        sum(rank.flops_per_step for rank in gang) / 1e12
    )
    if len(gang) > 1:
        assert metrics["average_power_w_per_gpu"] * len(gang) == close(metrics["average_power_w"])


@given(ranks, st.integers(2, 100))
def test_a_longer_window_of_the_same_steps_says_the_same(rank: Measurement, times: int) -> None:
    assert rank.energy
    energy = replace(
        rank.energy,
        joules=times * rank.energy.joules,
        seconds=times * rank.energy.seconds,
        steps=times * rank.energy.steps,
    )
    longer = energy_metrics([replace(rank, energy=energy)], 1)
    assert longer == pytest.approx(energy_metrics([rank], 1))


def test_a_rank_without_energy_leaves_the_gang_without_it() -> None:
    energy = Energy(100.0, 1.0, 10, "counter")
    rank = Measurement(executed={}, step_times_s=(0.1,) * 10, tokens_per_step=20, energy=energy)
    assert derive([rank, rank], {})["joules_per_token"] == 0.5
    for missing in (None, Energy(missing="too short")):
        assert "joules_per_token" not in derive([rank, replace(rank, energy=missing)], {})


def test_a_measurement_of_the_gang_has_the_energy_of_all_its_devices() -> None:
    energy = Energy(5000.0, 10.0, 10, "counter")
    idle = Measurement(executed={}, step_times_s=(), of_gang=True)
    metrics = derive([replace(idle, step_times_s=(1.0,), tokens_per_step=1000, energy=energy), idle], {})
    assert (metrics["average_power_w"], metrics["average_power_w_per_gpu"]) == (500, 250)
    assert metrics["joules_per_token"] == 0.5


def test_energy_that_is_not_a_positive_number_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Energy(joules=0.0, seconds=1.0, steps=1, source="counter")


@given(st.floats(1.0, 1e6), st.floats(1e-3, 1e3), st.integers(1, 64), st.floats(0, 100), st.floats(0, 10))
def test_costs_of_devices_and_of_electricity_add_up(
    tokens_per_s: float, joules_per_token: float, gpus: int, per_hour: float, per_kwh: float
) -> None:
    metrics = {"tokens_per_s": tokens_per_s, "joules_per_token": joules_per_token}
    costs = [
        cost_metrics(metrics, gpus, prices)["cost_per_million_tokens"]
        for prices in (Prices(per_hour, per_kwh), Prices(per_hour, None), Prices(None, per_kwh))
    ]
    assert costs[0] == pytest.approx(costs[1] + costs[2])


def test_the_cost_of_tokens_by_hand() -> None:
    """Two GPUs at 3 an hour train on 1,000 tokens/s and draw 720 W each: 1.667 for their time, 0.08 for 0.4 kWh."""
    metrics = {"tokens_per_s": 1000.0, "joules_per_token": 1.44}
    assert cost_metrics(metrics, 2, Prices(3.0, 0.2))["cost_per_million_tokens"] == pytest.approx(1.6667 + 0.08, 1e-4)
    assert cost_metrics({"tokens_per_s": 1000.0}, 2, Prices(3.0, None))
    assert cost_metrics({"tokens_per_s": 1000.0}, 2, Prices(3.0, 0.2)) == {}  # half a cost would mislead
    assert cost_metrics(metrics, 2, Prices()) == {} == cost_metrics({}, 2, Prices(3.0))
