"""Dominance between the points of a front: laws, and how often verdicts on simulated rounds are wrong."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sweeper.search.front import find_dominated, p_values_of_dominance
from tests.conftest import examples


@examples(50)
@example(means=[[0, 0, 0], [0, 3, 5], [0, 6, 2]], resolution=2.9999999999999996)  # 5 - 2 is rounded to the resolution
@given(
    st.lists(st.lists(st.integers(0, 6).map(float), min_size=3, max_size=3), min_size=1, max_size=6), st.floats(0, 3)
)
def test_a_point_is_left_that_none_dominates(means: list[list[float]], resolution: float) -> None:
    """Also where three points would dominate each other in a circle."""
    beats = find_dominated(np.array(means), np.full(3, resolution))
    assert not beats.any(axis=0).all()
    assert not (beats & beats.T).any()  # no two dominate each other


def test_a_circle_of_differences_about_the_resolution_is_broken() -> None:
    circle = np.array([[0.0, 1.1, 0.6], [1.1, 0.5, 0.0], [0.5, 0.0, 1.1]])
    assert not find_dominated(circle, np.ones(3)).any(axis=0).all()


@examples(20)
@given(st.integers(2, 5), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_hypotheses_and_their_opposites_are_not_both_refuted(points: int, objectives: int, seed: int) -> None:
    losses = np.random.default_rng(seed).standard_normal((points, objectives, 3))
    dominates, does_not = p_values_of_dominance(losses, np.full(objectives, 1e-3))
    assert ((dominates >= 0) & (dominates <= 1) & (does_not >= 0) & (does_not <= 1)).all()
    assert (np.maximum(dominates, does_not) >= 0.5)[~np.eye(points, dtype=bool)].all()


def simulate(
    points: int,
    behind: float,
    *,
    rounds: int,
    objectives: int = 2,
    noise: float = 0.01,
    last: float = 0.01,
    exact: float = 0,
) -> tuple[float, float, float]:
    """Return how often a front has a wrong "on the front", a wrong "dominated", and a point's right "dominated".

    The first point dominates the others, which are behind by so much in every objective. Rounds have `noise`, those of
    the last point `last`, and a drift of 2% that all share. With `exact` one more objective has no noise, in which the
    others are better by so much.
    """
    random, count = np.random.default_rng(7), 400
    wrong_front, wrong_dominated, right = 0, 0, 0.0
    deviations = np.full(points, noise)
    deviations[-1] = last
    for _ in range(count):
        losses = deviations[:, None, None] * random.standard_normal((points, objectives, rounds))
        losses += 0.02 * random.standard_normal(rounds)
        losses[1:] += behind
        if exact:
            losses = np.concatenate([losses, np.zeros((points, 1, rounds))], axis=1)
            losses[1:, -1] -= exact
        dominates, does_not = p_values_of_dominance(losses, np.full(losses.shape[1], 1e-3))
        on_front = dominates.max(axis=0) <= 0.05 / (points - 1)
        dominated = does_not.min(axis=0) <= 0.05 / (points * (points - 1))
        wrong_front += on_front[1:].any()
        wrong_dominated += dominated[0]
        right += dominated[1:].mean()
    return wrong_front / count, wrong_dominated / count, right / count


@pytest.mark.parametrize("objectives", [2, 3])
@pytest.mark.parametrize("rounds", [3, 5])
@pytest.mark.parametrize("points", [2, 12])
def test_verdicts_are_wrong_in_few_fronts(points: int, rounds: int, objectives: int) -> None:
    """Also of points that are behind by little, and where one of them is noisier than the others."""
    for last in (0.01, 0.03):
        on_front, dominated, _ = simulate(points, 0.002, rounds=rounds, objectives=objectives, last=last)
        assert on_front <= 0.083 and dominated <= 0.083  # 5%, and three deviations of 400 simulations


def test_equal_points_are_dominated_in_few_fronts() -> None:
    assert simulate(6, 0.0, rounds=3)[1] <= 0.083


def test_a_point_that_is_behind_by_three_times_the_noise_is_found_with_five_rounds() -> None:
    assert simulate(2, 0.03, rounds=5)[2] >= 0.8 and simulate(12, 0.03, rounds=5)[2] >= 0.5
    assert simulate(12, 0.03, rounds=3, noise=0.003, last=0.003)[2] > 0.99


def test_a_difference_above_the_resolution_counts_however_noisy_the_other_objectives_are() -> None:
    on_front, _, dominated = simulate(2, 0.03, rounds=3, exact=0.02)
    assert on_front == 1.0 and dominated == 0.0


def test_a_difference_within_the_resolution_counts_for_nothing() -> None:
    on_front, _, dominated = simulate(2, 0.03, rounds=5, exact=5e-4)
    assert on_front == 0.0 and dominated >= 0.8
