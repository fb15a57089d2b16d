"""Optuna's private attributes are as they were in the versions that `sweeper.search.storage` was tested with."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from sweeper.search import storage

STUDY_ATTRIBUTES = ["_storage", "_study_id"]
STORAGE_METHODS = [
    "get_trial_id_from_study_id_trial_number",
    "get_trial",
    "set_trial_user_attr",
    "set_trial_system_attr",
]
DISTRIBUTIONS = {"x": optuna.distributions.FloatDistribution(0, 1)}


@pytest.fixture(params=["journal", "memory"])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> optuna.Study:
    if request.param == "memory":
        return optuna.create_study(direction="maximize")
    return storage.open_journal(tmp_path / "study.journal", "maximize")


@pytest.mark.parametrize("name", [*STUDY_ATTRIBUTES, *STORAGE_METHODS])
def test_optuna_still_has_the_private_attributes_that_are_used(study: optuna.Study, name: str) -> None:
    owner = study if name in STUDY_ATTRIBUTES else getattr(study, "_storage", None)
    assert hasattr(owner, name), (
        f"Optuna {optuna.__version__} has no {type(owner).__name__}.{name}: adapt sweeper/search/storage.py, "
        "which was tested with Optuna 5.0.0, and name this version there"
    )


def test_a_user_attribute_of_a_running_trial_is_set_by_its_number(study: optuna.Study) -> None:
    for _ in range(2):
        study.ask(DISTRIBUTIONS)
    storage.set_user_attr(study, 1, "record", "{}")
    assert [trial.user_attrs for trial in study.get_trials()] == [{}, {"record": "{}"}]


def test_a_trial_marked_as_infeasible_has_a_violated_constraint(study: optuna.Study) -> None:
    study.ask(DISTRIBUTIONS)
    storage.mark_infeasible(study, 0)
    study.tell(0, state=TrialState.PRUNED)
    (trial,) = study.get_trials()
    assert trial.constraints == storage.INFEASIBLE and trial.constraints["feasible"] > 0


def test_steps_of_a_running_trial_are_reported_and_read_by_its_number(study: optuna.Study) -> None:
    study.ask(DISTRIBUTIONS)
    for step, value in {1: 0.5, 2: 0.75}.items():
        storage.running_trial(study, 0).report(value, step)
    assert storage.intermediate_values(study, 0) == {1: 0.5, 2: 0.75}


def test_an_opened_journal_holds_the_trials_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    study = storage.open_journal(path, "minimize")
    study.ask(DISTRIBUTIONS)
    study.tell(0, 3.0)
    with path.open("a") as file:
        file.write('{"op_code": 4, "wor')  # an incomplete line, as after a kill
    reopened = storage.open_journal(path, "minimize")
    assert [trial.value for trial in reopened.get_trials()] == [3.0]
    assert reopened.direction is optuna.study.StudyDirection.MINIMIZE
    assert path.read_bytes().endswith(b"\n")
