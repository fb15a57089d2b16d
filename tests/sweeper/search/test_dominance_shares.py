"""Shares of the points of a front: properties of the draws, and how often verdicts on simulated rounds are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sweeper.metrics.intervals import student_interval
from sweeper.search.front import draw_means, find_dominated, share_points
from tests.conftest import examples

FINE = np.array([1e-3, 1e-3])
NONE = np.zeros(2)
cells = st.integers(0, 3).map(float)
arrays = st.integers(1, 5).flatmap(
    lambda points: st.lists(st.lists(st.lists(cells, min_size=4, max_size=4), min_size=2, max_size=2), min_size=points)
)


@examples(30)
@given(arrays.map(lambda rows: np.array(rows[:5])))
def test_shares_are_shares_and_a_dominated_point_changes_none(losses: np.ndarray) -> None:
    undominated, beaten = share_points(losses, NONE)
    assert all(0 <= share <= 1 for share in undominated) and undominated.sum() >= 1 - 1e-9
    assert not beaten.diagonal().any()
    worse = losses[:1] + 1.0  # in every round and objective
    shares, beaten = share_points(np.concatenate([losses, worse]), NONE)
    assert (shares[:-1] == undominated).all() and shares[-1] == 0.0 and beaten[0, -1] == 1.0


@examples(50)
@example(means=[[0, 0, 0], [0, 3, 5], [0, 6, 2]], resolution=2.9999999999999996)  # 5 - 2 is rounded to the resolution
@given(
    st.lists(st.lists(st.integers(0, 6).map(float), min_size=3, max_size=3), min_size=1, max_size=6),
    st.floats(0, 3),
)
def test_every_draw_leaves_a_point_that_none_dominates(means: list[list[float]], resolution: float) -> None:
    """Also where three points would dominate each other in a circle."""
    beats = find_dominated(np.array(means)[:, :, None], np.full(3, resolution))
    assert not beats.any(axis=0).all()
    assert not (beats & beats.transpose(1, 0, 2)).any()  # no two dominate each other


def test_a_circle_of_differences_about_the_resolution_is_broken() -> None:
    circle = np.array([[0.0, 1.1, 0.6], [1.1, 0.5, 0.0], [0.5, 0.0, 1.1]])
    assert not find_dominated(circle[:, :, None], np.ones(3)).any(axis=0).all()


def test_drawn_differences_follow_students_distribution() -> None:
    """Of noisy rounds with a common drift, the draws between the 2.5th and 97.5th percentile are Student's interval."""
    noise = np.random.default_rng(1)
    rounds = noise.standard_normal((2, 1, 5)) + 30 * noise.standard_normal(5)
    means = draw_means(rounds)
    low, high = np.percentile(means[0, 0] - means[1, 0], [2.5, 97.5])
    interval = student_interval(rounds[0, 0] - rounds[1, 0])
    assert (low, high) == pytest.approx((interval.low, interval.high), rel=0.12)


def verdicts(behind: float, *, rounds: int, others: int = 1, fewer_bytes: float = 0.0) -> tuple[float, float]:
    """Return how often the last point is called dominated and on the front, of 400 simulated fronts.

    The others are equal. It is behind by so much in the first objective, whose rounds have a noise of 1% and a drift of
    2% that all share, and better by `fewer_bytes` in the second, which has none.
    """
    noise, dominated, on_front = np.random.default_rng(7), 0, 0
    for _ in range(400):
        losses = np.zeros((others + 1, 2, rounds))
        losses[:, 0] = 0.01 * noise.standard_normal((others + 1, rounds)) + 0.02 * noise.standard_normal(rounds)
        losses[-1] += np.array([[behind], [-fewer_bytes]])
        undominated, beaten = share_points(losses, FINE)
        dominated += beaten[:, -1].max() >= 1 - 0.05 / others
        on_front += undominated[-1] >= 0.95
    return dominated / 400, on_front / 400


@pytest.mark.parametrize("rounds", [3, 5])
@pytest.mark.parametrize("others", [1, 5])
def test_a_point_that_is_as_good_as_the_others_is_called_dominated_in_few_fronts(rounds: int, others: int) -> None:
    dominated, _ = verdicts(0.0, rounds=rounds, others=others)
    assert dominated <= 0.075  # 5%, and three deviations of 400 simulations


@pytest.mark.parametrize("rounds", [3, 5])
def test_a_worse_point_is_called_on_the_front_in_few_fronts(rounds: int) -> None:
    for fewer_bytes in (0.0, 5e-4):  # the second objective differs by less than its resolution
        _, on_front = verdicts(0.002, rounds=rounds, fewer_bytes=fewer_bytes)
        assert on_front <= 0.085


def test_a_point_that_is_behind_by_three_times_the_noise_is_found_with_five_rounds() -> None:
    dominated, on_front = verdicts(0.03, rounds=5, fewer_bytes=5e-4)
    assert dominated >= 0.9 and on_front == 0.0


def test_a_difference_above_the_resolution_counts_however_noisy_the_other_objective_is() -> None:
    dominated, on_front = verdicts(0.03, rounds=5, fewer_bytes=0.02)
    assert dominated == 0.0 and on_front == 1.0
