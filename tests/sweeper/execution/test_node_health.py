"""Nodes are held against each other by trials: no node is blamed for what its parameters or chance have done."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.common.trials import Remeasurement, TrialStatus
from sweeper.execution.node_health import TIMES_BEHIND, NodeObservation, Round, failing, last_round

NODES = ["a", "b", "c"]
WELL, FAILED = TrialStatus.COMPLETE, TrialStatus.FAILED


def sighting(node: str, point: int, status: TrialStatus = WELL, at_s: float | None = None) -> NodeObservation:
    began_s = float(10 * point) if at_s is None else at_s
    return NodeObservation(tuple(node.split()), f"x={point}", status, began_s, began_s + 9)


def alternating(count: int, bad: str) -> list[NodeObservation]:
    return [sighting(NODES[n % 3], n, FAILED if NODES[n % 3] == bad else WELL) for n in range(count)]


def suspects(sightings: list[NodeObservation]) -> dict[str, str]:
    return failing(sightings, NODES, NODES)


def test_a_node_that_fails_what_others_complete_is_found_soon_and_alone() -> None:
    assert suspects(alternating(9, "b")) == {}  # 3 of 3 against 0 of 6 may be chance
    assert suspects(alternating(15, "b")) == {"b": "5 of its last 5 trials failed, 0 of 10 elsewhere"}


def test_a_broken_gpu_of_a_node_that_else_works_is_found() -> None:
    well = [sighting(NODES[n % 3], n) for n in range(60)]
    assert suspects([*well, *(sighting("c", 100 + n, FAILED) for n in range(10))]).keys() == {"c"}


def test_trials_that_were_lost_together_are_one_event() -> None:
    well = [sighting(NODES[n % 2], n) for n in range(100)]
    process_group = [sighting("c", 200 + n, TrialStatus.LOST, at_s=2000 + n / 10) for n in range(8)]
    assert suspects([*well, *process_group]) == {}
    one_by_one = [sighting("c", 200 + n, TrialStatus.LOST) for n in range(8)]
    assert suspects([*well, *one_by_one]).keys() == {"c"}


def test_a_point_that_fails_anywhere_is_no_nodes_fault() -> None:
    well = [sighting(NODES[n % 3], n) for n in range(100)]
    fails_on = [("c", 200 + n, 2000.0 + 10 * n) for n in range(8)]
    here = [sighting(node, point, FAILED, at_s) for node, point, at_s in fails_on]
    there = [sighting("a", point, FAILED, 3000 + at_s) for _, point, at_s in fails_on]
    assert suspects([*well, *here]).keys() == {"c"}
    assert suspects([*well, *here, *there]) == {}
    remeasurement = [sighting("c", 200, FAILED, 2000 + 10 * n) for n in range(8)]  # the same one, tried eight times
    assert suspects([*well, *remeasurement]) == {}


def test_nothing_is_said_where_no_trial_ended_well_elsewhere() -> None:
    assert suspects([sighting(NODES[n % 3], n, FAILED) for n in range(60)]) == {}
    assert suspects([sighting("a", n, FAILED) for n in range(60)]) == {}


def test_nodes_of_one_gang_share_the_blame() -> None:
    well = [sighting("c", n) for n in range(40)]
    assert suspects([*well, *(sighting("a b", 100 + n, FAILED) for n in range(5))]).keys() == {"a", "b"}


def test_where_all_nodes_fail_alike_next_to_none_is_blamed() -> None:
    """Looked at after every failure, which is often: of 200 sweeps of 300 trials four blame a node."""

    def blames(seed: int) -> bool:
        chance, seen = random.Random(seed), list[NodeObservation]()
        rate, names = chance.random(), [f"n{n}" for n in range(chance.randint(2, 12))]
        for point in range(200):
            node = chance.choice(names)
            seen.append(sighting(node, point, FAILED if chance.random() < rate else WELL))
            if seen[-1].status is FAILED and failing(seen, names, [node]):
                return True
        return False

    assert sum(blames(seed) for seed in range(40)) <= 2


def round_of(figures: dict[str, list[float | None]]) -> Round:
    return Round(7, 1, figures)


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_a_node_is_slow_that_is_behind_each_time_and_is_measured_again_until_then(direction: str) -> None:
    def rates(*of_c: float) -> Round:
        figures = {"a": [100.0], "b": [101.0], "c": list(of_c)}
        return round_of({n: [f if direction == "maximize" else 1e4 / f for f in each] for n, each in figures.items()})

    assert rates().wanted(NODES, 0.9, direction) == ["c"]
    assert rates(99.0).wanted(NODES, 0.9, direction) == []
    for times in range(1, TIMES_BEHIND):
        slow = rates(*[80.0] * times)
        assert slow.wanted(NODES, 0.9, direction) == ["c"] and slow.behind(NODES, 0.9, direction) == {}
    found = rates(80.0, 81.0, 79.0).behind(NODES, 0.9, direction)
    assert found == {"c": "trial 7 reached 0.80 of what it did on the others, 3 times"}
    assert rates(80.0, 99.0).wanted(NODES, 0.9, direction) == []  # it was an accident
    assert rates(80.0, 99.0, 80.0).behind(NODES, 0.9, direction) == {}


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.floats(0.91, 1.0), min_size=3, max_size=5), min_size=2))
def test_nodes_that_differ_by_less_than_the_threshold_are_all_kept(figures: dict[str, list[float | None]]) -> None:
    assert round_of(figures).behind(sorted(figures), 0.9, "maximize") == {}


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6), st.floats(0.01, 100))
def test_the_fastest_is_never_behind_whatever_the_unit(speeds: list[float], unit: float) -> None:
    figures = {f"n{n}": [unit * speed] * 3 for n, speed in enumerate(speeds)}
    found = round_of(figures).behind(list(figures), 0.9, "maximize")  # type: ignore[arg-type]
    assert f"n{speeds.index(max(speeds))}" not in found


@pytest.mark.parametrize("figures", [{"a": [0.0], "b": [1.0]}, {"a": [-1.0], "b": [1.0]}, {"a": [1.0]}, {"a": [None]}])
def test_without_a_ratio_nothing_is_compared(figures: dict[str, list[float | None]]) -> None:
    assert round_of(figures).ratios(NODES, "maximize") == {}


def test_a_trial_that_failed_there_is_not_asked_for_again() -> None:
    assert round_of({"a": [1.0], "b": [None], "c": [1.0]}).wanted(NODES, 0.9, "maximize") == []


def test_the_last_round_is_made_of_its_own_measurements() -> None:
    def compared(node: str, number: int, figure: float) -> NodeObservation:
        return NodeObservation((node,), "x=1", WELL, 0, 1, figure, Remeasurement(4 + number, number, ()))

    final = NodeObservation(("a",), "x=1", WELL, 0, 1, 9.0, Remeasurement(5, 9, (5, 6)))
    found = last_round([compared("a", 1, 1.0), compared("a", 2, 2.0), compared("b", 2, 3.0), final, sighting("a", 3)])
    assert found == Round(6, 2, {"a": [2.0], "b": [3.0]})
    assert last_round([final]) is None
