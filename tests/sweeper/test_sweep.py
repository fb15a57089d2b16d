"""Complete sweeps, started as a user starts them."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sweeper.preflight import ceilings
from tests.conftest import PROBE, CommandResult, Workspace, environment, wait_for
from tests.sweeper.conftest import SHAPES, FinishedSweep


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_the_default_workload_measures_this_machine(finished_sweep: FinishedSweep) -> None:
    workspace, result = finished_sweep.workspace, finished_sweep.result
    assert result.code == 0, result.err
    assert "8 complete" in result.out and "TFLOP/s" in result.out
    assert "mlflow ui" in result.out and "budget.trials=16" in result.out  # the next commands
    all_rows = list(csv.DictReader((workspace.sweeps[0] / "trials.csv").open()))
    rows = [row for row in all_rows if not row["round"]]
    assert len(all_rows) == 8 + 3 * 5 and "mean of 5 rounds, interleaved with the others" in result.out
    assert len(rows) == 8 == len({(row["param.m"], row["param.k"]) for row in rows})
    for row in rows:
        flops = 2 * int(row["param.m"]) * 256 * int(row["param.k"])
        assert float(row["tflops"]) == pytest.approx(flops / float(row["step_time_ms"]) / 1e9, rel=1e-6)
        assert float(row["relative_error"]) < 1e-4
        assert (row["param.n"], row["param.dtype"], row["param.accumulation"]) == ("256", "fp32", "auto")
    run = workspace.runs("trial")[0]
    assert {"n": "256", "dtype": "fp32", "backend": "torch"}.items() <= run.data.params.items()
    assert json.loads(run.data.tags["work"]) | {"m": "searched", "n": "256"} == json.loads(run.data.tags["work"])
    assert "fixed    n=256" in result.out


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_a_matmul_sweep_records_its_rate(finished_sweep: FinishedSweep) -> None:
    (kept,) = ceilings.read(finished_sweep.workspace.path)
    assert kept.dtype == "fp32" and kept.rounds == 5
    m, n, k = map(int, kept.shape.split("x"))
    assert m % 64 == 0 and n == 256 and k > 0
    end = json.loads(finished_sweep.result.err.strip().splitlines()[-1])
    assert kept.tflops == pytest.approx(end["finals"][0]["value"]["value"])


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_a_users_folder_called_workloads_does_not_hide_the_package(finished_sweep: FinishedSweep) -> None:
    assert (finished_sweep.workspace.path / "workloads" / "__init__.py").exists()
    assert finished_sweep.result.code == 0 and "8 complete" in finished_sweep.result.out, finished_sweep.result.err


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_mlflow_holds_the_sweep(finished_sweep: FinishedSweep) -> None:
    workspace = finished_sweep.workspace
    assert finished_sweep.result.code == 0, finished_sweep.result.err
    (parent,) = workspace.runs("sweep")
    children = workspace.runs("trial")
    searched = [child for child in children if "remeasured_trial" not in child.data.tags]
    assert parent.info.status == "FINISHED" and parent.info.run_name == "products"
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert sorted(int(child.data.tags["sweeper.trial"]) for child in children) == list(range(8 + 3 * 5))
    artifacts = workspace.path / "mlruns" / parent.info.experiment_id / parent.info.run_id / "artifacts"
    resolved = yaml.safe_load((artifacts / "config.yaml").read_text())
    assert resolved["workload"]["name"] == "matmul" and resolved["budget"]["trials"] == 8
    assert {child.data.tags["sweep"] for child in children} == {"products"}
    assert all(child.data.tags["hardware"] == "cpu" and child.data.tags["device"] for child in children)
    provenance = json.loads((artifacts / "provenance.json").read_text())
    assert provenance["versions"]["torch"] and provenance["machine"]["model"]
    assert parent.data.metrics["best_tflops"] == max(child.data.metrics["tflops"] for child in searched)
    # The report comes last; on a busy machine after the driver has exited.
    note, link = "mlflow.note.content", f"{parent.info.run_id}/artifacts/report.html"
    wait_for(lambda: link in workspace.runs("sweep")[0].data.tags[note])
    assert "| trial | m | k |" in parent.data.tags[note]
    best_results = (artifacts / "report.html").read_text().split("<h2>Best results</h2>")[1].split("</table>")[0]
    winner = json.loads(finished_sweep.result.err.splitlines()[-1])["best"]
    assert all(f"{name}={winner['params'][name]}" in best_results for name in ("m", "k"))
    for child in children:
        folder = workspace.path / "mlruns" / child.info.experiment_id / child.info.run_id / "artifacts"
        record = json.loads((folder / "trial.json").read_text())
        assert record["measurements"][0]["step_times_s"] and record["params"].keys() == {"m", "k"}


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_progress_json_prints_one_event_per_line(finished_sweep: FinishedSweep) -> None:
    events = [json.loads(line) for line in finished_sweep.result.err.splitlines()]
    assert events[-1]["event"] == "end" and events[-1]["outcomes"] == {"complete": 8} and events[-1]["exit_code"] == 0
    trials = [event for event in events if event["event"] == "trial"]
    assert [event["ended"] for event in trials[:8]] == list(range(1, 9))
    assert all(event["outcome"] == "complete" and "tflops" in event["metrics"] for event in trials)


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_the_same_command_again_changes_nothing(
    finished_sweep: FinishedSweep, workspace: Workspace, run_cli: Callable[..., CommandResult]
) -> None:
    shutil.copytree(finished_sweep.workspace.path / "sweeps", workspace.path / "sweeps")
    before = (workspace.sweeps[0] / "study.journal").read_bytes()
    rerun = run_cli(*SHAPES, "budget.trials=8")
    assert rerun.code == 0 and "8 complete" in rerun.out
    assert (workspace.sweeps[0] / "study.journal").read_bytes() == before
    assert len(workspace.runs("trial")) == 8 + 3 * 5 and len(workspace.runs("sweep")) == 1  # another store gets all
    files = [*workspace.path.glob("mlruns/*/*/artifacts/**/*"), *workspace.path.glob("sweeps/*/*.csv")]
    written_ns = {path: path.stat().st_mtime_ns for path in files}
    third = run_cli(*SHAPES, "budget.trials=8")  # this one has all of it: neither files nor a report are written again
    assert "finished before" in third.err and "finished before" not in rerun.err
    assert third.code == 0 and _without_times(third.out) == _without_times(rerun.out)
    assert {path.name for path in files} >= {"trials.csv", "report.html", "trial.json"}
    assert {path: path.stat().st_mtime_ns for path in files} == written_ns
    (parent,) = workspace.runs("sweep")
    assert parent.info.status == "FINISHED" and "report.html" in parent.data.tags["mlflow.note.content"]


def _without_times(out: str) -> str:
    return re.sub(r"^took .*", "", out, flags=re.MULTILINE)


@pytest.mark.long(30)
@pytest.mark.xdist_group("finished_sweep")
def test_resuming_with_another_space_names_the_difference(
    finished_sweep: FinishedSweep, run_cli: Callable[..., CommandResult]
) -> None:
    result = run_cli(*SHAPES, "space.m=range(64,257,64)", f"dir={finished_sweep.workspace.path}")
    assert result.code == 2
    assert "space.m was range(64, 513, 64), now range(64, 257, 64)" in result.err
    assert len(result.err.strip().splitlines()) == 1


@pytest.mark.soak
def test_an_existing_cluster_is_used_and_keeps_running(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temp = tmp_path_factory.mktemp("r", numbered=True)
    ray = str(Path(sys.executable).with_name("ray"))
    env = environment(RAY_AUTH_MODE="disabled")
    start = [ray, "start", "--head", "--port=0", "--num-cpus=2", "--include-dashboard=false", f"--temp-dir={temp}"]
    start += ["--block"]
    head = subprocess.Popen(start, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert head.stdout is not None
        address = next(line.split("'")[1] for line in head.stdout if "--address=" in line)
        refused = workspace.run(*PROBE, f"cluster.address={address}", "budget.trials=1")
        assert refused.code == 2 and "accepts unauthenticated connections" in refused.err
        assert len(refused.err.splitlines()) == 1 and [path.name for path in workspace.path.iterdir()] == ["mlflow.db"]
        for seed in range(2):
            result = workspace.run(
                *PROBE,
                f"cluster.address={address}",
                "cluster.insecure=true",
                "cluster.max_concurrent_trials=2",
                "search=random",
                "budget.trials=4",
                f"seed={seed}",
                RAY_AUTH_MODE="disabled",
            )
            assert result.code == 0, result.err
    finally:
        os.killpg(head.pid, signal.SIGKILL)
    assert len(workspace.runs("trial")) == 8


@pytest.mark.soak
def test_a_multirun_runs_one_sweep_for_each_value(workspace: Workspace) -> None:
    result = workspace.run("-m", *PROBE, "search=random,qmc", "budget.trials=2")
    assert result.code == 0, result.err
    assert len(workspace.sweeps) == 2 and len(workspace.runs("sweep")) == 2
    assert {path.name for path in workspace.path.iterdir()} <= {"sweeps", "mlflow.db", "mlruns"}


def test_a_sweep_in_which_no_trial_keeps_the_limits_says_so_and_fails(workspace: Workspace) -> None:
    result = workspace.run(*PROBE, "search=random", "budget.trials=2", "limits.step_time_ms=1e-9")
    assert result.code == 1 and "limits   no trial keeps limits.step_time_ms ≤ 1e-09; the nearest, trial" in result.out
    (trials,) = workspace.path.glob("sweeps/*/trials.csv")
    rows = csv.DictReader(trials.read_text().splitlines())
    assert [row["beyond_limits"] for row in rows] == 2 * ["step_time_ms ≤ 1e-09"]


@pytest.mark.soak
def test_devices_measured_side_by_side_are_compared(workspace: Workspace) -> None:
    """The ranks are two processes on a CPU. On a cluster gpus=all is every GPU."""
    result = workspace.run("gpus=2", "space.m=128,256", "space.n=128", "space.k=128", "search=grid", "finals.top=0")
    assert result.code == 0, result.err
    assert "GPUs     2 measured side by side" in result.out and "between the fastest and the slowest" in result.out
    (sweep,) = workspace.sweeps
    rows = list(csv.DictReader((sweep / "gpus.csv").open()))
    assert len(rows) == 2 and {row["trials"] for row in rows} == {"2"}
    for trial in csv.DictReader((sweep / "trials.csv").open()):
        assert float(trial["tflops_slowest_gpu"]) <= float(trial["tflops_fastest_gpu"])


@pytest.mark.soak
def test_a_searched_variable_takes_effect_in_torch(workspace: Workspace) -> None:
    """Tests set OMP_NUM_THREADS=1 in the shell; the space decides over the shell."""
    product = ["space.m=128", "space.n=128", "space.k=128", "space.dtype=fp32", "hardware=cpu"]
    result = workspace.run(*product, "search=grid", "space.env.OMP_NUM_THREADS=1,2", "finals.top=0")
    assert result.code == 0, result.err
    records = [trial.user_attrs["record"] for trial in workspace.trials()]
    threads = {
        record["params"]["env.OMP_NUM_THREADS"]: record["measurements"][0]["machine_info"]["threads"]
        for record in records
    }
    assert threads == {1: 1, 2: 2}
