"""Complete sweeps, started as a user starts them."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from sweeper.planning import ceilings
from tests.conftest import PROBE, CommandResult, Workspace, environment, wait_for
from tests.support.factories import run_report as report

ALL_BEHAVIOURS = "space.behaviour=ok,raise,hang,out_of_memory,killed,lie"


def outcomes(runs: list) -> Counter[str]:
    return Counter(run.data.tags["outcome"] for run in runs)


@dataclass
class FinishedSweep:
    """A sweep that ended, and which several tests read."""

    workspace: Workspace
    result: CommandResult


@pytest.fixture(scope="session")
def finished_sweep(tmp_path_factory: pytest.TempPathFactory) -> FinishedSweep:
    """From a directory without a store, in which MLflow makes its tables, and with a folder called workloads."""
    workspace = Workspace(tmp_path_factory.mktemp("held"))
    folder = workspace.path / "workloads"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    return FinishedSweep(workspace, workspace.run(*PROBE, "budget.trials=3", "name=held"))


@pytest.fixture(scope="session")
def matmul_sweep(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> FinishedSweep:
    workspace = Workspace(tmp_path_factory.mktemp("main"))
    shutil.copy(empty_store, workspace.path)
    overrides = ["budget.trials=8", "space.m=range(64,513,64)", "space.n=256", "hardware=cpu", "progress=json"]
    return FinishedSweep(workspace, workspace.run(*overrides))


@pytest.mark.long(22)
@pytest.mark.xdist_group("matmul_sweep")
def test_the_default_workload_measures_this_machine(matmul_sweep: FinishedSweep) -> None:
    workspace, result = matmul_sweep.workspace, matmul_sweep.result
    assert result.code == 0, result.err
    assert "8 complete" in result.out and "TFLOP/s" in result.out
    assert "mlflow ui" in result.out and "budget.trials=16" in result.out  # the next commands
    all_rows = list(csv.DictReader((workspace.sweeps[0] / "trials.csv").open()))
    rows = [row for row in all_rows if not row["round"]]
    assert len(all_rows) == 8 + 3 * 5 and "mean of 5 rounds in turns with the others" in result.out
    assert len(rows) == 8 == len({(row["param.m"], row["param.k"]) for row in rows})
    for row in rows:
        flops = 2 * int(row["param.m"]) * 256 * int(row["param.k"])
        assert float(row["tflops"]) == pytest.approx(flops / float(row["step_time_ms"]) / 1e9, rel=1e-6)
        assert float(row["relative_error"]) < 1e-4
        assert (row["param.n"], row["param.dtype"], row["param.accumulation"]) == ("256", "fp32", "reduced")
    run = workspace.runs("trial")[0]
    assert {"n": "256", "dtype": "fp32", "backend": "torch"}.items() <= run.data.params.items()
    assert json.loads(run.data.tags["work"]) | {"m": "searched", "n": "256"} == json.loads(run.data.tags["work"])
    assert "fixed    n=256" in result.out


@pytest.mark.long(22)
@pytest.mark.xdist_group("matmul_sweep")
def test_a_matmul_sweep_records_its_rate_for_the_leaderboard(matmul_sweep: FinishedSweep) -> None:
    (kept,) = ceilings.read(matmul_sweep.workspace.path)
    assert kept.dtype == "fp32" and kept.method == "mean of 5 rounds"
    m, n, k = map(int, kept.shape.split("x"))
    assert m % 64 == 0 and n == 256 and k > 0
    end = json.loads(matmul_sweep.result.err.strip().splitlines()[-1])
    assert kept.tflops == pytest.approx(end["finals"][0]["value"]["value"])
    table = report(matmul_sweep.workspace.path, "leaderboard", "--type", "fp32")
    assert kept.device in table.stdout and "mean of 5 rounds" in table.stdout


@pytest.mark.long(29)
def test_each_kind_of_failure_has_an_outcome_and_the_sweep_continues(workspace: Workspace) -> None:
    overrides = [
        *PROBE,
        ALL_BEHAVIOURS,
        "search=grid",
        "space.x=0",
        "space.y=0",
        "trial.timeout_s=8",
        "trial.retries=1",
    ]
    result = workspace.run(*overrides, "budget.trials=6")
    assert result.code == 1, result.err
    expected = Counter({"complete": 1, "failed": 2, "timed_out": 1, "infeasible": 1, "lost": 1})
    assert workspace.states() == Counter({"COMPLETE": 1, "PRUNED": 1, "FAIL": 4}), result.err
    runs = workspace.runs("trial")
    assert outcomes(runs) == expected
    by_behaviour = {run.data.params["behaviour"]: run for run in runs}
    assert by_behaviour["lie"].data.tags["reason"] == "ParameterMismatch: rank 0 executed x=1.0, requested 0.0"
    assert "told to raise" in by_behaviour["raise"].data.tags["reason"]
    assert "can't allocate memory" in by_behaviour["out_of_memory"].data.tags["reason"]
    assert by_behaviour["killed"].data.tags["attempts"] == "2"
    assert by_behaviour["ok"].info.status == "FINISHED" and by_behaviour["hang"].info.status == "KILLED"
    assert all("score" not in run.data.metrics for run in runs if run.data.tags["outcome"] != "complete")
    # A worker that failed is not used again.
    pids = [run.data.tags["pid"] for run in runs]
    assert len(set(pids)) >= 5
    assert "1 infeasible: out of memory" in result.out
    shown = re.findall(r"example: trial \d+: .*\n +its last lines: (\S+)", result.out)
    assert len(shown) == result.out.count("example: trial") == 4  # raised, wrong parameters, lost, timed out
    assert "rank 0 executed x=1.0" in "".join((workspace.path / path).read_text() for path in shown)


@pytest.mark.long(32)
@pytest.mark.xdist_group("finished_sweep")
def test_a_users_folder_called_workloads_does_not_hide_the_package(finished_sweep: FinishedSweep) -> None:
    assert (finished_sweep.workspace.path / "workloads" / "__init__.py").exists()
    assert finished_sweep.result.code == 0 and "3 complete" in finished_sweep.result.out, finished_sweep.result.err


@pytest.mark.long(32)
@pytest.mark.xdist_group("finished_sweep")
def test_mlflow_holds_the_sweep(finished_sweep: FinishedSweep) -> None:
    workspace = finished_sweep.workspace
    assert finished_sweep.result.code == 0, finished_sweep.result.err
    (parent,) = workspace.runs("sweep")
    children = workspace.runs("trial")
    assert parent.info.status == "FINISHED" and parent.info.run_name == "held"
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert sorted(int(child.data.tags["sweeper.trial"]) for child in children) == [0, 1, 2]
    artifacts = workspace.path / "mlruns" / parent.info.experiment_id / parent.info.run_id / "artifacts"
    resolved = yaml.safe_load((artifacts / "config.yaml").read_text())
    assert resolved["workload"]["name"] == "probe" and resolved["budget"]["trials"] == 3
    assert {child.data.tags["sweep"] for child in children} == {"held"}
    assert all(child.data.tags["hardware"] == "cpu" and child.data.tags["device"] for child in children)
    provenance = json.loads((artifacts / "provenance.json").read_text())
    assert provenance["versions"]["torch"] and provenance["machine"]["model"]
    best = max(child.data.metrics["score"] for child in children)
    assert parent.data.metrics["best_score"] == best
    # The report comes last; on a busy machine after the driver has exited.
    note, link = "mlflow.note.content", f"{parent.info.run_id}/artifacts/report.html"
    wait_for(lambda: link in workspace.runs("sweep")[0].data.tags[note])
    assert "| trial | x | y |" in parent.data.tags[note]
    best_results = (artifacts / "report.html").read_text().split("<h2>Best results</h2>")[1].split("</table>")[0]
    winner = next(child for child in children if child.data.metrics["score"] == best)
    assert all(f"{name}={winner.data.params[name]}" in best_results for name in ("x", "y"))
    for child in children:
        folder = workspace.path / "mlruns" / child.info.experiment_id / child.info.run_id / "artifacts"
        record = json.loads((folder / "trial.json").read_text())
        assert record["measurements"][0]["step_times_s"] and record["params"].keys() == {"x", "y"}


@pytest.mark.long(32)
@pytest.mark.xdist_group("finished_sweep")
def test_progress_json_prints_one_event_per_line(finished_sweep: FinishedSweep) -> None:
    events = [json.loads(line) for line in finished_sweep.result.err.splitlines()]
    assert events[-1]["event"] == "end" and events[-1]["outcomes"] == {"complete": 3} and events[-1]["exit_code"] == 0
    trials = [event for event in events if event["event"] == "trial"]
    assert [event["ended"] for event in trials] == [1, 2, 3]
    assert all(event["outcome"] == "complete" and "score" in event["metrics"] for event in trials)


@pytest.mark.long(32)
@pytest.mark.xdist_group("finished_sweep")
def test_the_same_command_again_changes_nothing_and_a_larger_budget_continues(
    finished_sweep: FinishedSweep, workspace: Workspace, run_cli: Callable[..., CommandResult]
) -> None:
    shutil.copytree(finished_sweep.workspace.path / "sweeps", workspace.path / "sweeps")
    before = (workspace.sweeps[0] / "study.journal").read_bytes()
    rerun = run_cli(*PROBE, "budget.trials=3", "name=held")
    assert rerun.code == 0 and "3 complete" in rerun.out
    assert (workspace.sweeps[0] / "study.journal").read_bytes() == before
    assert len(workspace.runs("trial")) == 3  # another store gets all trials
    assert workspace.run(*PROBE, "budget.trials=5", "name=held").code == 0
    assert workspace.states() == {"COMPLETE": 5}
    assert len(workspace.runs("trial")) == 5 and len(workspace.runs("sweep")) == 1


@pytest.mark.long(32)
@pytest.mark.xdist_group("finished_sweep")
def test_resuming_with_another_space_names_the_difference(
    finished_sweep: FinishedSweep, run_cli: Callable[..., CommandResult]
) -> None:
    result = run_cli("workload=probe", "name=held", "space.x=interval(0,1)", f"dir={finished_sweep.workspace.path}")
    assert result.code == 2
    assert "space.x was interval(-10.0, 10.0), now interval(0.0, 1.0)" in result.err
    assert len(result.err.strip().splitlines()) == 1


@pytest.mark.soak
def test_a_sweep_ends_by_patience_or_time(workspace: Workspace) -> None:
    result = workspace.run(*PROBE, "search=random", "budget.trials=null", "budget.patience=5", "name=patient")
    assert result.code == 0
    scores = [trial.value for trial in workspace.trials()]
    assert 5 <= len(scores) - 1 - scores.index(max(scores)) <= 6  # and one that was in flight
    # The budget includes the start of the worker, which takes seconds on a busy machine.
    result = workspace.run(*PROBE, "budget.trials=null", "budget.time_s=12", "space.sleep_s=0.1", "name=timed")
    assert result.code == 0, result.err
    assert 5 <= result.err.count('"event": "trial"') <= 122


@pytest.mark.long(30)
def test_a_sweep_that_is_broken_everywhere_stops_and_its_retry_completes(workspace: Workspace) -> None:
    program = workspace.path / "train.sh"
    program.write_text("echo config wrong; exit 3\n")
    arguments = ["workload=command", f"command.run=[sh,{program},'{{x}}']", "command.log={step_time_s: 'step (.*)'}"]
    arguments += ["command.warmup=0", "command.steps=1", "space.x=range(0,30)", "search=random", "finals.top=0"]
    arguments += ["workload.objective=step_time_ms", "workload.direction=minimize", "budget.trials=4", "progress=json"]
    arguments.append("budget.same_failures=3")
    stopped = workspace.run(*arguments)
    assert stopped.code == 1 and workspace.states() == {"FAIL": 3, "RUNNING": 1}, stopped.err
    reason = "3 trials failed for the same reason: the program ended with exit code 3: config wrong"
    assert f"stopped  {reason}\n" in stopped.out
    retry = next(line for line in stopped.out.splitlines() if line.startswith("retry    "))
    assert shlex.split(retry)[-1] == "retry=failed"

    program.write_text("echo step 0.1\n")
    retried = workspace.run(*arguments, "retry=failed")
    assert retried.code == 0 and "4 complete" in retried.out and "retried  3 trials" in retried.out, retried.err
    assert workspace.states() == {"FAIL": 3, "COMPLETE": 4}
    runs = {run.data.tags["sweeper.trial"]: run.data.tags for run in workspace.runs("trial")}
    attempts = [tags for tags in runs.values() if "retried_as" in tags]
    assert {tags["outcome"] for tags in attempts} == {"failed"} and len(attempts) == 3
    for tags in attempts:
        assert runs[tags["retried_as"]]["retry_of"] == tags["sweeper.trial"]
        assert f"file {program} was " in runs[tags["retried_as"]]["changed"]
    end = json.loads(retried.err.splitlines()[-1])
    assert end["outcomes"] == {"complete": 4} and {"start", "trials", "recording", "report"} <= end["took_s"].keys()


def test_a_ray_that_does_not_start_gives_one_line(workspace: Workspace) -> None:
    result = workspace.run("workload=probe", "progress=never", RAY_TMPDIR="/proc")
    assert result.code == 1 and "stopped  Ray does not start on this machine: " in result.out + result.err
    assert "Traceback" not in result.out + result.err


@pytest.mark.long(20)
def test_a_gang_runs_a_trial_on_all_its_ranks_and_one_failed_rank_ends_it(workspace: Workspace) -> None:
    ledger = workspace.path / "ledger"
    overrides = [*PROBE, "gpus=2", "search=grid", "space.x=1", "space.y=0", f"space.ledger={ledger}"]
    # The pause: a worker that ends while it sends a reply loses the reply.
    result = workspace.run(*overrides, "space.behaviour=killed,ok", "trial.retries=0", "space.sleep_s=0.3")
    assert result.code == 1, result.err
    assert outcomes(workspace.runs("trial")) == {"complete": 1, "lost": 1}
    assert sorted(ledger.read_text().splitlines()) == ["1.0 0.0 0", "1.0 0.0 1"]


@pytest.mark.soak
def test_an_existing_cluster_is_used_and_keeps_running(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temp = tmp_path_factory.mktemp("r", numbered=True)
    ray = str(Path(sys.executable).with_name("ray"))
    env = environment(RAY_AUTH_MODE="disabled")
    start = [
        ray,
        "start",
        "--head",
        "--port=0",
        "--num-cpus=2",
        "--include-dashboard=false",
        f"--temp-dir={temp}",
        "--block",
    ]
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


# ── stopping ────────────────────────────────────────────────────────────────────────────────────────────────


def list_trials(workspace: Workspace) -> list[object]:
    return workspace.trials() if list(workspace.path.glob("sweeps/*/study.journal")) else []


def in_flight(workspace: Workspace, at_least: int = 2) -> bool:
    folder = workspace.path / "sweeps"
    return any(path.read_text().count('"record"') >= at_least for path in folder.glob("*/study.journal"))


def interrupt_twice(workspace: Workspace, *overrides: str) -> None:
    """Start a sweep and send it two signals while a trial runs."""
    process = workspace.start(*overrides)
    wait_for(lambda: in_flight(workspace))
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert process.returncode == 130 and "to resume" in err
    assert workspace.states()["RUNNING"] > 0


SLEEPING = (*PROBE, "space.sleep_s=0.7", "trial.grace_s=60")


@pytest.mark.long(30)
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_one_signal_lets_running_trials_finish_and_a_second_exits_at_once(workspace: Workspace, signum: int) -> None:
    """The second start runs the trials that the first did not finish."""
    overrides = [*SLEEPING, "budget.trials=50"]
    interrupt_twice(workspace, *overrides)
    left = workspace.states()

    process = workspace.start(*overrides)
    wait_for(lambda: in_flight(workspace, left["COMPLETE"] + left["RUNNING"]))
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "resume" in out and "budget.trials=50" in out
    states = workspace.states()
    assert set(states) == {"COMPLETE"} and left.total() <= states["COMPLETE"] < 50
    runs = workspace.runs("trial")
    assert {run.info.status for run in runs} == {"FINISHED"} and len(runs) == states["COMPLETE"]
    assert [run.info.status for run in workspace.runs("sweep")] == ["KILLED"]


@pytest.mark.soak
def test_a_sweep_that_two_signals_ended_is_completed_by_the_next_start(workspace: Workspace) -> None:
    interrupt_twice(workspace, *SLEEPING, "budget.trials=50")
    expected_trials = workspace.states()["COMPLETE"] + 3
    result = workspace.run(*SLEEPING, f"budget.trials={expected_trials}")
    assert result.code == 0, result.err
    assert workspace.states() == {"COMPLETE": expected_trials} and len(workspace.runs("trial")) == expected_trials
    assert {run.info.status for run in workspace.runs("trial")} == {"FINISHED"}
    assert [run.info.status for run in workspace.runs("sweep")] == ["FINISHED"]


@pytest.mark.soak
def test_trials_that_run_longer_than_the_grace_are_cancelled_and_repeated(workspace: Workspace) -> None:
    ledger = workspace.path / "ledger"
    overrides = [*PROBE, "budget.trials=2", "trial.grace_s=0.5", f"space.ledger={ledger}"]
    process = workspace.start(*overrides, "space.sleep_s=60", "name=one")
    wait_for(lambda: len(list_trials(workspace)) == 2)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert outcomes(workspace.runs("trial")) == {"cancelled": 2}
    assert workspace.states() == {"FAIL": 2}
    cancelled = {tuple(trial.params.values()) for trial in workspace.trials()}
    process = workspace.start(*overrides, "space.sleep_s=60", "name=one")
    wait_for(lambda: len(list_trials(workspace)) == 4)
    process.kill()
    process.communicate()
    assert {tuple(trial.params.values()) for trial in workspace.trials()[2:]} == cancelled


# ── output ───────────────────────────────────────────────────────────────────────────────────────────


def run_in_terminal(workspace: Workspace, *overrides: str, columns: int, **more: str) -> str:
    """Run a sweep in a terminal of this width; return all that it was sent."""
    leader, follower = pty.openpty()
    env = environment(TERM="xterm-256color", COLUMNS=str(columns), LINES="24", **more)
    process = subprocess.Popen(
        workspace.command(*overrides),
        cwd=workspace.path,
        env=env,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            if not (part := os.read(leader, 65536)):
                break
        except OSError:
            break
        seen += part
    assert process.wait(timeout=60) == 0
    return seen.decode()


@pytest.mark.soak
def test_a_terminal_shows_one_block_that_is_redrawn(workspace: Workspace) -> None:
    shown = run_in_terminal(workspace, "workload=probe", "budget.trials=6", "space.sleep_s=0.3", columns=60)
    assert "\x1b[1A" in shown or "\x1b[2K" in shown  # moves up and clears: redrawn in place
    assert "6 complete" in shown and "worker 1" in shown and "left" in shown
    assert "\x1b[32m" in shown
    plain = run_in_terminal(workspace, "workload=probe", "budget.trials=6", "seed=5", columns=60, NO_COLOR="1")
    assert "\x1b[32m" not in plain and "6 complete" in plain


@pytest.mark.soak
def test_without_a_terminal_progress_is_plain_lines_on_stderr_and_results_on_stdout(workspace: Workspace) -> None:
    result = workspace.run("workload=probe", "budget.trials=5")
    assert "\x1b" not in result.err + result.out
    assert "5/5 trials: 5 complete" in result.err
    assert "trial" in result.out and "new best" not in result.out
    quiet = workspace.run("workload=probe", "budget.trials=5", "seed=2", "progress=never")
    assert "trials:" not in quiet.err and "5 complete" in quiet.out


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
def test_a_worker_that_rejected_a_trial_before_running_it_is_used_again(workspace: Workspace) -> None:
    overrides = ["workload=precision_casts", "space.format=fp8_tensorwise,fp8_rowwise", "space.direction=columns,rows"]
    result = workspace.run(*overrides, "search=grid", "space.rows=128", "space.columns=128")
    assert "1 infeasible: fp8_tensorwise has one scale for the whole matrix" in result.out
    runs = workspace.runs("trial")
    assert Counter(run.data.tags["outcome"] for run in runs) == {"complete": 3, "infeasible": 1}
    assert len({run.data.tags["pid"] for run in runs}) == 1
