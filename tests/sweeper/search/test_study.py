"""The study: asking, telling, resuming."""

import json
import subprocess
import sys
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from sweeper.common.trials import Remeasurement, TrialStatus
from sweeper.config.schema import Search
from sweeper.config.space import Interval, Range, Space, parse, point_key
from sweeper.search import study as search_study
from sweeper.search.journal import Journal
from sweeper.search.study import Study
from tests.conftest import environment, examples
from tests.support.studies import GRID, SAMPLERS, ask_trial, finished, open_study
from workloads.api.errors import UserInputError

# ── asking ──


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_point_of_a_small_space_is_sampled_once(tmp_path: Path, sampler: str) -> None:
    study = open_study(tmp_path, GRID, sampler)
    points = []
    while trial := study.ask():
        points.append(point_key(trial.params))
        study.tell(finished(trial, score=trial.params["a"]))
    assert len(points) == 12 == len(set(points))
    assert study.exhausted


@settings(examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.decimals("0", "2", places=2), st.decimals("0.01", "0.9", places=2), st.integers(2, 9), st.data())
def test_points_of_a_range_of_decimals_are_exact(
    tmp_path: Path, first: Decimal, step: Decimal, count: int, data: st.DataObject
) -> None:
    """A binary sum of three times 0.1 is 0.30000000000000004; the point of the space is 0.3."""
    sampler = data.draw(st.sampled_from(["random", "grid", "tpe", "qmc"]))
    space = parse({"x": f"range({float(first)}, {first + count * step}, {step})"}, "cpu")
    folder = tmp_path / uuid.uuid4().hex
    folder.mkdir()
    points = []
    study = open_study(folder, space, sampler)
    while trial := study.ask():
        points.append(trial.params["x"])
        study.tell(finished(trial, score=float(points[-1])))
        if len(points) == 2:
            study = open_study(folder, space, sampler)
    assert set(points) == {float(first + i * step) for i in range(count)} and len(points) == count


def test_points_that_a_later_run_allows_are_sampled(tmp_path: Path) -> None:
    """With more memory or another version of PyTorch, other points of the same space are allowed."""
    for allowed, expected in ((range(4), {0, 1, 2, 3}), (range(2, 7), {4, 5, 6})):
        study = open_study(tmp_path, Space({"x": Range(0, 9, 1)}, only=tuple({"x": x} for x in allowed)))
        points = set()
        while trial := study.ask():
            points.add(trial.params["x"])
            study.tell(finished(trial))
        assert points == expected and study.exhausted


# Of the Gaussian process five points after its ten random ones: each takes longer than the one before.
@pytest.mark.parametrize(("sampler", "trials"), [("tpe", 25), ("gp", 15), ("cmaes", 25), ("qmc", 25), ("random", 25)])
def test_every_sampler_finds_the_better_half_of_a_paraboloid(tmp_path: Path, sampler: str, trials: int) -> None:
    space = Space({"x": Interval(-10, 10), "y": Interval(-10, 10)})
    study = open_study(tmp_path, space, sampler)
    best = -1e9
    for _ in range(trials):
        trial = ask_trial(study)
        score = -((float(trial.params["x"] or 0) - 3) ** 2) - (float(trial.params["y"] or 0) + 1) ** 2
        best = max(best, score)
        study.tell(finished(trial, score=score))
    assert best > -25


def test_initial_points_are_sampled_first_and_once(tmp_path: Path) -> None:
    points = [{"m": 7, "n": 8}, {"m": 9, "n": 1}]
    study = open_study(tmp_path, initial_points=points)
    assert [ask_trial(study).params, ask_trial(study).params] == points
    assert ask_trial(open_study(tmp_path, initial_points=points)).params == points[0]


def test_an_initial_point_is_not_sampled_again_after_a_resume(tmp_path: Path) -> None:
    space = Space({"x": Interval(-10, 10), "y": Interval(-10, 10)})
    # Integers on an interval, and one value left to the sampler.
    points: list[dict[str, Any]] = [{"x": 3, "y": -1}, {"x": 5}]
    study = open_study(tmp_path, space, initial_points=points)
    first, second = ask_trial(study), ask_trial(study)
    assert first.params == {"x": 3.0, "y": -1.0} and second.params["x"] == 5.0
    for trial in (first, second):
        study.tell(finished(trial))
    third = ask_trial(open_study(tmp_path, space, initial_points=points))
    assert third.number == 2 and third.params["x"] not in (3.0, 5.0)


def test_only_complete_pruned_and_infeasible_trials_reach_the_sampler(tmp_path: Path) -> None:
    study = open_study(tmp_path, sampler="tpe")
    for status in TrialStatus:
        study.tell(finished(ask_trial(study), status))
    for opened in (study, open_study(tmp_path, sampler="tpe")):
        learned = [trial for trial in opened._sampling.trials if trial.state is not TrialState.FAIL]
        assert [trial.state for trial in learned] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED]
        assert [trial.constraints for trial in learned] == [{}, {"feasible": 1.0}, {}]


def test_sampling_prints_nothing(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.support.studies import GRID, SAMPLERS, ask_trial, finished, open_study
for sampler in SAMPLERS:
    folder = Path({str(tmp_path)!r}, sampler)
    folder.mkdir()
    study = open_study(folder, GRID, sampler)
    for _ in range(6):
        study.tell(finished(ask_trial(study)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.parametrize("resumed", [False, True])
def test_the_pruner_compares_with_steps_of_an_earlier_run(tmp_path: Path, resumed: bool) -> None:
    study = open_study(tmp_path, search=Search("random", "median"))
    for score in range(10, 15):
        trial = ask_trial(study)
        assert not any(study.should_prune(trial.number, step, float(score)) for step in range(1, 10))
        study.tell(finished(trial, score=float(score)))
    if resumed:
        study = open_study(tmp_path, search=Search("random", "median"))
    slow, fast = ask_trial(study), ask_trial(study)
    assert [study.should_prune(slow.number, step, 1.0) for step in (1, 9)] == [False, True]
    assert not study.should_prune(fast.number, 9, 13.0)


# ── resuming ──


@pytest.mark.parametrize("sampler", ["random", "qmc", "grid", "tpe"])
def test_a_resumed_study_asks_for_the_same_points_as_an_uninterrupted_one(tmp_path: Path, sampler: str) -> None:
    def ask_and_tell(study: Study, count: int) -> list[str]:
        points = []
        for _ in range(count):
            trial = ask_trial(study)
            points.append(point_key(trial.params))
            study.tell(finished(trial, score=float(trial.params["m"])))
        return points

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    uninterrupted = ask_and_tell(open_study(tmp_path / "a", sampler=sampler), 24)
    resumed = ask_and_tell(open_study(tmp_path / "b", sampler=sampler), 15)
    ask_trial(open_study(tmp_path / "b", sampler=sampler))  # killed before it could tell
    resumed += ask_and_tell(open_study(tmp_path / "b", sampler=sampler), 9)
    assert resumed == uninterrupted


def test_unfinished_trials_are_repeated_under_their_numbers(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    first, second, third = ask_trial(study), ask_trial(study), ask_trial(study)
    study.tell(finished(second))
    resumed = open_study(tmp_path)
    assert [ask_trial(resumed), ask_trial(resumed)] == [first, third]
    assert ask_trial(resumed).number == 3
    assert set(resumed.records) == {1}


def test_opening_a_study_computes_the_key_of_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times, it was a sixth of the time that opening a large study takes."""
    study = open_study(tmp_path)
    for _ in range(20):
        study.tell(finished(ask_trial(study)))
    calls: list[object] = []

    def count_call(params: dict[str, Any]) -> str:
        calls.append(params)
        return point_key(params)

    monkeypatch.setattr(search_study, "point_key", count_call)
    resumed = open_study(tmp_path)
    assert resumed.records == study.records
    assert len(calls) == 20


def test_a_trial_with_a_record_and_no_state_is_finished_and_not_run_again(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    trial = ask_trial(study)
    # What tell() has done when the driver is killed before the state.
    study._journal.set_attr(trial.number, "record", json.loads(finished(trial, score=3.0).to_json()))
    resumed = open_study(tmp_path)
    assert resumed.unfinished == []
    assert resumed.records[0].metrics == {"score": 3.0}
    assert Journal(tmp_path / "study.journal", "maximize").trials[0].state is TrialState.COMPLETE


def test_a_remeasurement_in_flight_is_abandoned_and_the_sampler_never_sees_one(tmp_path: Path) -> None:
    study = open_study(tmp_path, sampler="tpe")
    trial = ask_trial(study)
    study.tell(finished(trial))
    remeasurement = Remeasurement(trial=0, round=0, group=(0,))
    again = study.ask_remeasurement(trial.params, remeasurement, clock_mhz=1980)
    assert (again.number, again.clock_mhz) == (1, 1980)
    resumed = open_study(tmp_path, sampler="tpe")
    assert resumed.abandoned == [1] and resumed.unfinished == []
    assert len(resumed._sampling.trials) == 1
    assert ask_trial(resumed).number == 2


def test_cancelled_trials_are_tried_again_once_under_a_new_number(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    trial = ask_trial(study)
    study.tell(finished(trial, TrialStatus.CANCELLED))
    resumed = open_study(tmp_path)
    retried = ask_trial(resumed)
    assert (retried.number, retried.params) == (1, trial.params)
    resumed.tell(finished(retried))
    assert ask_trial(open_study(tmp_path)).params != trial.params


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_an_incomplete_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    study = open_study(tmp_path)
    trial = ask_trial(study)
    study.tell(finished(trial, score=1.0))
    ask_trial(study)
    path = tmp_path / "study.journal"
    path.write_bytes(path.read_bytes()[:-cut])  # the last ask is incomplete on disk
    resumed = open_study(tmp_path)
    assert set(resumed.records) == {0}
    assert ask_trial(resumed).number == 1
    assert ask_trial(open_study(tmp_path)).number == 1  # the file can be written and read again


# ── the identity ──


def test_another_space_under_the_same_name_is_refused(tmp_path: Path) -> None:
    open_study(tmp_path)
    other = Space({"m": Range(0, 500, 1), "n": Range(0, 1000, 1)})
    message = (
        r"already exists with different settings: space.m was range\(0, 1001, 1\), now range\(0, 501, 1\)\. Choose"
    )
    with pytest.raises(UserInputError, match=message):
        open_study(tmp_path, other)
