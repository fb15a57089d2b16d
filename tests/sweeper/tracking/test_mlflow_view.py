"""The views of a sweep in MLflow: what they filter, in which order, and which columns fit."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

from sweeper.common.trials import Remeasurement
from sweeper.tracking import mlflow_store, mlflow_view
from sweeper.tracking.mlflow_view import RankedTrial, SweepView
from sweeper.tracking.store import Store
from tests.conftest import Workspace
from tests.support.views import make_view, write_sweep

TABLE_PX = 780 - 80  # of MLflow's page at 1400 px, without the column of check boxes
VIEW = make_view(
    "tokens_per_s",
    "peak_device_gib",
    ["tp", "batch"],
    [RankedTrial(1, {"final_tokens_per_s": 90.0}, "85 to 95"), RankedTrial(0, {}, "")],
)


def open_store(folder: Path) -> Store:
    """Open a store with a search of three trials and a round of the finals that was faster than all of them."""
    trials = [({"tp": number}, {"tokens_per_s": speed}) for number, speed in enumerate((100.0, 95.0, 50.0))]
    remeasured = Remeasurement(trial=1, round=0, group=(0, 1)), 500.0
    return write_sweep(f"sqlite:///{folder}/mlflow.db", "parallel", "sweep", VIEW, trials, remeasured)


def read_states(client: MlflowClient, experiment_id: str) -> dict[str, dict[str, Any]]:
    """Return the states of the shared views of an experiment by their keys."""
    tags = client.get_experiment(experiment_id).tags
    return {
        name.removeprefix(mlflow_view.TAG_PREFIX): json.loads(
            zlib.decompress(base64.b64decode(value.removeprefix(mlflow_view.COMPRESSED)))
        )
        for name, value in tags.items()
        if name.startswith(mlflow_view.TAG_PREFIX)
    }


def search(client: MlflowClient, experiment_id: str, state: dict[str, Any]) -> list[str]:
    """Return the names of the runs of a page, in its order."""
    order = f"{state['orderByKey']} {'ASC' if state['orderByAsc'] else 'DESC'}"
    return [run.info.run_name for run in client.search_runs([experiment_id], state["searchFilter"], order_by=[order])]


def test_the_view_has_the_sweep_and_its_trials_with_the_winner_of_the_finals_on_top(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.path)  # where artifacts go
    store = open_store(workspace.path)
    key = store.write_view(VIEW)
    client, experiment_id = store._client, store.experiment_id
    (state,) = read_states(client, experiment_id).values()
    # Trial 0 had the best luck in the search; the round of trial 1 was faster still and is no trial of the search.
    assert search(client, experiment_id, state) == ["sweep", "0001 tp=1", "0000 tp=0", "0002 tp=2"]
    description = client.get_run(store.parent_id).data.tags[mlflow_store.DESCRIPTION]
    page = mlflow_view.runs_page(experiment_id, "sweep", key).removeprefix("/")
    assert description.startswith(f"[sweep]({page}) ([charts]({page}&compareRunsMode=CHART))")
    # After an extension another trial wins, and one is no longer among the best.
    assert store.write_view(SweepView(**{**vars(VIEW), "ranking": [RankedTrial(2, {}, "")]})) == key
    assert search(client, experiment_id, state)[:2] == ["sweep", "0002 tp=2"]
    # The plain list, for other versions: the rounds are there, and outrank nothing.
    of_sweep = {**state, "searchFilter": mlflow_store.tag_filter({mlflow_store.SWEEP_NAME: "sweep"})}
    assert search(client, experiment_id, of_sweep)[:2] == ["sweep", "0002 tp=2"]
    monkeypatch.setattr(mlflow_store, "read_version", lambda uri: "4.0.1")
    assert store.write_view(VIEW) == ""


def test_the_link_opens_the_view_or_where_there_is_none_the_plain_list() -> None:
    assert mlflow_view.runs_page("7", "my sweep", "") == (
        "/#/experiments/7/runs?workflowType=machine_learning&searchFilter=tags.%60sweep%60%20%3D%20%27my%20sweep%27"
        "&orderByKey=metrics.%60place%60&orderByAsc=true"
    )
    assert mlflow_view.runs_page("7", "my sweep", "abc") == (
        "/#/experiments/7/runs?workflowType=machine_learning&viewStateShareKey=abc"
    )


def test_the_version_of_a_local_store_is_that_of_the_installed_mlflow() -> None:
    assert mlflow_store.read_version("sqlite:////anywhere/mlflow.db") == mlflow.__version__
    assert mlflow_store.read_version("http://127.0.0.1:9") == ""
    known = {version: mlflow_view.is_known(version) for version in ("3.10.0", "3.17.2", "3.18", "4.0.0", "", "dev")}
    assert [version for version, is_known in known.items() if is_known] == ["3.17.2", "3.18"]


def test_mlflows_pages_read_the_tag_and_the_link_of_a_view() -> None:
    """A canary without a browser; test_mlflow_ui.py opens the views."""
    pages = Path(mlflow.__file__).parent / "server/js/build/static/js"
    scripts = "".join(path.read_text() for path in pages.glob("main.*.js"))
    names = (mlflow_view.TAG_PREFIX.rstrip("."), "viewStateShareKey", mlflow_view.COMPRESSED)
    names += tuple(mlflow_view.MACHINE_LEARNING.split("="))
    assert not (missing := [name for name in names if name not in scripts]), (
        f"MLflow {mlflow.__version__} no longer has {missing} in its pages: see how its button Share makes a link,"
        " adapt sweeper/tracking/mlflow_view.py, and run tests/sweeper/tracking/test_mlflow_ui.py (-m soak). Until then"
        " set FIRST_UNKNOWN_VERSION there to this version: sweeps then link to the plain list."
    )


def test_the_winners_rate_interval_and_parameters_are_the_first_columns_and_fit() -> None:
    state = mlflow_view.build_trials_state(VIEW, "study")
    first = ["metrics.`place`", "metrics.`final tokens per s`", "tags.`interval`", "params.`tp`", "params.`batch`"]
    assert state["selectedColumns"][:5] == first
    assert state["selectedColumns"][5:] == ["metrics.`tokens per s`", "metrics.`MFU percent`", "metrics.`device GiB`"]
    widths_px, order = state["columnWidths"], state["columnOrder"]
    assert sum(widths_px[column] for column in order[: order.index("params.`batch`") + 1]) <= TABLE_PX
    *scatters, parallel = state["compareRunCharts"]
    assert parallel["selectedParams"] == ["tp", "batch"]
    assert [chart["uuid"].removeprefix("tokens_per_s over ") for chart in scatters] == [
        *("trial", "peak_device_gib", "tp", "batch")
    ]
    assert [section["display"] for section in state["compareRunSections"]] == [True, False]  # open unasked


def test_a_view_of_many_parameters_fits_into_a_tag() -> None:
    names = [f"parameter_number_{n}" for n in range(40)]
    view = SweepView("tflops", ["TFLOP per s"], names)
    assert len(mlflow_view.encode(mlflow_view.build_trials_state(view, "study"))) < 5000


def test_several_objectives_are_columns_beside_the_front_and_have_a_chart_for_each_pair() -> None:
    objectives = ("tokens_per_s", "peak_device_gib", "joules_per_token")
    metrics = [*objectives, "front", "front_share"]
    view = SweepView("tokens_per_s", metrics, ["tp"], other_objectives=objectives[1:])
    state = mlflow_view.build_trials_state(view, "study")
    first = ["metrics.`place`", "metrics.`front`", "metrics.`tokens_per_s`", "tags.`interval`", "params.`tp`"]
    assert state["selectedColumns"][:5] == first and state["selectedColumns"][-1] == "metrics.`front_share`"
    charts = [chart for chart in state["compareRunCharts"] if chart["xaxis"]["key"] in objectives]
    assert [(chart["yaxis"]["key"], chart["xaxis"]["key"]) for chart in charts] == [
        ("tokens_per_s", "peak_device_gib"),
        ("tokens_per_s", "joules_per_token"),
        ("peak_device_gib", "joules_per_token"),
    ]
