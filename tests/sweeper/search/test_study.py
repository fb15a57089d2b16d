"""The study: asking, telling, resuming."""

from __future__ import annotations

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

from sweeper.common.errors import UserInputError
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.space import Choice, Interval, Range, Space, parse
from sweeper.search.study import Study, Trial, open_journal, point_key
from tests.conftest import environment

GRID = Space({"a": Range(0, 3, 1), "b": Choice(("x", "y", "z"))})
WIDE = Space({"m": Range(0, 1000, 1), "n": Range(0, 1000, 1)})
SAMPLERS = ["tpe", "gp", "cmaes", "qmc", "random", "grid"]


def open_study(path: Path, space: Space = WIDE, sampler: str = "random", **more: Any) -> Study:
    identity = {"space": space.described(), "sampler": sampler}
    defaults: dict[str, Any] = {"seed": 1, "objective": "score", "direction": "maximize"}
    return Study(path / "study.journal", identity, space, sampler=sampler, **{**defaults, **more})


def ended(trial: Trial, status: TrialStatus = TrialStatus.COMPLETE, score: float = 0.0) -> TrialRecord:
    metrics = {"score": score} if status is TrialStatus.COMPLETE else {}
    return TrialRecord(trial.number, trial.params, status, "", "", metrics, [], {}, 0.0, 1.0, 1.0)


def asked(study: Study) -> Trial:
    trial = study.ask()
    assert trial is not None
    return trial


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_point_of_a_small_space_is_asked_for_once(tmp_path: Path, sampler: str) -> None:
    study = open_study(tmp_path, GRID, sampler)
    points = []
    while trial := study.ask():
        points.append(point_key(trial.params))
        study.tell(ended(trial, score=trial.params["a"]))  # type: ignore[arg-type]
    assert len(points) == 12 == len(set(points))
    assert study.exhausted


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.decimals("0", "2", places=2), st.decimals("0.01", "0.9", places=2), st.integers(2, 9), st.data())
def test_a_range_of_decimals_is_asked_for_as_it_was_said(
    tmp_path: Path, first: Decimal, step: Decimal, count: int, data: st.DataObject
) -> None:
    """Sums of 0.1 in binary are not what was said: 0.30000000000000004 is 0.3."""
    sampler = data.draw(st.sampled_from(["random", "grid", "tpe", "qmc"]))
    space = parse({"x": f"range({float(first)}, {first + count * step}, {step})"}, "cpu")
    folder = tmp_path / uuid.uuid4().hex
    folder.mkdir()
    found = []
    study = open_study(folder, space, sampler)
    while trial := study.ask():
        found.append(trial.params["x"])
        study.tell(ended(trial, score=float(found[-1])))
        if len(found) == 2:
            study = open_study(folder, space, sampler)
    assert set(found) == {float(first + i * step) for i in range(count)} and len(found) == count


def test_what_has_become_legal_since_is_asked_for(tmp_path: Path) -> None:
    """Of the same space another part is legal where there is more memory, or another version of PyTorch."""
    for legal, expected in ((range(4), {0, 1, 2, 3}), (range(2, 7), {4, 5, 6})):
        study = open_study(tmp_path, Space({"x": Range(0, 9, 1)}, only=tuple({"x": x} for x in legal)))
        found = set()
        while trial := study.ask():
            found.add(trial.params["x"])
            study.tell(ended(trial))
        assert found == expected and study.exhausted


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "qmc", "random"])
def test_a_sampler_finds_the_better_half_of_a_simple_hill(tmp_path: Path, sampler: str) -> None:
    space = Space({"x": Interval(-10, 10), "y": Interval(-10, 10)})
    study = open_study(tmp_path, space, sampler)
    best = -1e9
    for _ in range(25):
        trial = asked(study)
        score = -((float(trial.params["x"] or 0) - 3) ** 2) - (float(trial.params["y"] or 0) + 1) ** 2
        best = max(best, score)
        study.tell(ended(trial, score=score))
    assert best > -25


@pytest.mark.parametrize("sampler", ["random", "qmc", "grid", "tpe"])
def test_a_study_killed_and_resumed_asks_for_what_an_unbroken_one_asks(tmp_path: Path, sampler: str) -> None:
    def ask_and_tell(study: Study, count: int) -> list[str]:
        points = []
        for _ in range(count):
            trial = asked(study)
            points.append(point_key(trial.params))
            study.tell(ended(trial, score=float(trial.params["m"])))  # type: ignore[arg-type]
        return points

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    unbroken = ask_and_tell(open_study(tmp_path / "a", sampler=sampler), 24)
    broken = ask_and_tell(open_study(tmp_path / "b", sampler=sampler), 15)
    asked(open_study(tmp_path / "b", sampler=sampler))  # and killed before it could tell
    broken += ask_and_tell(open_study(tmp_path / "b", sampler=sampler), 9)
    assert broken == unbroken


def test_what_was_in_flight_is_asked_again_under_its_own_number(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    first, second, third = asked(study), asked(study), asked(study)
    study.tell(ended(second))
    remeasurement = open_study(tmp_path)
    assert [asked(remeasurement), asked(remeasurement)] == [first, third]
    assert asked(remeasurement).number == 3
    assert set(remeasurement.records) == {1}


def test_a_record_without_its_state_is_finished_not_run_again(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    trial = asked(study)
    # as far as tell() comes before the driver is killed
    study._disk._storage.set_trial_user_attr(study._disk_id(trial.number), "record", ended(trial, score=3.0).to_json())
    remeasurement = open_study(tmp_path)
    assert remeasurement.unfinished == []
    assert remeasurement.records[0].metrics == {"score": 3.0}
    assert open_journal(tmp_path / "study.journal", "maximize").trials[0].state is TrialState.COMPLETE


def test_cancelled_trials_are_tried_again_once_under_a_new_number(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    trial = asked(study)
    study.tell(ended(trial, TrialStatus.CANCELLED))
    remeasurement = open_study(tmp_path)
    retried = asked(remeasurement)
    assert (retried.number, retried.params) == (1, trial.params)
    remeasurement.tell(ended(retried))
    assert asked(open_study(tmp_path)).params != trial.params


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_half_written_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    study = open_study(tmp_path)
    trial = asked(study)
    study.tell(ended(trial, score=1.0))
    asked(study)
    path = tmp_path / "study.journal"
    path.write_bytes(path.read_bytes()[:-cut])  # the last ask, never completed on disk
    remeasurement = open_study(tmp_path)
    assert set(remeasurement.records) == {0}
    assert asked(remeasurement).number == 1
    assert asked(open_study(tmp_path)).number == 1  # and the file can be written and read again


def test_only_knowledge_reaches_the_sampler(tmp_path: Path) -> None:
    study = open_study(tmp_path, sampler="tpe")
    for status in TrialStatus:
        study.tell(ended(asked(study), status))
    for view in (study, open_study(tmp_path, sampler="tpe")):
        learnt = [trial for trial in view._memory.trials if trial.state is not TrialState.FAIL]
        assert [trial.state for trial in learnt] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED]
        assert [trial.constraints for trial in learnt] == [{}, {"feasible": 1.0}, {}]


def test_points_to_try_first_come_first_and_once(tmp_path: Path) -> None:
    points = [{"m": 7, "n": 8}, {"m": 9, "n": 1}]
    study = open_study(tmp_path, first=points)
    assert [asked(study).params, asked(study).params] == points
    assert [asked(open_study(tmp_path, first=points)).params for _ in range(1)] == [points[0]]


def test_a_point_to_try_first_is_not_tried_again_after_a_resume(tmp_path: Path) -> None:
    space = Space({"x": Interval(-10, 10), "y": Interval(-10, 10)})
    points: list[dict[str, Any]] = [{"x": 3, "y": -1}, {"x": 5}]  # whole numbers on an interval; one value left open
    study = open_study(tmp_path, space, first=points)
    first, second = asked(study), asked(study)
    assert first.params == {"x": 3.0, "y": -1.0} and second.params["x"] == 5.0
    for trial in (first, second):
        study.tell(ended(trial))
    third = asked(open_study(tmp_path, space, first=points))
    assert third.number == 2 and third.params["x"] not in (3.0, 5.0)


def test_another_space_under_the_same_name_is_refused(tmp_path: Path) -> None:
    open_study(tmp_path)
    other = Space({"m": Range(0, 500, 1), "n": Range(0, 1000, 1)})
    with pytest.raises(UserInputError, match=r"space.m was range\(0, 1001, 1\), now range\(0, 501, 1\)"):
        open_study(tmp_path, other)


def test_sampling_is_silent(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.sweeper.search.test_study import GRID, SAMPLERS, asked, ended, open_study
for sampler in SAMPLERS:
    folder = Path({str(tmp_path)!r}, sampler)
    folder.mkdir()
    study = open_study(folder, GRID, sampler)
    for _ in range(6):
        study.tell(ended(asked(study)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("resumed", [False, True])
def test_a_pruner_knows_the_steps_of_an_earlier_run(tmp_path: Path, resumed: bool) -> None:
    study = open_study(tmp_path, pruner="median")
    for score in range(10, 15):
        trial = asked(study)
        assert not any(study.should_prune(trial.number, step, float(score)) for step in range(1, 10))
        study.tell(ended(trial, score=float(score)))
    if resumed:
        study = open_study(tmp_path, pruner="median")
    slow, fast = asked(study), asked(study)
    assert [study.should_prune(slow.number, step, 1.0) for step in (1, 9)] == [False, True]
    assert not study.should_prune(fast.number, 9, 13.0)
