"""Sweeps whose trials fail: each kind of failure, retries, and what stops a sweep."""

import json
import re
import shlex
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PROBE, CommandResult, Workspace

SECRET = "hunter2hunter2"
ALL_BEHAVIOURS = "space.behaviour=ok,raise,hang,out_of_memory,killed,lie"


@pytest.mark.long(29)
def test_each_kind_of_failure_has_an_outcome_and_the_sweep_continues(workspace: Workspace) -> None:
    overrides = [
        *PROBE,
        ALL_BEHAVIOURS,
        "search=grid",
        "space.x=0",
        "space.y=0",
        "trial.timeout_s=20",  # a new worker imports torch meanwhile
        "trial.retries=1",
        "finals.top=1",
        "finals.rounds=2",
    ]
    result = workspace.run(*overrides, "budget.trials=6")
    assert result.code == 1, result.err
    expected = Counter({"complete": 1, "failed": 2, "timed_out": 1, "infeasible": 1, "lost": 1})
    assert workspace.states() == Counter({"COMPLETE": 1, "PRUNED": 1, "FAIL": 4}), result.err
    runs = workspace.runs("trial")
    assert workspace.outcomes() == expected
    by_behaviour = {run.data.params["behaviour"]: run for run in runs}
    assert by_behaviour["lie"].data.tags["reason"] == "ParameterMismatch: rank 0 executed x=1.0, requested 0.0"
    assert "told to raise" in by_behaviour["raise"].data.tags["reason"]
    assert "can't allocate memory" in by_behaviour["out_of_memory"].data.tags["reason"]
    assert by_behaviour["killed"].data.tags["attempts"] == "2"
    assert by_behaviour["ok"].info.status == "FINISHED" and by_behaviour["hang"].info.status == "KILLED"
    assert all("score" not in run.data.metrics for run in runs if run.data.tags["outcome"] != "complete")
    assert "remeasuring" not in result.err  # a single complete trial has been measured alone anyway
    # A worker that failed is not used again.
    pids = [run.data.tags["pid"] for run in runs]
    assert len(set(pids)) >= 5
    assert "1 infeasible: out of memory" in result.out
    shown = re.findall(r"example: trial \d+: .*\n +its last lines: (\S+)", result.out)
    assert len(shown) == result.out.count("example: trial") == 4  # raised, wrong parameters, lost, timed out
    assert "rank 0 executed x=1.0" in "".join((workspace.path / path).read_text() for path in shown)


@dataclass
class BrokenSweep:
    """A command that fails everywhere and prints a secret, until it is mended and its trials are tried again."""

    workspace: Workspace
    program: Path
    stopped: CommandResult
    states: Counter[str]  # of the trials of the run that stopped
    retried: CommandResult


@pytest.fixture(scope="module")
def broken_sweep(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> BrokenSweep:
    workspace = Workspace(tmp_path_factory.mktemp("broken"))
    shutil.copy(empty_store, workspace.path)
    program = workspace.path / "train.sh"
    program.write_text("echo $2 $SOME_TOKEN; echo config wrong; exit 3\n")
    run = f"command.run=[sh,{program},'{{x}}','token={SECRET}']"
    arguments = ["workload=command", run, "command.log={step_time_s: 'step (.*)'}"]
    arguments += ["command.warmup=0", "command.steps=1", "space.x=range(0,30)", "search=random"]
    arguments += ["workload.objective=step_time_ms", "workload.direction=minimize", "progress=json"]
    arguments += [
        "finals.top=1",
        "finals.rounds=2",
        "budget.same_failures=3",
        f"command.environment.SOME_TOKEN={SECRET}",
    ]
    stopped, states = workspace.run(*arguments, "budget.trials=4"), workspace.states()
    program.write_text("echo step 0.1\n")
    retried = workspace.run(*arguments, "budget.trials=5", "retry=failed")
    return BrokenSweep(workspace, program, stopped, states, retried)


@pytest.mark.long(30)
@pytest.mark.xdist_group("broken_sweep")
def test_a_sweep_that_is_broken_everywhere_stops(broken_sweep: BrokenSweep) -> None:
    stopped = broken_sweep.stopped
    assert stopped.code == 1 and broken_sweep.states == {"FAIL": 3, "RUNNING": 1}, stopped.err
    reason = "3 trials failed for the same reason: the program ended with exit code 3: config wrong"
    assert f"stopped  {reason}\n" in stopped.out
    retry = next(line for line in stopped.out.splitlines() if line.startswith("retry    "))
    assert shlex.split(retry)[-1] == "retry=failed"


@pytest.mark.long(30)
@pytest.mark.xdist_group("broken_sweep")
def test_a_retry_of_failed_trials_with_a_larger_budget_continues_the_sweep(broken_sweep: BrokenSweep) -> None:
    workspace, retried = broken_sweep.workspace, broken_sweep.retried
    assert retried.code == 0 and "5 complete" in retried.out and "retried  3 trials" in retried.out, retried.err
    assert workspace.states() == {"FAIL": 3, "COMPLETE": 5 + 2}
    assert len(workspace.runs("trial")) == 3 + 5 + 2 and len(workspace.runs("sweep")) == 1
    runs = {run.data.tags["sweeper.trial"]: run.data.tags for run in workspace.runs("trial")}
    attempts = [tags for tags in runs.values() if "retried_as" in tags]
    assert {tags["outcome"] for tags in attempts} == {"failed"} and len(attempts) == 3
    for tags in attempts:
        assert runs[tags["retried_as"]]["retry_of"] == tags["sweeper.trial"]
        assert f"file {broken_sweep.program} was " in runs[tags["retried_as"]]["changed"]
    end = json.loads(retried.err.splitlines()[-1])
    assert end["outcomes"] == {"complete": 5} and {"start", "trials", "recording", "report"} <= end["took_s"].keys()


@pytest.mark.long(30)
@pytest.mark.xdist_group("broken_sweep")
def test_one_finalist_is_measured_again_where_there_are_others(broken_sweep: BrokenSweep) -> None:
    """To know its interval. The single complete trial of the sweep above is not."""
    assert "no verdict: only trial" in broken_sweep.retried.out and "remeasuring" in broken_sweep.retried.err
    assert "remeasuring" not in broken_sweep.stopped.err


@pytest.mark.long(30)
@pytest.mark.xdist_group("broken_sweep")
def test_no_file_store_or_terminal_holds_a_secret_of_the_command_line(broken_sweep: BrokenSweep) -> None:
    for result in (broken_sweep.stopped, broken_sweep.retried):
        assert SECRET not in result.out + result.err, result.out + result.err
    for path in broken_sweep.workspace.path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    assert {oct(path.stat().st_mode)[-3:] for path in broken_sweep.workspace.sweeps} == {"700"}


def test_a_folder_that_ray_cannot_use_is_refused_in_one_line(workspace: Workspace) -> None:
    result = workspace.run("workload=probe", "progress=never", RAY_TMPDIR="/proc")
    assert result.code == 2 and result.out == ""
    assert result.err == "sweeper: RAY_TMPDIR=/proc: has 0 MiB free, Ray needs 8; set RAY_TMPDIR to another folder\n"


@pytest.mark.long(14)
def test_a_gang_runs_a_trial_on_all_its_ranks_and_one_failed_rank_ends_it(workspace: Workspace) -> None:
    ledger = workspace.path / "ledger"
    overrides = [*PROBE, "gpus=2", "search=grid", "space.x=1", "space.y=0", f"space.ledger={ledger}"]
    overrides += ["space.env.NCCL_DEBUG=[null,WARN]", "finals.top=0"]
    # The pause: a worker that ends while it sends a reply loses the reply.
    overrides += ["space.sleep_s=0.3", "space.behaviour=ok,killed", "trial.retries=0", "budget.trials=3"]
    result = workspace.run(*overrides)
    assert result.code == 1, result.err
    assert workspace.outcomes() == {"complete": 2, "lost": 1}
    assert sorted(ledger.read_text().splitlines()) == ["1.0 0.0 0"] * 2 + ["1.0 0.0 1"] * 2
    complete = [run for run in workspace.runs("trial") if run.data.tags["outcome"] == "complete"]
    assert {run.data.params["env.NCCL_DEBUG"] for run in complete} == {"None", "WARN"}
    assert len({run.data.tags["work"] for run in complete}) == 1 and "NCCL" not in complete[0].data.tags["work"]
    records = [trial.user_attrs["record"] for trial in workspace.trials()]
    for record in records:
        executed = [measurement["executed"]["env.NCCL_DEBUG"] for measurement in record["measurements"]]
        assert executed == [record["params"]["env.NCCL_DEBUG"]] * len(executed)
    # Another environment is another worker, also for a rank that has not failed.
    pids = [{measurement["machine_info"]["pid"] for measurement in record["measurements"]} for record in records]
    assert len(set.union(*pids)) == 4


@pytest.mark.long(15)
def test_disturbed_trials_are_tried_again_at_the_end_and_what_stays_disturbed_is_inconclusive(
    workspace: Workspace,
) -> None:
    """Trials with a ledger are disturbed once, the others always."""
    ledger = workspace.path / "ledger"
    sweep = [*PROBE, "search=grid", "space.x=range(0,3)", "space.y=0", "finals.top=2", "finals.rounds=2"]
    result = workspace.run(*sweep, "space.behaviour=disturbed", f"space.ledger=['',{ledger}]")
    assert result.code == 1 and "3 complete, 3 inconclusive" in result.out, result.out + result.err
    assert "again trials 0, 1, 2, 3, 4, 5, which other processes disturbed" in result.err
    assert json.loads(result.err.splitlines()[-1])["outcomes"] == {"complete": 3, "inconclusive": 3}
    retried = [run.data.tags for run in workspace.runs("trial") if "retried_as" in run.data.tags]
    assert {tags["outcome"] for tags in retried} == {"inconclusive"}
    assert {tags["sweeper.trial"] for tags in retried} >= set("012345")  # and those that were disturbed again
    assert "over a fifth of the trials are inconclusive" in result.out
    retry = next(line for line in result.out.splitlines() if line.startswith("retry    "))
    assert shlex.split(retry)[-1] == "retry=inconclusive"


@pytest.mark.soak
def test_a_worker_that_rejected_a_trial_before_running_it_is_used_again(workspace: Workspace) -> None:
    overrides = ["workload=precision_casts", "space.format=fp8_tensorwise,fp8_rowwise", "space.direction=columns,rows"]
    result = workspace.run(*overrides, "search=grid", "space.rows=128", "space.columns=128")
    assert "1 infeasible: fp8_tensorwise has one scale for the whole matrix" in result.out
    runs = workspace.runs("trial")
    assert workspace.outcomes() == {"complete": 3, "infeasible": 1}
    assert len({run.data.tags["pid"] for run in runs}) == 1
