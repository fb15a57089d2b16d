"""Comparing nodes by their trials: no node is blamed for the effect of parameters or of chance."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.common.trials import Remeasurement, TrialStatus
from sweeper.execution.node_health import (
    SLOW_MEASUREMENTS,
    ComparisonRound,
    NodeObservation,
    find_failing_nodes,
    find_last_round,
)

NODES = ["a", "b", "c"]
COMPLETE, FAILED = TrialStatus.COMPLETE, TrialStatus.FAILED


def observation(node: str, point: int, status: TrialStatus = COMPLETE, at_s: float | None = None) -> NodeObservation:
    started_s = float(10 * point) if at_s is None else at_s
    return NodeObservation(tuple(node.split()), f"x={point}", status, started_s, started_s + 9)


def alternating(count: int, failing_node: str) -> list[NodeObservation]:
    """Trials on all nodes in rotation, of which those on one node fail."""
    nodes = [NODES[n % 3] for n in range(count)]
    return [observation(node, n, FAILED if node == failing_node else COMPLETE) for n, node in enumerate(nodes)]


def failing_nodes(observations: list[NodeObservation]) -> dict[str, str]:
    return find_failing_nodes(observations, NODES, NODES)


def test_only_the_node_whose_trials_fail_is_returned() -> None:
    assert failing_nodes(alternating(9, "b")) == {}  # 3 of 3 against 0 of 6 may be chance
    assert failing_nodes(alternating(15, "b")) == {"b": "5 of its last 5 trials failed, 0 of 10 elsewhere"}


def test_a_node_that_fails_after_a_long_good_time_is_returned() -> None:
    complete = [observation(NODES[n % 3], n) for n in range(60)]
    assert failing_nodes([*complete, *(observation("c", 100 + n, FAILED) for n in range(10))]).keys() == {"c"}


def test_trials_lost_at_the_same_time_count_once() -> None:
    complete = [observation(NODES[n % 2], n) for n in range(100)]
    lost_together = [observation("c", 200 + n, TrialStatus.LOST, at_s=2000 + n / 10) for n in range(8)]
    assert failing_nodes([*complete, *lost_together]) == {}
    lost_one_by_one = [observation("c", 200 + n, TrialStatus.LOST) for n in range(8)]
    assert failing_nodes([*complete, *lost_one_by_one]).keys() == {"c"}


def test_a_point_that_fails_on_several_nodes_is_not_counted() -> None:
    complete = [observation(NODES[n % 3], n) for n in range(100)]
    failures = [(200 + n, 2000.0 + 10 * n) for n in range(8)]
    on_c = [observation("c", point, FAILED, at_s) for point, at_s in failures]
    on_a = [observation("a", point, FAILED, 3000 + at_s) for point, at_s in failures]
    assert failing_nodes([*complete, *on_c]).keys() == {"c"}
    assert failing_nodes([*complete, *on_c, *on_a]) == {}
    one_point_repeated = [observation("c", 200, FAILED, 2000 + 10 * n) for n in range(8)]
    assert failing_nodes([*complete, *one_point_repeated]) == {}


def test_no_node_is_returned_if_no_trial_ended_well_elsewhere() -> None:
    assert failing_nodes([observation(NODES[n % 3], n, FAILED) for n in range(60)]) == {}
    assert failing_nodes([observation("a", n, FAILED) for n in range(60)]) == {}


def test_a_failure_counts_for_every_node_of_a_gang() -> None:
    complete = [observation("c", n) for n in range(40)]
    assert failing_nodes([*complete, *(observation("a b", 100 + n, FAILED) for n in range(5))]).keys() == {"a", "b"}


def test_equally_unreliable_nodes_are_almost_never_returned() -> None:
    """With a check after every failure, which is often, 4 of 200 sweeps of 300 trials blame a node."""

    def blames_a_node(seed: int) -> bool:
        rng = random.Random(seed)
        observations: list[NodeObservation] = []
        failure_rate = rng.random()
        nodes = [f"n{n}" for n in range(rng.randint(2, 12))]
        for point in range(200):
            node = rng.choice(nodes)
            observations.append(observation(node, point, FAILED if rng.random() < failure_rate else COMPLETE))
            if observations[-1].status is FAILED and find_failing_nodes(observations, nodes, [node]):
                return True
        return False

    assert sum(blames_a_node(seed) for seed in range(40)) <= 2


def round_of(values: dict[str, list[float | None]]) -> ComparisonRound:
    return ComparisonRound(7, 1, values)


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_a_slow_node_is_measured_again_and_returned_when_every_measurement_is_slow(direction: str) -> None:
    def round_with_c(*rates_of_c: float) -> ComparisonRound:
        rates = {"a": [100.0], "b": [101.0], "c": list(rates_of_c)}
        if direction == "minimize":
            rates = {node: [1e4 / rate for rate in node_rates] for node, node_rates in rates.items()}
        return round_of(rates)

    assert round_with_c().select_nodes(NODES, 0.9, direction) == ["c"]
    assert round_with_c(99.0).select_nodes(NODES, 0.9, direction) == []
    for measured in range(1, SLOW_MEASUREMENTS):
        slow = round_with_c(*[80.0] * measured)
        assert slow.select_nodes(NODES, 0.9, direction) == ["c"] and slow.find_slow_nodes(NODES, 0.9, direction) == {}
    reasons = round_with_c(80.0, 81.0, 79.0).find_slow_nodes(NODES, 0.9, direction)
    assert reasons == {"c": "trial 7 reached 0.80 of the other nodes' median in 3 measurements"}
    assert round_with_c(80.0, 99.0).select_nodes(NODES, 0.9, direction) == []  # the slow one was an outlier
    assert round_with_c(80.0, 99.0, 80.0).find_slow_nodes(NODES, 0.9, direction) == {}


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.floats(0.91, 1.0), min_size=3, max_size=5), min_size=2))
def test_nodes_within_the_threshold_of_each_other_are_not_slow(values: dict[str, list[float | None]]) -> None:
    assert round_of(values).find_slow_nodes(sorted(values), 0.9, "maximize") == {}


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6), st.floats(0.01, 100))
def test_the_fastest_node_is_never_slow_in_any_unit(speeds: list[float], unit: float) -> None:
    values = {f"n{n}": [unit * speed] * 3 for n, speed in enumerate(speeds)}
    slow = round_of(values).find_slow_nodes(list(values), 0.9, "maximize")  # type: ignore[arg-type]
    assert f"n{speeds.index(max(speeds))}" not in slow


@pytest.mark.parametrize("values", [{"a": [0.0], "b": [1.0]}, {"a": [-1.0], "b": [1.0]}, {"a": [1.0]}, {"a": [None]}])
def test_values_without_a_ratio_are_not_compared(values: dict[str, list[float | None]]) -> None:
    assert round_of(values).compute_ratios(NODES, "maximize") == {}


def test_a_comparison_that_failed_is_not_repeated() -> None:
    assert round_of({"a": [1.0], "b": [None], "c": [1.0]}).select_nodes(NODES, 0.9, "maximize") == []


def test_the_last_round_has_only_its_own_measurements() -> None:
    def comparison(node: str, number: int, value: float) -> NodeObservation:
        return NodeObservation((node,), "x=1", COMPLETE, 0, 1, value, Remeasurement(4 + number, number, ()))

    final = NodeObservation(("a",), "x=1", COMPLETE, 0, 1, 9.0, Remeasurement(5, 9, (5, 6)))
    comparisons = [comparison("a", 1, 1.0), comparison("a", 2, 2.0), comparison("b", 2, 3.0)]
    last_round = find_last_round([*comparisons, final, observation("a", 3)])
    assert last_round == ComparisonRound(6, 2, {"a": [2.0], "b": [3.0]})
    assert find_last_round([final]) is None
