"""Another sweep's best points as a start, from its real journal."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sweeper.common.trials import TrialStatus
from sweeper.config.schema import Config
from sweeper.config.space import Choice, Range, Space
from sweeper.config.space_checks import POINTS, WarmStart
from sweeper.results.description import FILE, SweepDescription
from sweeper.results.stored import StoredSweep, read_warm_start
from tests.support.studies import ask_trial, finished, open_study
from workloads.api.errors import UserInputError

BEST_FIRST = list(range(19, -1, -1))


def name_sweep(directory: Path, name: str) -> Config:
    return cast(Config, SimpleNamespace(dir=str(directory), search=SimpleNamespace(warm_start=name)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results directory with a sweep over `m`, whose trial with number n has the score n, and one without a trial."""
    path = tmp_path_factory.mktemp("results")
    for name, trials in (("first", 20), ("empty", 0)):
        folder = path / "sweeps" / name
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        study = open_study(folder, Space({"m": Range(0, 1000, 1), "n": Range(0, 1000, 1)}))
        for number in range(trials):
            study.tell(finished(ask_trial(study), score=float(number)))
        if trials:
            study.tell(finished(ask_trial(study), TrialStatus.INFEASIBLE))
        described = dict.fromkeys((item.name for item in fields(SweepDescription)), None)
        section = {"objective": "score", "direction": "maximize"}
        described |= {"name": name, "study": study.id, "config": {"workload": section}}  # type: ignore[dict-item]
        (folder / FILE).write_text(json.dumps(described))
    return path


def test_the_better_half_of_a_sweep_is_read_the_best_first(directory: Path) -> None:
    for name in ("first", str(directory / "sweeps" / "first")):
        warm_start = read_warm_start(name_sweep(directory, name))
        assert warm_start is not None
        records = StoredSweep(directory / "sweeps" / "first").records
        assert list(warm_start.points) == [records[number].params for number in BEST_FIRST[:10]]
        assert warm_start.study and not any("score" in point for point in warm_start.points)


@pytest.mark.parametrize(
    ("name", "words"),
    [("frist", "Did you mean first?"), ("empty", "no trial of it is complete"), ("./nowhere", "not a sweep folder")],
)
def test_a_sweep_that_has_no_points_is_refused(directory: Path, name: str, words: str) -> None:
    with pytest.raises(UserInputError, match=f"search.warm_start={name}.*{words}".replace("?", r"\?")):
        read_warm_start(name_sweep(directory, name))
    assert read_warm_start(cast(Config, SimpleNamespace(search=SimpleNamespace(warm_start=None)))) is None


OTHER = WarmStart(
    "other",
    "id",
    (
        {"tp": 8, "batch": 4, "length": 8192},  # more GPUs than here
        {"tp": 2, "batch": 4, "length": 8192},
        {"tp": 2, "batch": 4, "length": 4096},  # the same point here
        {"tp": 1, "batch": 2, "length": 8192},
    ),
)


def test_only_points_of_this_space_are_taken_and_each_once() -> None:
    space = Space({"tp": Choice((1, 2)), "batch": Choice((1, 2, 4)), "compile": Choice((True, False))})
    assert OTHER.legal_points(space) == [{"tp": 2, "batch": 4}, {"tp": 1, "batch": 2}]


def test_the_nearest_allowed_point_stands_for_one_that_the_cost_model_excludes() -> None:
    dimensions = {"tp": Choice((1, 2, 4)), "batch": Choice((1, 2, 4)), "compile": Choice((True, False))}
    point = {"tp": 2, "batch": 4, "compile": True}
    start = WarmStart("other", "id", (point,))
    more_gpus = ({"tp": 4, "batch": 1, "compile": True}, {"tp": 4, "batch": 4, "compile": True})
    assert start.legal_points(Space(dimensions, only=more_gpus)) == [more_gpus[1]]
    assert start.legal_points(Space(dimensions, only=(*more_gpus, point))) == [point]
    with pytest.raises(UserInputError, match="none of its 1 better points is in this space"):
        start.legal_points(Space(dimensions, only=({"tp": 4, "batch": 1, "compile": True},)))


def test_few_points_are_taken_and_the_search_goes_on_from_them(tmp_path: Path) -> None:
    points = tuple({"m": number, "n": number} for number in range(20))
    space = Space({"m": Range(0, 1000, 1), "n": Range(0, 1000, 1)})
    start = WarmStart("other", "id", points).legal_points(space)
    assert start == list(points[:POINTS])
    study = open_study(tmp_path, space, initial_points=start)
    assert [ask_trial(study).params for _ in start] == start and ask_trial(study).params not in points
