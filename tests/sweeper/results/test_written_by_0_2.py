"""What version 0.2 wrote is read and resumed: sweeps, an MLflow store, a calibration, a history, trainers' files.

The sample has five sweeps of a CPU (`probe`, the same with two objectives, `matmul`, `allreduce`, `parallel`), their
MLflow store as SQL, matmul_ceilings.json, a history of performance, a calibration, and one layout of Llama 3 8B on 16
H100s as the file of four trainers. Only paths and the host's name are replaced.
"""

import json
import os
import sqlite3
import tarfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from sweeper.cli.composition import quote_spaces
from sweeper.commands.history import reference_file
from sweeper.config import resolution
from sweeper.execution.node_description import describe_local_node
from sweeper.preflight import ceilings
from sweeper.preflight.calibration import Figure, read_calibration
from sweeper.preflight.sweep_plan import plan_sweep
from sweeper.results import mlflow_results
from sweeper.results.stored import find_sweep, find_sweeps
from tests.conftest import REPOSITORY, Workspace
from workloads.api import host
from workloads.formats.files import read_layout

SAMPLE = REPOSITORY / "tests" / "samples" / "written_by_0_2.tar.xz"
TRIALS = {"allreduce_0_2": 2, "front_0_2": 19, "layouts_0_2": 2, "products_0_2": 12, "stored_by_0_2": 4}
DEVICE, HERE = "AMD EPYC (2 cores)", f"{host.cpu_name()} ({len(os.sched_getaffinity(0))} cores)"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The folder as 0.2 left it, moved to this machine: its CPU, its path."""
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(tmp_path, filter="data")
    for path in [*tmp_path.glob("sweeps/*/*"), tmp_path / "mlflow.sql", tmp_path / "matmul_ceilings.json"]:
        path.write_text(path.read_text().replace(DEVICE, HERE).replace("/data/", f"{tmp_path}/"))
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        store.executescript((tmp_path / "mlflow.sql").read_text())
    return tmp_path


def test_every_sweep_has_its_trials_and_its_winner(stored: Path) -> None:
    sweeps = {sweep.name: sweep for sweep in find_sweeps(stored)}
    assert {name: len(sweep.records) for name, sweep in sweeps.items()} == TRIALS
    assert all(sweep.state == "finished" for sweep in sweeps.values())
    best = sweeps["layouts_0_2"].winner
    assert best is not None and best.value == pytest.approx(1343.783, rel=1e-6)
    assert sweeps["layouts_0_2"].records[best.trial].params["dp_shard"] == 2


@pytest.mark.parametrize("name", sorted(TRIALS.keys() - {"allreduce_0_2"}))  # that workload is gone
def test_the_same_command_is_the_same_sweep(stored: Path, name: str) -> None:
    description = find_sweep(stored, name).description
    words = [word for word in description.arguments if "=" in word]
    with initialize_config_dir(str(resolution.CONF), version_base="1.3"):
        resolved = resolution.resolve(compose("config", overrides=quote_spaces([*words, f"dir={stored}"])))
        plan = plan_sweep(resolved, [describe_local_node()])
    lines = (plan.folder / "study.journal").read_text().splitlines()
    (identity,) = [
        entry["user_attr"]["identity"] for entry in map(json.loads, lines) if "identity" in entry.get("user_attr", {})
    ]
    assert plan.identity == identity


@pytest.mark.long(10)
def test_a_sweep_goes_on_where_0_2_ended(stored: Path) -> None:
    before = find_sweep(stored, "stored_by_0_2").records
    result = Workspace(stored).run(
        *("workload=probe", "name=stored_by_0_2", "finals.top=0", "progress=never", "budget.trials=6")
    )
    assert result.code == 0, result.err
    after = find_sweep(stored, "stored_by_0_2").records
    assert len(after) == 6 and {number: after[number] for number in before} == before
    rows = mlflow_results.read(f"sqlite:///{stored}/mlflow.db", None, "stored_by_0_2")
    assert sorted(map(int, rows.trials["tag.sweeper.trial"])) == list(range(6))


def test_the_store_is_read_with_the_results_of_every_sweep(stored: Path) -> None:
    rows = mlflow_results.read(f"sqlite:///{stored}/mlflow.db", None, None)
    assert {*rows.trials["tag.sweep"]} == {*TRIALS}


def test_rates_history_and_calibration_are_read(stored: Path) -> None:
    assert ceilings.achieved_tflops(ceilings.read(stored), HERE).keys() == {"fp32"}
    calibration = read_calibration(stored / "calibration" / "h100.yaml")
    assert calibration.sustained_tflops["bf16"] == Figure(640.0, 636.0, 644.0)
    assert calibration.attention["flash3"].half_tokens == 640.0
    (series,) = [
        series
        for series in reference_file.read(stored / "performance.json").series
        if series.identity.metric == "score"
    ]
    assert series.runs[0].sweep == "front_0_2"


@pytest.mark.parametrize(
    ("file", "trainer"),
    [("sweep.sh", "own"), ("torchtitan.toml", "torchtitan"), ("megatron.sh", "megatron"), ("primus.yaml", "primus")],
)
def test_the_file_of_a_trainer_is_the_same_layout(stored: Path, file: str, trainer: str) -> None:
    reading = read_layout((stored / "files" / file).read_text(), 16)
    layout = reading.job.layout
    assert reading.job.trainer == trainer and layout.tp == 2 and layout.gpus == 16 and layout.global_batch == 512
