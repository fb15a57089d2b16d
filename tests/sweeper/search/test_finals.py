"""The finalists: who is measured again, and what may be said of them then."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.search.finals import finalist_results, still_wanted
from tests.conftest import Place, wait_for
from tests.support.factories import finals_record as record

BEST = [record(7, 10.0), record(3, 9.9), record(5, 9.8), record(1, 5.0)]


def rounds(figures: dict[int, list[float]]) -> list[TrialRecord]:
    among = tuple(sorted(figures))
    return [
        record(100 + 10 * turn + number, figure, Remeasurement(number, turn, among))
        for number, each in figures.items()
        for turn, figure in enumerate(each)
    ]


@given(st.integers(0, 4), st.integers(2, 9))
def test_every_finalist_has_one_turn_a_round_and_each_begins_as_often(top: int, count: int) -> None:
    wanted = still_wanted(BEST, top, count, [])
    assert Counter(remeasurement.trial for _, remeasurement in wanted) == {r.number: count for r in BEST[:top]}
    assert [remeasurement.round for _, remeasurement in wanted] == sorted(
        remeasurement.round for _, remeasurement in wanted
    )
    first = Counter(wanted[place][1].trial for place in range(0, len(wanted), top)) if top else Counter()
    assert not first or max(first.values()) - min(first.values()) <= 1 or len(first) < top


def test_what_was_measured_is_not_wanted_again_and_what_was_cancelled_is() -> None:
    among = (3, 5, 7)
    done = [record(50, 1, Remeasurement(7, 0, among)), record(51, 1, Remeasurement(3, 0, among), TrialStatus.FAILED)]
    cancelled = record(52, 1, Remeasurement(5, 0, among), TrialStatus.CANCELLED)
    wanted = [
        (remeasurement.trial, remeasurement.round) for _, remeasurement in still_wanted(BEST, 3, 2, [*done, cancelled])
    ]
    assert sorted(wanted) == [(3, 1), (5, 0), (5, 1), (7, 1)]


def test_other_finalists_are_another_final() -> None:
    old = record(50, 1, Remeasurement(7, 0, (7, 8)))
    assert len(still_wanted(BEST, 2, 2, [old])) == 4


def test_nothing_is_measured_again_where_there_was_no_choice() -> None:
    assert still_wanted(BEST[:1], 3, 5, []) == []


def test_a_clear_winner_wins_also_when_all_drift_together() -> None:
    """Each round is slower than the one before by more than the finalists differ."""
    drift = [1.0, 0.9, 0.8, 0.7, 0.6]
    final = finalist_results(
        BEST,
        3,
        rounds({7: [9.8 * d for d in drift], 3: [10 * d for d in drift], 5: [9.7 * d for d in drift]}),
        "rate",
        "maximize",
    )
    assert [s.trial.number for s in final] == [3, 7, 5]
    assert not any(s.tied for s in final[1:])
    assert final[1].behind.value == pytest.approx(1 - 9.8 / 10)


def test_noise_is_a_tie() -> None:
    final = finalist_results(BEST, 2, rounds({7: [10, 9, 10, 9, 10], 3: [9, 10, 9, 10, 9.5]}), "rate", "maximize")
    assert [s.tied for s in final[1:]] == [True]
    assert final[0].figure.low < final[0].figure.value < final[0].figure.high


def test_the_smaller_is_the_better_where_that_was_said() -> None:
    final = finalist_results(BEST, 2, rounds({7: [2.0, 2.1, 2.0], 3: [1.0, 1.1, 1.0]}), "rate", "minimize")
    assert [s.trial.number for s in final] == [3, 7] and not final[1].tied


def test_only_rounds_that_all_completed_are_compared() -> None:
    records = rounds({7: [10, 10, 10], 3: [9, 9, 9]})
    records[-1] = record(999, 0, records[-1].remeasurement, TrialStatus.FAILED)
    assert {s.rounds for s in finalist_results(BEST, 2, records, "rate", "maximize")} == {2}


@settings(max_examples=30)
@given(st.lists(st.floats(1, 100), min_size=3, max_size=8), st.floats(0.1, 10))
def test_a_change_of_unit_changes_no_verdict(figures: list[float], unit: float) -> None:
    other = figures[::-1]
    one = finalist_results(BEST, 2, rounds({7: figures, 3: other}), "rate", "maximize")
    scaled = {7: [f * unit for f in figures], 3: [f * unit for f in other]}
    two = finalist_results(BEST, 2, rounds(scaled), "rate", "maximize")
    assert {s.trial.number: s.tied for s in one[1:]} == {s.trial.number: s.tied for s in two[1:]} or (
        one[0].figure.value == pytest.approx(one[1].figure.value)
    )


@pytest.mark.soak
def test_the_finals_of_a_sweep_that_is_killed_go_on_and_every_round_stands_once(place: Place) -> None:
    words = ["workload=probe", "budget.trials=4", "finals.top=2", "finals.rounds=3", "space.sleep_s=0.3"]
    process = place.start(*words)

    def remeasurement() -> list[object]:
        return [t for t in place.trials() if "remeasurement" in t.user_attrs and "record" in t.user_attrs]

    wait_for(lambda: process.poll() is None and place.path.joinpath("sweeps").exists() and len(remeasurement()) >= 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = place.run(*words)
    assert done.code == 0, done.err
    measured = [
        t.user_attrs["remeasurement"]
        for t in place.trials()
        if t.state.name == "COMPLETE" and "remeasurement" in t.user_attrs
    ]
    assert len(measured) == 6 and len({(a["trial"], a["round"]) for a in measured}) == 6
    assert place.states()["RUNNING"] == 0
    assert "finals   " in done.out and "mean of 3 rounds beside the others" in done.out
    (parent,) = place.runs("sweep")
    assert parent.data.tags["winner"] and "final_score" in parent.data.metrics
    rounds_kept = [run for run in place.runs("trial") if "again_of" in run.data.tags]
    assert len(rounds_kept) == 6
    assert all(f"of {int(run.data.tags['again_of']):04d}" in run.info.run_name for run in rounds_kept)
    # Nothing is left to do, and the same command says the same.
    same = place.run(*words)
    assert same.code == 0, same.err
    assert same.out.split("finals ")[1] == done.out.split("finals ")[1]


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=2, max_size=8))
def test_how_far_one_is_behind_is_the_ratio_of_the_figures_beside_it(pairs: list[tuple[float, float]]) -> None:
    one, other = finalist_results(
        BEST, 2, rounds({7: [a for a, _ in pairs], 3: [b for _, b in pairs]}), "rate", "maximize"
    )
    assert one.figure.low > 0 and other.figure.low > 0
    assert other.behind.value == pytest.approx(1 - other.figure.value / one.figure.value, abs=1e-9)
