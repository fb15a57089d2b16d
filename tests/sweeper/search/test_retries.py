"""Trials that run again on request."""

from dataclasses import replace
from pathlib import Path

import pytest

from sweeper.common.trials import RETRIED, Remeasurement, Trial, TrialRecord, TrialStatus
from sweeper.config.space import Range, Space
from sweeper.results.stored import StoredSweep
from sweeper.search.study import Study
from tests.support.studies import GRID, SAMPLERS, ask_trial, finished, open_study

FAILED, COMPLETE, INFEASIBLE = TrialStatus.FAILED, TrialStatus.COMPLETE, TrialStatus.INFEASIBLE


def end(study: Study, trial: Trial, status: TrialStatus = COMPLETE, score: float = 0.0) -> TrialRecord:
    """End a trial as the driver does."""
    record = finished(trial, status, score)
    study.tell(TrialRecord(**{**vars(record), "retry": trial.retry}))
    return record


def statuses(study: Study) -> dict[int, str]:
    return {record.number: record.status.value for record in study.current_records}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_retry_replaces_the_failed_trial_and_keeps_its_record(tmp_path: Path, sampler: str) -> None:
    study = open_study(tmp_path, GRID, sampler)
    points = [ask_trial(study) for _ in range(12)]
    for trial in points:
        end(study, trial, FAILED if trial.number < 3 else COMPLETE)

    retrying = open_study(tmp_path, GRID, sampler, retry=RETRIED["failed"])
    assert retrying.retry_points and not retrying.exhausted
    for number in range(3):
        trial = ask_trial(retrying)
        assert (trial.number, trial.params) == (12 + number, points[number].params)
        assert trial.retry and trial.retry.trial == number
        end(retrying, trial, score=1.0)
    assert retrying.ask() is None and not retrying.retry_points and retrying.exhausted

    reopened = open_study(tmp_path, GRID, sampler, retry=RETRIED["failed"])
    assert reopened.ask() is None and reopened.replaced == {0, 1, 2}
    assert set(statuses(reopened).values()) == {"complete"} and len(statuses(reopened)) == 12
    assert [reopened.records[number].status for number in range(3)] == [FAILED] * 3


@pytest.mark.parametrize(
    ("retry", "expected"), [("failed", {0, 1}), ("lost", {2}), ("infeasible", {3}), ("all", {0, 1, 2, 3})]
)
def test_each_value_of_retry_selects_its_trials(tmp_path: Path, retry: str, expected: set[int]) -> None:
    study = open_study(tmp_path)
    ended = [FAILED, TrialStatus.TIMED_OUT, TrialStatus.LOST, INFEASIBLE, COMPLETE]
    for trial, status in [(ask_trial(study), status) for status in ended]:
        end(study, trial, status)
    assert open_study(tmp_path, retry=RETRIED[retry]).retried == expected
    assert not open_study(tmp_path).retried


def test_a_retry_names_what_has_changed_since_its_trial_ran(tmp_path: Path) -> None:
    def fail_once(commit: str) -> None:
        study = open_study(tmp_path, run_state={"git commit": commit, "driver": "1"})
        end(study, ask_trial(study), FAILED)

    fail_once("a")
    fail_once("b")
    study = open_study(tmp_path, retry=RETRIED["failed"], run_state={"git commit": "b", "driver": "2"})
    first, second = (ask_trial(study).retry for _ in range(2))
    assert first and first.changed == ("git commit was a, now b", "driver was 1, now 2")
    assert second and second.changed == ("driver was 1, now 2",)


def test_a_retry_that_was_interrupted_runs_again_and_one_that_was_cancelled_replaces_nothing(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    for _ in range(2):
        end(study, ask_trial(study), FAILED)
    retrying = open_study(tmp_path, retry=RETRIED["failed"])
    ask_trial(retrying)  # the driver is killed while it runs
    end(retrying, ask_trial(retrying), TrialStatus.CANCELLED)

    resumed = open_study(tmp_path)
    assert [(trial.number, trial.retry and trial.retry.trial) for trial in resumed.unfinished] == [(2, 0)]
    assert resumed.retried == {0} and statuses(resumed)[1] == "failed"
    end(resumed, ask_trial(resumed))
    assert statuses(resumed) == {1: "failed", 2: "complete", 3: "cancelled"}
    assert [retry.trial for retry in open_study(tmp_path, retry=RETRIED["failed"]).retries] == [1]


@pytest.mark.parametrize(
    ("status", "counts"),
    [(TrialStatus.LOST, 0), (TrialStatus.TIMED_OUT, 0), (INFEASIBLE, 0), (COMPLETE, 1), (TrialStatus.INCONCLUSIVE, 1)],
)
def test_a_repeat_of_a_complete_trial_replaces_it_by_a_measurement_only(
    tmp_path: Path, status: TrialStatus, counts: int
) -> None:
    study = open_study(tmp_path)
    first = end(study, ask_trial(study), score=1.0)
    assert study.queue_again([first]) == [first]
    trial = ask_trial(study)
    repeat = replace(finished(trial, status), retry=trial.retry).weighed_against(first)
    study.tell(repeat)
    for opened in (study, open_study(tmp_path)):
        assert [record.number for record in opened.current_records] == [counts]
        assert opened.replaced == {1 - counts} and not opened.retry_points
    (tmp_path / "lock").touch()
    assert [record.number for record in StoredSweep(tmp_path).current_records] == [counts]


@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_repeats_that_a_run_has_not_finished_are_taken_up_by_the_next(tmp_path: Path, ending: str) -> None:
    study = open_study(tmp_path)
    records = [end(study, ask_trial(study), score=number) for number in range(3)]
    study.queue_again(records)
    end(study, ask_trial(study))
    trial = ask_trial(study)
    if ending == "stopped":
        end(study, trial, TrialStatus.CANCELLED)
    resumed = open_study(tmp_path)
    assert resumed.retried == {1, 2}
    for _ in range(2):
        end(resumed, ask_trial(resumed))
    assert resumed.replaced == {0, 1, 2}
    assert not open_study(tmp_path).retried


def test_a_failed_round_of_the_finals_is_measured_again(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    best = ask_trial(study)
    end(study, best)
    remeasurement = Remeasurement(best.number, 0, (0, 1))
    record = finished(study.ask_remeasurement(best.params, remeasurement), FAILED)
    study.tell(TrialRecord(**{**vars(record), "remeasurement": remeasurement}))

    retrying = open_study(tmp_path, retry=RETRIED["failed"])
    assert retrying.retried == {1} and not retrying.retry_points  # the finals ask for it
    trial = retrying.ask_remeasurement(best.params, remeasurement)
    assert trial.retry and trial.retry.trial == 1


def test_a_point_that_is_no_longer_allowed_is_not_retried(tmp_path: Path) -> None:
    study = open_study(tmp_path, Space({"x": Range(0, 9, 1)}, only=({"x": 1}, {"x": 2})))
    while trial := study.ask():
        end(study, trial, FAILED)
    retrying = open_study(tmp_path, Space({"x": Range(0, 9, 1)}, only=({"x": 2},)), retry=RETRIED["failed"])
    assert ask_trial(retrying).params == {"x": 2} and retrying.ask() is None
