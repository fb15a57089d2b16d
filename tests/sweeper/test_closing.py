"""What a sweep leaves when it ends: the ranking that MLflow shows."""

import itertools
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sweeper.commands.sweep.closing import build_view, describe_winner
from sweeper.common.trials import Remeasurement, TrialStatus
from sweeper.config.space import Choice, Space
from sweeper.metrics.criteria import Criteria
from sweeper.pages.sweep_results import Results
from sweeper.pages.trial_tables import finalist_rows
from sweeper.search.finals import finalist_results
from sweeper.tracking.store import Store
from tests.conftest import Workspace
from tests.support.factories import trial_record

SPEEDS = (80.0, 90.0, 100.0, 70.0)  # of the search
ROUNDS = {2: 85.0, 1: 95.0}  # of the finals, which turn the order of the first two around


def make_results(beyond: Collection[int] = (), limit_gib: float = 3.5) -> Results:
    """Return the results of a search of four trials and of finals of two, in which some take 4 GiB instead of 3."""
    searched = [
        trial_record(number, {"x": number}, metrics={"tokens_per_s": speed, "peak_memory_gib": 3.0})
        for number, speed in enumerate(SPEEDS)
    ]
    remeasured = [
        trial_record(
            number,
            {"x": trial},
            metrics={"tokens_per_s": speed + n, "peak_memory_gib": 4.0 if trial in beyond else 3.0},
            remeasurement=Remeasurement(trial, n, (1, 2)),
        )
        for number, (n, (trial, speed)) in enumerate(itertools.product(range(3), ROUNDS.items()), start=len(SPEEDS))
    ]
    criteria = Criteria.of({"tokens_per_s": "maximize"}, {"peak_memory_gib": limit_gib})
    best = criteria.rank(searched)
    workload = SimpleNamespace(name="parallel", objective="tokens_per_s", direction="maximize")
    config = SimpleNamespace(workload=workload, finals=SimpleNamespace(top=2))
    plan = SimpleNamespace(config=config, criteria=criteria, space=Space({"x": Choice((0, 1, 2, 3))}))
    finalists = finalist_results(best, 2, [*searched, *remeasured], criteria)
    return Results(plan, {}, searched, remeasured, [], best, finalists, [])  # type: ignore[arg-type]


def store_trials(workspace: Workspace, results: Results) -> Store:
    parent = {"started_at": "now", "params": {}, "tags": {}, "artifacts": {}}
    store = Store(f"sqlite:///{workspace.path}/mlflow.db", "parallel", "study", "sweep", parent)
    for record in (*results.records, *results.remeasured):
        store.write_trial(record)
    return store


def test_the_best_trials_have_places_with_the_winner_of_the_finals_first(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.path)  # where artifacts go
    results = make_results()
    store = store_trials(workspace, results)
    view = build_view(results)
    store.write_view(view)
    assert view.metrics == ["final tokens per s", "tokens per s"]  # all trials take the same memory
    assert describe_winner(results) == {"final tokens per s": 96.0, "tokens per s": 90.0, "peak_memory_gib": 3.0}
    assert view.parameters == ["x"] and view.ranking[0].interval and not view.ranking[2].metrics
    trials = {run.data.metrics.get("place"): run.data.tags["sweeper.trial"] for run in workspace.runs("trial")}
    places = {place: int(number) for place, number in trials.items() if place is not None}
    assert sorted(places) == [1, 2, 3, 4] and list(map(places.get, (1, 2, 3, 4))) == [1, 2, 0, 3]
    assert places[1] == results.metrics()["final_trial"]


BEYOND = ("peak_memory_gib 4, not ≤ 3.5",)


def test_a_finalist_beyond_a_limit_does_not_win_and_is_marked(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.path)
    results = make_results({1})
    assert results.winner is not None and results.winner.number == 2
    assert [finalist.trial.number for finalist in results.finalists] == [2, 1] and not results.finalists[1].tied
    heading, rows, _ = finalist_rows(results.finalists, "tokens_per_s")
    assert heading[:2] == ["trial", "limits"] and [row[:2] for row in rows] == [["2", "kept"], ["1", BEYOND[0]]]
    store = store_trials(workspace, results)
    for beyond, limit_gib in ((True, 3.5), (False, 5.0)):  # after an extension other limits hold
        view = build_view(make_results({1}, limit_gib))
        store.write_view(view)
        marked = {run.data.tags["sweeper.trial"] for run in workspace.runs("trial") if "exceeded" in run.data.tags}
        assert marked == ({"1"} if beyond else set())
        assert [trial.number for trial in view.ranking] == ([2, 0, 3, 1] if beyond else [1, 2, 0, 3])


def test_without_a_finalist_within_the_limits_the_best_of_the_search_leads() -> None:
    results = make_results({1, 2})
    assert results.winner is not None and results.winner.number == 0 and "final_trial" not in results.metrics()


def test_a_finalist_of_earlier_finals_only_did_not_lose_its_rounds() -> None:
    results = make_results()
    earlier = trial_record(20, {"x": 0}, metrics={"tokens_per_s": 80.0}, remeasurement=Remeasurement(0, 0, (0, 3)))
    assert not replace(results, remeasured=[*results.remeasured, earlier]).lost_finalists
    assert [trial.number for trial in replace(results, finalists=[]).lost_finalists] == [2, 1]


def test_up_to_a_fifth_of_inconclusive_trials_leaves_a_sweep_complete() -> None:
    results = make_results()  # of ten trials
    disturbed = [trial_record(number, {"x": 0}, status=TrialStatus.INCONCLUSIVE) for number in (10, 11, 12)]
    for count, has_failures in ((2, False), (3, True)):
        assert replace(results, records=[*results.records, *disturbed[:count]]).has_failures is has_failures
