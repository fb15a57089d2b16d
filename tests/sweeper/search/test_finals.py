"""The finals: which trials are measured again, and how finalists are compared."""

import os
import signal
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coverage import measure_finals
from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.metrics.criteria import Criteria
from sweeper.pages.trial_tables import finalist_rows
from sweeper.search.finals import compare_rounds, describe_disturbed, finalist_results, pending_remeasurements
from tests.conftest import Workspace, examples, wait_for
from tests.support.factories import finals_record as record

BASES = {7: 10.0, 3: 9.8, 5: 9.7, 1: 9.6}
RANKED = [record(7, 10.0), record(3, 9.9), record(5, 9.8), record(1, 5.0)]


def records_of_rounds(rates: dict[int, list[float]]) -> list[TrialRecord]:
    """Return the records of finals, from each finalist's rate in each round."""
    group = tuple(sorted(rates))
    return [
        record(100 + 10 * round_number + finalist, rate, Remeasurement(finalist, round_number, group))
        for finalist, rates_of_finalist in rates.items()
        for round_number, rate in enumerate(rates_of_finalist)
    ]


@given(st.integers(0, 4), st.integers(2, 9))
def test_every_finalist_runs_once_a_round_and_starts_as_many_rounds_as_the_others(top: int, rounds: int) -> None:
    pending = [remeasurement for _, remeasurement in pending_remeasurements(RANKED[:top], rounds, [])]
    assert Counter(remeasurement.trial for remeasurement in pending) == {
        finalist.number: rounds for finalist in RANKED[:top]
    }
    assert [remeasurement.round for remeasurement in pending] == sorted(
        remeasurement.round for remeasurement in pending
    )
    starts = Counter(pending[index].trial for index in range(0, len(pending), top)) if top else Counter()
    assert not starts or max(starts.values()) - min(starts.values()) <= 1 or len(starts) < top


def test_cancelled_rounds_are_measured_again_and_others_are_not() -> None:
    group = (3, 5, 7)
    complete = record(50, 1, Remeasurement(7, 0, group))
    failed = record(51, 1, Remeasurement(3, 0, group), TrialStatus.FAILED)
    cancelled = record(52, 1, Remeasurement(5, 0, group), TrialStatus.CANCELLED)
    pending = pending_remeasurements(RANKED[:3], 2, [complete, failed, cancelled])
    assert sorted((remeasurement.trial, remeasurement.round) for _, remeasurement in pending) == [
        (3, 1),
        (5, 0),
        (5, 1),
        (7, 1),
    ]


def test_rounds_of_another_group_of_finalists_do_not_count() -> None:
    earlier = record(50, 1, Remeasurement(7, 0, (7, 8)))
    assert len(pending_remeasurements(RANKED[:2], 2, [earlier])) == 4


def test_drift_that_all_finalists_share_does_not_hide_the_winner() -> None:
    """Each round is slower than the one before by more than the finalists differ."""
    drift = [1.0, 0.9, 0.8, 0.7, 0.6]
    base_rates = {7: 9.8, 3: 10.0, 5: 9.7}
    records = records_of_rounds({number: [rate * factor for factor in drift] for number, rate in base_rates.items()})
    results = finalist_results(RANKED, 3, records, Criteria.of({"rate": "maximize"}))
    assert [result.trial.number for result in results] == [3, 7, 5]
    assert not any(result.tied for result in results[1:])
    assert results[1].behind.value == pytest.approx(1 - 9.8 / 10)


def test_finalists_that_differ_by_noise_are_tied() -> None:
    records = records_of_rounds({7: [10, 9, 10, 9, 10], 3: [9, 10, 9, 10, 9.5]})
    results = finalist_results(RANKED, 2, records, Criteria.of({"rate": "maximize"}))
    assert [result.tied for result in results[1:]] == [True]
    assert results[0].value.low < results[0].value.value < results[0].value.high


@pytest.mark.parametrize("finalists", [2, 3, 5])
@pytest.mark.parametrize("spreads", [(1, 1, 1, 1, 1), (3, 1, 1, 1, 1)])
def test_equally_fast_finalists_are_seldom_told_apart(finalists: int, spreads: tuple[int, ...]) -> None:
    assert measure_finals(finalists, spreads, 600, seed=0).told_apart <= 5 + 1.8  # two standard errors of 5%


def test_a_clear_winner_of_five_finalists_is_told_apart() -> None:
    rates = {number: [base * (1 + 0.001 * wobble) for wobble in (1, -1, 0, 1, -1)] for number, base in BASES.items()}
    rates[9] = [9.0, 9.01, 8.99, 9.02, 9.0]
    ranked = [*RANKED, record(9, 4.0)]
    results = finalist_results(ranked, 5, records_of_rounds(rates), Criteria.of({"rate": "maximize"}))
    assert results[0].trial.number == 7 and not any(result.tied for result in results[1:])


def test_the_smallest_value_wins_when_the_objective_is_minimized() -> None:
    records = records_of_rounds({7: [2.0, 2.1, 2.0], 3: [1.0, 1.1, 1.0]})
    results = finalist_results(RANKED, 2, records, Criteria.of({"rate": "minimize"}))
    assert [result.trial.number for result in results] == [3, 7] and not results[1].tied


def test_only_rounds_that_all_finalists_completed_are_compared() -> None:
    records = records_of_rounds({7: [10, 10, 10], 3: [9, 9, 9]})
    records[-1] = record(999, 0, records[-1].remeasurement, TrialStatus.FAILED)
    assert {result.rounds for result in finalist_results(RANKED, 2, records, Criteria.of({"rate": "maximize"}))} == {2}


@pytest.mark.parametrize("rounds", [2, 3])
def test_two_rounds_give_a_mean_and_no_interval(rounds: int) -> None:
    records = records_of_rounds({7: [8.0, 12.5, 10.0][:rounds], 3: [8.0, 12.5, 10.0][:rounds]})
    results = finalist_results(RANKED, 2, records, Criteria.of({"rate": "maximize"}))
    assert [result.value.value for result in results] == [pytest.approx(10.0)] * 2 and results[1].tied
    cells = finalist_rows(results, "rate").cells[1][-5:]
    assert cells == (["—", "—", "0.00", "—", "—"] if rounds == 2 else ["5.745", "17.41", "0.00", "0.00", "0.00"])


@pytest.mark.parametrize(("rates", "is_doubtful"), [([6892.0, 85725.0, 94608.0], True), ([80.0, 100.0, 110.0], False)])
def test_rounds_that_differ_by_more_than_noise_make_a_final_doubtful(rates: list[float], is_doubtful: bool) -> None:
    finals = records_of_rounds({7: rates, 3: [9.0, 9.1, 9.2]})
    text = describe_disturbed(finalist_results(RANKED, 2, [*RANKED, *finals], Criteria.of({"rate": "maximize"})))
    assert ("the rounds of a trial differ, trial 7 13.7 times" in text) == is_doubtful == bool(text)


def test_finalists_of_the_same_value_keep_the_order_of_the_search() -> None:
    records = records_of_rounds({3: [9.0, 9.0], 7: [9.0, 9.0]})
    results = finalist_results(RANKED, 2, records, Criteria.of({"rate": "maximize"}))
    assert [result.trial.number for result in results] == [7, 3] and results[1].tied


@examples(30)
@given(st.lists(st.floats(1, 100), min_size=3, max_size=8), st.floats(0.1, 10))
def test_changing_the_unit_changes_no_verdict(rates: list[float], unit: float) -> None:
    by_finalist = {7: rates, 3: rates[::-1]}
    scaled = {number: [rate * unit for rate in values] for number, values in by_finalist.items()}
    results = finalist_results(RANKED, 2, records_of_rounds(by_finalist), Criteria.of({"rate": "maximize"}))
    scaled_results = finalist_results(RANKED, 2, records_of_rounds(scaled), Criteria.of({"rate": "maximize"}))
    ties = {result.trial.number: result.tied for result in results[1:]}
    assert ties == {result.trial.number: result.tied for result in scaled_results[1:]} or (
        results[0].value.value == pytest.approx(results[1].value.value)
    )


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=3, max_size=8))
def test_behind_is_one_minus_the_ratio_to_the_leaders_value(pairs: list[tuple[float, float]]) -> None:
    records = records_of_rounds({7: [first for first, _ in pairs], 3: [second for _, second in pairs]})
    leader, other = finalist_results(RANKED, 2, records, Criteria.of({"rate": "maximize"}))
    assert leader.value.low > 0 and other.value.low > 0
    assert other.behind.value == pytest.approx(1 - other.value.value / leader.value.value, abs=1e-9)


@pytest.mark.soak
def test_interrupted_finals_are_resumed_and_every_round_is_measured_once(workspace: Workspace) -> None:
    arguments = ["workload=probe", "budget.trials=4", "finals.top=2", "finals.rounds=3", "space.sleep_s=0.3"]
    process = workspace.start(*arguments)

    def finished_remeasurements() -> list[object]:
        return [
            trial
            for trial in workspace.trials()
            if "remeasurement" in trial.user_attrs and "record" in trial.user_attrs
        ]

    wait_for(
        lambda: (
            process.poll() is None
            and list(workspace.path.glob("sweeps/*/study.journal"))
            and len(finished_remeasurements()) >= 2
        )
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resumed = workspace.run(*arguments)
    assert resumed.code == 0, resumed.err
    measured = [
        trial.user_attrs["remeasurement"]
        for trial in workspace.trials()
        if trial.state.name == "COMPLETE" and "remeasurement" in trial.user_attrs
    ]
    assert len(measured) == 6 and len({(entry["trial"], entry["round"]) for entry in measured}) == 6
    assert workspace.states()["RUNNING"] == 0
    assert "finals   " in resumed.out and "mean of 3 rounds, interleaved with the others" in resumed.out
    (parent,) = workspace.runs("sweep")
    assert parent.data.tags["winner"] and "final_score" in parent.data.metrics
    rounds = [run for run in workspace.runs("trial") if "remeasured_trial" in run.data.tags]
    assert len(rounds) == 6
    assert all(f"of {int(run.data.tags['remeasured_trial']):04d}" in run.info.run_name for run in rounds)
    # Nothing is left to do, and the same command prints the same but for the time that it took.
    repeated = workspace.run(*arguments)
    assert repeated.code == 0, repeated.err
    finals = [out.split("finals ")[1].split("took ")[0] for out in (repeated.out, resumed.out)]
    assert finals[0] == finals[1]


def test_values_that_are_not_positive_are_compared_by_their_differences() -> None:
    rounds = {0: np.array([-1.0, -1.01, -0.99]), 1: np.array([-2.0, -2.02, -1.98]), 2: np.array([-1.0, -0.99, -1.01])}
    compared = compare_rounds(rounds, 1)
    assert list(compared)[-1] == 1 and compared[1][1].value == pytest.approx(1.0, rel=0.02)
    assert compared[1][1].low > 0 and compared[2][1].low <= 0  # trial 1 is behind; trials 0 and 2 are tied
    assert next(iter(compare_rounds(rounds, -1))) == 1
