"""The MLflow store: runs that are written twice, in part, or under names that MLflow does not allow."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from sweeper.results.mlflow_results import SqliteReader
from sweeper.tracking.mlflow_store import TRIAL_NUMBER, default_uri
from sweeper.tracking.store import Store
from tests.conftest import Workspace
from tests.support.factories import trial_record
from tests.support.tracking import PARENT, open_store, record


def test_writing_a_trial_twice_changes_nothing(uri: str, workspace: Workspace) -> None:
    store = open_store(uri)
    for _ in range(2):
        store.write_trial(record(0))
    reopened = open_store(uri)
    assert reopened.children.written_trials == [0] and reopened.parent_id == store.parent_id
    reopened.write_trial(record(0))
    (run,) = workspace.runs("trial")
    assert run.data.metrics["score"] == 1.5 and run.info.status == "FINISHED"
    assert len(store._client.get_metric_history(run.info.run_id, "score")) == 1


def test_the_front_is_a_tag_and_a_metric_by_which_runs_are_filtered(uri: str, workspace: Workspace) -> None:
    store = open_store(uri)
    for number in range(3):
        store.write_trial(record(number))
    for front in ([0, 1], [1, 2]):  # trial 2 dominates trial 0
        store.write_front(front)
        runs = {int(run.data.tags["sweeper.trial"]): run.data for run in workspace.runs("trial")}
        assert [number for number, data in sorted(runs.items()) if data.tags.get("front") == "yes"] == front
    assert {number: data.metrics.get("front") for number, data in runs.items()} == {0: 0.0, 1: 1.0, 2: 1.0}
    found = store._client.search_runs([store.experiment_id], "metrics.front = 1", order_by=["metrics.front DESC"])
    assert len(found) == 2


def test_resuming_with_other_settings_adds_them_and_replaces_nothing(uri: str, workspace: Workspace) -> None:
    """When another command resumes a sweep, the first configuration stays and the other is added."""

    def resume(started_at: str, command: str) -> None:
        tags, texts = {"command": command, "version.torch": "2.13"}, {"config.yaml": f"command: {command}"}
        open_store(uri, parent={"started_at": started_at, "params": {}, "tags": tags, "artifacts": texts})

    for started_at, command in (("1", "a"), ("1", "a"), ("2", "a"), ("3", "b"), ("3", "b"), ("4", "a")):
        resume(started_at, command)
    (parent,) = workspace.runs("sweep")
    assert parent.data.tags["command"].splitlines() == ["a", "b"] and parent.data.tags["version.torch"] == "2.13"
    artifacts = Path(workspace.path / "mlruns" / parent.info.experiment_id / parent.info.run_id / "artifacts")
    texts = {str(path.relative_to(artifacts)): path.read_text() for path in artifacts.rglob("*.yaml")}
    assert texts == {"config.yaml": "command: a", "since 3/config.yaml": "command: b"}


def test_a_half_written_run_is_completed(uri: str, workspace: Workspace) -> None:
    store = open_store(uri)
    store._client.create_run(
        store.experiment_id,
        run_name="0003",
        tags={"sweeper.study": "study", "sweeper.kind": "trial", "sweeper.trial": "3"},
    )
    reopened = open_store(uri)
    assert reopened.children.written_trials == []
    reopened.write_trial(record(3))
    (run,) = workspace.runs("trial")
    assert (run.info.status, run.data.tags["outcome"], run.data.metrics["score"]) == ("FINISHED", "complete", 1.5)


def test_of_two_runs_of_one_trial_one_is_deleted(uri: str, workspace: Workspace) -> None:
    """A server that goes away after it created a run, and before it answered, is asked to create it again."""
    store = open_store(uri)
    for _ in range(2):
        store.write_trial(record(5))
        store.children._runs.clear()
    assert len(workspace.runs("trial")) == 2
    store.children.doubt(5)
    store.write_trial(record(5))
    assert len(workspace.runs("trial")) == 1 and store.children.written_trials == [5]


def count_searches(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the filters of the searches that follow, a list that grows."""
    filters: list[str] = []
    search = store._client.search_runs

    def counted(experiments: Any, condition: str, **options: Any) -> Any:
        filters.append(condition)
        return search(experiments, condition, **options)

    monkeypatch.setattr(store._client, "search_runs", counted)
    return filters


def test_a_finished_sweep_is_opened_without_a_listing_and_stays_finished(
    uri: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = {**PARENT, "trials": 3}
    store = open_store(uri)
    for number in range(3):
        store.write_trial(record(number))
    store.close("FINISHED", {}, {}, {}, [], written=3)
    pages = list[int]()
    reopened = open_store(uri, parent=parent, on_page=pages.append)
    assert (reopened.written_before, reopened.children.written_trials, pages) == (3, [], [])
    (run,) = workspace.runs("sweep")
    assert run.info.status == "FINISHED"
    filters = count_searches(reopened, monkeypatch)
    reopened.write_trial(record(1))  # one of the three: looked up by its number, not listed
    reopened.write_trial(record(3))  # a new one: nothing to look up
    assert len(filters) == 1 and filters[0].startswith("tags.`sweeper.trial` = '1'")
    assert len(workspace.runs("trial")) == 4 and workspace.runs("sweep")[0].info.status == "RUNNING"


@pytest.mark.parametrize("written", [None, 2])
def test_a_sweep_that_was_not_closed_with_all_of_its_trials_is_listed(uri: str, written: int | None) -> None:
    store = open_store(uri)
    for number in range(3):
        store.write_trial(record(number))
    store.close("KILLED", {}, {}, {}, [], written=written)
    reopened = open_store(uri, parent={**PARENT, "trials": 3})
    assert sorted(reopened.children.written_trials) == [0, 1, 2]


def test_results_are_complete_once_the_report_is_there(uri: str) -> None:
    store = open_store(uri)
    store.close("FINISHED", {}, {}, {}, [], digest="first")
    assert open_store(uri).stored_results == {}
    store.finish_results("first", "a-key")
    reopened = open_store(uri)
    assert reopened.stored_results == {"digest": "first", "view": "a-key"}
    reopened.close("FINISHED", {}, {}, {}, [], digest="second")
    store.finish_results("first", "a-key")  # the report of the run before ends after another run has closed
    assert open_store(uri).stored_results == {}
    reopened.finish_results("second", "")
    assert open_store(uri).stored_results == {"digest": "second", "view": ""}
    reopened.write_trial(record(0))  # the sweep goes on
    assert open_store(uri).stored_results == {}


def test_an_error_costs_one_lookup(uri: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server executed the call that creates the run and went away before it answered."""
    store = open_store(uri)
    create_run = store._client.create_run
    filters = count_searches(store, monkeypatch)

    def created_without_an_answer(*arguments: Any, **options: Any) -> None:
        create_run(*arguments, **options)
        raise MlflowException("connection reset")

    monkeypatch.setattr(store._client, "create_run", created_without_an_answer)
    with pytest.raises(MlflowException):
        store.write_trial(record(7))
    store.children.doubt(7)
    store.write_trial(record(7))
    assert len(workspace.runs("trial")) == 1 and len(filters) == 1


def test_names_and_texts_that_mlflow_does_not_allow_are_replaced(uri: str, workspace: Workspace) -> None:
    names = ["rate (GB/s)", "rate [GB/s]", "train//loss", "/a", "a/", "", "../up", "n" * 300, "n" * 301]
    metrics = {name: float(place) for place, name in enumerate(names, start=2)}
    many = {f"m{place}": 0.5 for place in range(1500)}
    open_store(uri).write_trial(trial_record(0, {"text": "a\udc80"}, metrics={**metrics, **many}, reason="b\0"))
    (run,) = workspace.runs("trial")
    by_value = {value: name for name, value in run.data.metrics.items()}
    legal = [by_value[value] for value in metrics.values()]
    assert legal[:7] == ["rate _GB/s_", "rate _GB/s__1", "train/_/loss", "_/a", "a/_", "_", "_/up"]
    assert {len(name) for name in legal[7:]} == {250} and legal[7] != legal[8]
    assert (run.data.params["text"], run.data.tags["reason"]) == ("a?", "b\ufffd")
    assert run.data.metrics.items() >= many.items()


def test_sweeps_of_the_same_name_in_one_store_are_kept_apart(uri: str) -> None:
    first, second = open_store(uri, study_id="study-1"), open_store(uri, study_id="study-2")
    first.write_trial(record(0))
    assert open_store(uri, study_id="study-2").children.written_trials == []
    assert first.parent_id != second.parent_id


def test_a_store_and_its_artifacts_stay_in_a_directory_of_any_name_and_move_with_it(
    tmp_path: Path, empty_store: Path
) -> None:
    def write(directory: Path, number: int) -> None:
        # MLflow remembers within a process where a run's artifacts are, here those of the parent run.
        store = open_store(default_uri(directory), parent={**PARENT, "artifacts": {}})
        store.write_trial(record(number))
        runs = SqliteReader(directory / "mlflow.db").read_runs([store.experiment_id], {TRIAL_NUMBER: str(number)})
        assert [run.info.status for run in runs] == ["FINISHED"]
        assert len(list(directory.glob("mlruns/1/*/artifacts/trial.json"))) == number + 1

    first, second = tmp_path / "run%41 ?x=1#é", tmp_path / "moved"
    for folder in (first, tmp_path / "runA ?x=1#é"):  # the first one decoded
        folder.mkdir()
        shutil.copy(empty_store, folder)
    write(first, 0)
    first.rename(second)
    write(second, 1)
    copy = shutil.copytree(second, tmp_path / "copy")
    write(copy, 2)
    assert len(list(second.glob("mlruns/1/*/artifacts/trial.json"))) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"runA ?x=1#é", "moved", "copy"}
    assert (tmp_path / "runA ?x=1#é" / "mlflow.db").read_bytes() == empty_store.read_bytes()
