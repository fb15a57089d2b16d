"""Whole sweeps, as a user starts them."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
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
from tests.conftest import PROBE, Done, Place, environment, wait_for
from tests.support.factories import run_report as report

ALL_ENDINGS = "space.behaviour=ok,raise,hang,out_of_memory,killed,lie"


def outcomes(runs: list) -> Counter[str]:
    return Counter(run.data.tags["outcome"] for run in runs)


@dataclass
class Ended:
    """A sweep that several tests look at."""

    place: Place
    done: Done


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """From an empty directory: MLflow makes its tables."""
    place = Place(tmp_path_factory.mktemp("held"))
    return Ended(place, place.run(*PROBE, "budget.trials=3", "name=held"))


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Ended:
    place = Place(tmp_path_factory.mktemp("main"))
    shutil.copy(empty_store, place.path)
    words = ["budget.trials=8", "space.m=range(64,513,64)", "space.n=256", "hardware=cpu", "progress=json"]
    return Ended(place, place.run(*words))


@pytest.mark.long(22)
@pytest.mark.xdist_group("main_job")
def test_the_main_job_measures_this_machine(main_job: Ended) -> None:
    place, done = main_job.place, main_job.done
    assert done.code == 0, done.err
    assert "8 complete" in done.out and "TFLOP/s" in done.out
    assert "mlflow ui" in done.out and "budget.trials=16" in done.out  # how to look, and how to go on
    every = list(csv.DictReader((place.sweeps[0] / "trials.csv").open()))
    rows = [row for row in every if not row["round"]]
    assert len(every) == 8 + 3 * 5 and "mean of 5 rounds in turns with the others" in done.out
    assert len(rows) == 8 == len({(row["param.m"], row["param.k"]) for row in rows})
    for row in rows:
        flops = 2 * int(row["param.m"]) * 256 * int(row["param.k"])
        assert float(row["tflops"]) == pytest.approx(flops / float(row["step_time_ms"]) / 1e9, rel=1e-6)
        assert float(row["relative_error"]) < 1e-4


@pytest.mark.long(22)
@pytest.mark.xdist_group("main_job")
def test_a_search_of_products_leaves_its_rate_behind_and_the_leaderboard_shows_it(main_job: Ended) -> None:
    (kept,) = ceilings.read(main_job.place.path)
    assert kept.dtype == "fp32" and kept.method == "mean of 5 rounds"
    m, n, k = map(int, kept.shape.split("x"))
    assert m % 64 == 0 and n == 256 and k > 0
    end = json.loads(main_job.done.err.strip().splitlines()[-1])
    assert kept.tflops == pytest.approx(end["finals"][0]["value"]["value"])
    table = report(main_job.place.path, "leaderboard", "--type", "fp32")
    assert kept.device in table.stdout and "mean of 5 rounds" in table.stdout


@pytest.mark.long(29)
def test_each_failure_has_its_own_outcome_and_the_sweep_goes_on(place: Place) -> None:
    words = [*PROBE, ALL_ENDINGS, "search=grid", "space.x=0", "space.y=0", "trial.timeout_s=8", "trial.retries=1"]
    done = place.run(*words, "budget.trials=6")
    assert done.code == 1, done.err
    expected = Counter({"complete": 1, "failed": 2, "timed_out": 1, "infeasible": 1, "lost": 1})
    assert place.states() == Counter({"COMPLETE": 1, "PRUNED": 1, "FAIL": 4}), done.err
    runs = place.runs("trial")
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
    assert "1 infeasible: out of memory" in done.out
    shown = re.findall(r"example: trial \d+: .*\n +its last lines: (\S+)", done.out)
    assert len(shown) == done.out.count("example: trial") == 4  # that it raised, lied, was lost, took too long
    assert "rank 0 executed x=1.0" in "".join((place.path / path).read_text() for path in shown)


@pytest.mark.long(32)
@pytest.mark.xdist_group("held")
def test_mlflow_holds_the_sweep(held: Ended) -> None:
    place = held.place
    assert held.done.code == 0, held.done.err
    (parent,) = place.runs("sweep")
    children = place.runs("trial")
    assert parent.info.status == "FINISHED" and parent.info.run_name == "held"
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert sorted(int(child.data.tags["sweeper.trial"]) for child in children) == [0, 1, 2]
    artifacts = place.path / "mlruns" / parent.info.experiment_id / parent.info.run_id / "artifacts"
    resolved = yaml.safe_load((artifacts / "config.yaml").read_text())
    assert resolved["workload"]["name"] == "probe" and resolved["budget"]["trials"] == 3
    assert {child.data.tags["sweep"] for child in children} == {"held"}
    assert all(child.data.tags["hardware"] == "cpu" and child.data.tags["device"] for child in children)
    provenance = json.loads((artifacts / "provenance.json").read_text())
    assert provenance["versions"]["torch"] and provenance["machine"]["model"]
    best = max(child.data.metrics["score"] for child in children)
    assert parent.data.metrics["best_score"] == best
    # The report comes last; on a busy machine after the driver has left.
    note, link = "mlflow.note.content", f"{parent.info.run_id}/artifacts/report.html"
    wait_for(lambda: link in place.runs("sweep")[0].data.tags[note])
    assert "| trial | x | y |" in parent.data.tags[note]
    best_results = (artifacts / "report.html").read_text().split("<h2>Best results</h2>")[1].split("</table>")[0]
    winner = next(child for child in children if child.data.metrics["score"] == best)
    assert all(f"{name}={value}" in best_results for name, value in winner.data.params.items())
    for child in children:
        folder = place.path / "mlruns" / child.info.experiment_id / child.info.run_id / "artifacts"
        record = json.loads((folder / "trial.json").read_text())
        assert record["measurements"][0]["step_times_s"] and record["params"].keys() == {"x", "y"}


@pytest.mark.long(32)
@pytest.mark.xdist_group("held")
def test_progress_for_programs(held: Ended) -> None:
    events = [json.loads(line) for line in held.done.err.splitlines()]
    assert events[-1]["event"] == "end" and events[-1]["outcomes"] == {"complete": 3} and events[-1]["exit_code"] == 0
    trials = [event for event in events if event["event"] == "trial"]
    assert [event["ended"] for event in trials] == [1, 2, 3]
    assert all(event["outcome"] == "complete" and "score" in event["metrics"] for event in trials)


@pytest.mark.long(32)
@pytest.mark.xdist_group("held")
def test_the_same_command_again_changes_nothing_and_a_larger_budget_goes_on(
    held: Ended, place: Place, say: Callable[..., Done]
) -> None:
    shutil.copytree(held.place.path / "sweeps", place.path / "sweeps")
    before = (place.sweeps[0] / "study.journal").read_bytes()
    rerun = say(*PROBE, "budget.trials=3", "name=held")
    assert rerun.code == 0 and "3 complete" in rerun.out
    assert (place.sweeps[0] / "study.journal").read_bytes() == before
    assert len(place.runs("trial")) == 3  # another store gets all of it
    assert place.run(*PROBE, "budget.trials=5", "name=held").code == 0
    assert place.states() == {"COMPLETE": 5}
    assert len(place.runs("trial")) == 5 and len(place.runs("sweep")) == 1


@pytest.mark.long(32)
@pytest.mark.xdist_group("held")
def test_resuming_with_another_space_names_the_difference(held: Ended, say: Callable[..., Done]) -> None:
    done = say("workload=probe", "name=held", "space.x=interval(0,1)", f"dir={held.place.path}")
    assert done.code == 2
    assert "space.x was interval(-10.0, 10.0), now interval(0.0, 1.0)" in done.err
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.soak
def test_patience_and_time_end_a_sweep(place: Place) -> None:
    done = place.run(*PROBE, "search=random", "budget.trials=null", "budget.patience=5", "name=patient")
    assert done.code == 0
    scores = [trial.value for trial in place.trials()]
    assert 5 <= len(scores) - 1 - scores.index(max(scores)) <= 6  # and one that was in flight
    started = time.monotonic()
    done = place.run(*PROBE, "budget.trials=null", "budget.time_s=2", "space.sleep_s=0.1", "name=timed")
    assert done.code == 0 and time.monotonic() - started < 30
    assert 5 <= done.err.count('"event": "trial"') <= 22


def test_a_ray_that_does_not_start_is_said_in_a_line(place: Place) -> None:
    done = place.run("workload=probe", "progress=never", RAY_TMPDIR="/proc")
    assert done.code == 1 and "stopped  Ray does not start on this machine: " in done.out + done.err
    assert "Traceback" not in done.out + done.err


@pytest.mark.long(20)
def test_a_gang_runs_one_trial_on_all_its_ranks_and_one_rank_that_fails_ends_it_for_all(place: Place) -> None:
    ledger = place.path / "ledger"
    words = [*PROBE, "gpus=2", "search=grid", "space.x=1", "space.y=0", f"space.ledger={ledger}"]
    # The pause: a reply is lost with a worker that ends while it is on its way.
    done = place.run(*words, "space.behaviour=killed,ok", "trial.retries=0", "space.sleep_s=0.3")
    assert done.code == 1, done.err
    assert outcomes(place.runs("trial")) == {"complete": 1, "lost": 1}
    assert sorted(ledger.read_text().splitlines()) == ["1.0 0.0 0", "1.0 0.0 1"]


@pytest.mark.soak
def test_a_cluster_that_is_there_is_used_and_left_standing(
    place: Place, tmp_path_factory: pytest.TempPathFactory
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
        refused = place.run(*PROBE, f"cluster.address={address}", "budget.trials=1")
        assert refused.code == 2 and "accepts unauthenticated connections" in refused.err
        assert len(refused.err.splitlines()) == 1 and [path.name for path in place.path.iterdir()] == ["mlflow.db"]
        for _ in range(2):  # the second finds it unharmed by the first
            done = place.run(
                *PROBE,
                f"cluster.address={address}",
                "cluster.insecure=true",
                "cluster.max_concurrent_trials=2",
                "search=random",
                "budget.trials=4",
                f"seed={_}",
                RAY_AUTH_MODE="disabled",
            )
            assert done.code == 0, done.err
    finally:
        os.killpg(head.pid, signal.SIGKILL)
    assert len(place.runs("trial")) == 8


@pytest.mark.soak
def test_several_sweeps_by_hydras_own_multirun(place: Place) -> None:
    done = place.run("-m", *PROBE, "search=random,qmc", "budget.trials=2")
    assert done.code == 0, done.err
    assert len(place.sweeps) == 2 and len(place.runs("sweep")) == 2
    assert {path.name for path in place.path.iterdir()} <= {"sweeps", "mlflow.db", "mlruns"}


# ── stopping ────────────────────────────────────────────────────────────────────────────────────────────────


def asked(place: Place) -> list[object]:
    return place.trials() if list(place.path.glob("sweeps/*/study.journal")) else []


def in_flight(place: Place, at_least: int = 2) -> bool:
    folder = place.path / "sweeps"
    return any(path.read_text().count('"record"') >= at_least for path in folder.glob("*/study.journal"))


def leave_at_once(place: Place, *words: str) -> None:
    """Start a sweep, and end it with two signals while a trial runs."""
    process = place.start(*words)
    wait_for(lambda: in_flight(place))
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert process.returncode == 130 and "to resume" in err
    assert place.states()["RUNNING"] > 0


SLEEPING = (*PROBE, "space.sleep_s=0.7", "trial.grace_s=60")


@pytest.mark.long(30)
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_the_second_signal_leaves_at_once_and_the_first_lets_what_is_in_flight_finish(
    place: Place, signum: int
) -> None:
    """The second start runs the trials that the first one left."""
    words = [*SLEEPING, "budget.trials=50"]
    leave_at_once(place, *words)
    left = place.states()

    process = place.start(*words)
    wait_for(lambda: in_flight(place, left["COMPLETE"] + left["RUNNING"]))
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "resume" in out and "budget.trials=50" in out
    states = place.states()
    assert set(states) == {"COMPLETE"} and left.total() <= states["COMPLETE"] < 50
    runs = place.runs("trial")
    assert {run.info.status for run in runs} == {"FINISHED"} and len(runs) == states["COMPLETE"]
    assert [run.info.status for run in place.runs("sweep")] == ["KILLED"]


@pytest.mark.soak
def test_a_sweep_that_was_left_at_once_is_completed_by_the_next_start(place: Place) -> None:
    leave_at_once(place, *SLEEPING, "budget.trials=50")
    wanted = place.states()["COMPLETE"] + 3
    done = place.run(*SLEEPING, f"budget.trials={wanted}")
    assert done.code == 0, done.err
    assert place.states() == {"COMPLETE": wanted} and len(place.runs("trial")) == wanted
    assert {run.info.status for run in place.runs("trial")} == {"FINISHED"}
    assert [run.info.status for run in place.runs("sweep")] == ["FINISHED"]


@pytest.mark.soak
def test_after_the_grace_what_is_in_flight_is_cancelled_and_tried_again(place: Place) -> None:
    ledger = place.path / "ledger"
    words = [*PROBE, "budget.trials=2", "trial.grace_s=0.5", f"space.ledger={ledger}"]
    process = place.start(*words, "space.sleep_s=60", "name=one")
    wait_for(lambda: len(asked(place)) == 2)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert outcomes(place.runs("trial")) == {"cancelled": 2}
    assert place.states() == {"FAIL": 2}
    cancelled = {tuple(trial.params.values()) for trial in place.trials()}
    process = place.start(*words, "space.sleep_s=60", "name=one")
    wait_for(lambda: len(asked(place)) == 4)
    process.kill()
    process.communicate()
    assert {tuple(trial.params.values()) for trial in place.trials()[2:]} == cancelled


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────────


def on_a_terminal(place: Place, *words: str, columns: int, **more: str) -> str:
    """All that a terminal of this width was sent."""
    leader, follower = pty.openpty()
    env = environment(TERM="xterm-256color", COLUMNS=str(columns), LINES="24", **more)
    process = subprocess.Popen(
        place.command(*words),
        cwd=place.path,
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
def test_a_terminal_gets_one_block_that_is_redrawn(place: Place) -> None:
    shown = on_a_terminal(place, "workload=probe", "budget.trials=6", "space.sleep_s=0.3", columns=60)
    assert "\x1b[1A" in shown or "\x1b[2K" in shown  # moves up and clears: redrawn in place
    assert "6 complete" in shown and "worker 1" in shown and "left" in shown
    assert "\x1b[32m" in shown
    plain = on_a_terminal(place, "workload=probe", "budget.trials=6", "seed=5", columns=60, NO_COLOR="1")
    assert "\x1b[32m" not in plain and "6 complete" in plain


@pytest.mark.soak
def test_elsewhere_it_is_plain_lines_and_results_stand_apart(place: Place) -> None:
    done = place.run("workload=probe", "budget.trials=5")
    assert "\x1b" not in done.err + done.out
    assert "5/5 trials: 5 complete" in done.err
    assert "trial" in done.out and "new best" not in done.out
    quiet = place.run("workload=probe", "budget.trials=5", "seed=2", "progress=never")
    assert "trials:" not in quiet.err and "5 complete" in quiet.out


def test_help_shows_the_groups_and_worked_commands(say: Callable[..., Done]) -> None:
    done = say("--help")
    assert done.code == 0
    for words in (
        "parallel, precision",
        "llama3_8b",
        "matmul_layers, ",
        "cmaes, gp, grid, qmc, random, tpe",
        "mi300x",
        "budget:",
    ):
        assert words in done.out
    assert done.out.count("python -m sweeper ") >= 4


@pytest.mark.soak
def test_devices_measured_at_once_are_told_apart(place: Place) -> None:
    """Two processes here; on a cluster gpus=all is every GPU."""
    done = place.run("gpus=2", "space.m=128,256", "space.n=128", "space.k=128", "search=grid", "finals.top=0")
    assert done.code == 0, done.err
    assert "GPUs     2 measured side by side" in done.out and "between the fastest and the slowest" in done.out
    (sweep,) = place.sweeps
    rows = list(csv.DictReader((sweep / "gpus.csv").open()))
    assert len(rows) == 2 and {row["trials"] for row in rows} == {"2"}
    for trial in csv.DictReader((sweep / "trials.csv").open()):
        assert float(trial["tflops_slowest_gpu"]) <= float(trial["tflops_fastest_gpu"])


@pytest.mark.soak
def test_a_worker_that_refused_before_it_tried_goes_on(place: Place) -> None:
    words = ["workload=precision_casts", "space.format=fp8_tensorwise,fp8_rowwise", "space.direction=columns,rows"]
    done = place.run(*words, "search=grid", "space.rows=128", "space.columns=128")
    assert "1 infeasible: fp8_tensorwise has one scale for the whole matrix" in done.out
    runs = place.runs("trial")
    assert Counter(run.data.tags["outcome"] for run in runs) == {"complete": 3, "infeasible": 1}
    assert len({run.data.tags["pid"] for run in runs}) == 1
