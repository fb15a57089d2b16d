"""Limits of equal parts: healthy ones seldom fail, and losses as large as stated are found."""

import numpy as np
import pytest

from sweeper.metrics.outliers import Spread, limits_among, medians_of_others, set_limit

SPREAD = Spread(device=0.015, node=0.005, run=0.005, expected=0.05, worth=0.02)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_the_median_of_the_others_leaves_a_value_out(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    expected = [np.median(np.delete(values, place)) for place in range(count)]
    assert medians_of_others(values) == pytest.approx(expected)


def test_of_two_parts_the_slower_one_alone_is_below_its_limit() -> None:
    limits = limits_among([600.0, 700.0], ["a", "a"], SPREAD, comparisons=2)
    assert 600 < limits[0].lowest < 700 and limits[1].lowest < 700


def test_a_spread_that_is_larger_here_than_in_the_table_widens_the_limits() -> None:
    rates = np.exp(np.random.default_rng(0).normal(0, 0.1, 64))
    limit = limits_among(list(rates), ["a"] * 64, SPREAD, comparisons=64)[0]
    assert limit.deviation == pytest.approx(0.1, rel=0.3)


def test_a_loss_that_is_not_worth_a_failure_passes_however_small_the_spread_is() -> None:
    limit = set_limit("the baseline", 100.0, deviation=1e-6, worth=0.02, comparisons=10)
    assert limit.lowest == pytest.approx(98.0) and limit.found_loss == pytest.approx(0.02, abs=1e-4)


def test_the_stated_loss_is_found_in_99_of_100_cases() -> None:
    limit = set_limit("the others", 1.0, deviation=0.016, worth=0.02, comparisons=64)
    rates = (1 - limit.found_loss) * np.exp(np.random.default_rng(1).normal(0, 0.016, 100_000))
    assert (rates < limit.lowest).mean() == pytest.approx(0.99, abs=0.002)
