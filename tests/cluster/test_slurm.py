"""The script for Slurm in real Slurm: its controller and daemons on nodes of their own, with counted GPUs.

The GPUs are stand-ins for MI300X; Slurm names two of each node's in `ROCR_VISIBLE_DEVICES`.
"""

import json
import shlex
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Workspace, wait_for
from tests.support.amd import stand_in_environment
from tests.support.virtual_slurm import GPUS, Slurm, missing_slurm

SCRIPT = str(REPOSITORY / "launch" / "slurm" / "sweep.sbatch")
NODES = ("n1", "n2", "n3", "n4")
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL")
PROBE = ["workload=probe", "hardware=mi300x", "search=random", "progress=never", "finals.top=0"]


class Job:
    """A folder from which the script is submitted, with the sweep's results and ledger."""

    def __init__(self, slurm: Slurm, path: Path) -> None:
        self.slurm, self.workspace, self.ledger = slurm, Workspace(path), path / "ledger"

    def submit(self, *overrides: str, nodes: int = 1, options: tuple[str, ...] = ()) -> str:
        sizes = [f"--nodes={nodes}", f"--gpus-per-node={GPUS}", *options]
        return self.slurm.submit(self.workspace.path, *sizes, SCRIPT, *PROBE, f"space.ledger={self.ledger}", *overrides)

    def end(self, job: str) -> str:
        return self.slurm.await_state(job, *ENDED)

    def log(self, job: str) -> str:
        return (self.workspace.path / f"sweeper-{job}.log").read_text()

    def lines(self) -> list[str]:
        """Return a line for each completed run of a rank."""
        return self.ledger.read_text().splitlines() if self.ledger.exists() else []


@pytest.fixture(scope="module")
def slurm(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := missing_slurm():
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm"), NODES, stand_in_environment()) as slurm:
        yield slurm


@pytest.fixture
def job(slurm: Slurm, request: pytest.FixtureRequest) -> Job:
    path = slurm.folder / request.node.name.replace("[", "-").rstrip("]")
    path.mkdir()
    return Job(slurm, path)


@pytest.mark.long(26)
def test_a_job_runs_on_all_its_nodes_and_leaves_nothing(slurm: Slurm, job: Job) -> None:
    number = job.submit("gpus=4", "budget.trials=3", "space.sleep_s=0.5", nodes=2)
    (state,) = wait_for(lambda: list(slurm.folder.glob(f".sweeper-{number}-*")))
    token = wait_for(lambda: (state / "token").exists() and (state / "token").read_text().strip())
    assert stat.S_IMODE(state.stat().st_mode) == 0o700 and stat.S_IMODE((state / "token").stat().st_mode) == 0o600
    assert job.end(number) == "COMPLETED", job.log(number)
    log = job.log(number)
    assert "3 complete" in log and token not in log and "error" not in log, log
    ranks = Counter(line.split()[2] for line in job.lines())
    assert ranks == {"0": 3, "1": 3, "2": 3, "3": 3}  # each node has two GPUs: a gang of four has room only on both
    assert not list(slurm.folder.glob(".sweeper-*"))
    wait_for(lambda: not any(node.pids_of("ray::") for node in slurm.network.nodes.values()))


@pytest.mark.soak
def test_a_gang_trains_over_four_nodes_by_gloo(slurm: Slurm, job: Job) -> None:
    sizes = ["space.model=llama_tiny", "space.sequence_length=64", "space.global_batch=8", "space.micro_batch=1"]
    layout = ["space.dp_replicate=1", "space.dp_shard=8", "space.tp=1", "space.cp=1", "space.pp=1", "space.dtype=fp32"]
    others = ["space.stages_per_rank=1", "space.schedule=1f1b", "space.checkpointing=none", "space.compile=false"]
    others += ["space.reshard_after_forward=true", "hardware=cpu", "gpus=8", "budget.trials=1", "progress=never"]
    sizes_of_job = ["--nodes=4", f"--gpus-per-node={GPUS}"]
    number = slurm.submit(job.workspace.path, *sizes_of_job, SCRIPT, "workload=parallel", *sizes, *layout, *others)
    assert job.end(number) == "COMPLETED", job.log(number)
    (trial,) = job.workspace.runs("trial")
    assert trial.data.tags["outcome"] == "complete" and len(set(trial.data.tags["node_ids"].split())) == 4


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_acceptance_measures_the_nodes_of_a_job_and_its_verdict_is_the_exit_code(slurm: Slurm, job: Job) -> None:
    sizes = ["--nodes=2", f"--gpus-per-node={GPUS}"]
    number = slurm.submit(job.workspace.path, *sizes, SCRIPT, "accept", "hardware=cpu", "profile=quick")
    slurm.await_state(number, *ENDED, timeout_s=500)
    (path,) = job.workspace.path.glob("acceptance/*/accept.json")
    record, log = json.loads(path.read_text()), job.log(number)
    assert record["sentence"] in log and {*record["nodes"]} == {"n1", "n2"}, log
    assert {row["scope"] for row in record["results"]} == {"device", "node", "link"}
    code = {"pass": 0, "fail": 1, "inconclusive": 3}[record["verdict"]]  # nodes of one machine disturb each other
    assert slurm.details_of(number)["ExitCode"] == f"{code}:0"


@pytest.mark.soak
@pytest.mark.parametrize("nodes", [1, 4])
def test_a_job_runs_on_as_many_nodes_as_it_has(job: Job, nodes: int) -> None:
    number = job.submit(f"gpus={GPUS}", "budget.trials=16", "space.sleep_s=1.0", nodes=nodes)
    assert job.end(number) == "COMPLETED", job.log(number)
    assert len({run.data.tags["node"] for run in job.workspace.runs("trial")}) == nodes


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_time_limit_stops_a_job_in_order_and_the_next_one_resumes_it(job: Job) -> None:
    overrides = [f"gpus={GPUS}", "budget.trials=200", "space.sleep_s=1.0", "trial.grace_s=10"]
    first = job.submit(*overrides, options=("--time=2", "--signal=B:TERM@60"))
    assert job.end(first) == "FAILED", job.log(first)  # with the exit code of an interrupted sweep
    assert job.slurm.details_of(first)["ExitCode"] == "130:0"
    assert "stopping: 10 s for the running trials" in job.log(first) and "resume " in job.log(first)
    done = len(job.lines())
    assert GPUS <= done < 200 * GPUS

    trials = done // GPUS + 10
    second = job.submit(*overrides[:1], f"budget.trials={trials}", *overrides[2:], nodes=2)
    assert job.end(second) == "COMPLETED", job.log(second)
    assert set(Counter(job.lines()).values()) == {1} and job.workspace.outcomes()["complete"] >= trials


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["requeue", "preempt"])
def test_a_job_that_is_put_back_into_the_queue_loses_no_trial(slurm: Slurm, job: Job, how: str) -> None:
    number = job.submit(f"gpus={GPUS}", "budget.trials=30", "space.sleep_s=1.0", nodes=4)
    wait_for(lambda: len(job.lines()) >= 8, timeout_s=120)
    if how == "requeue":
        slurm.command("scontrol", "requeue", number)
    else:
        urgent = slurm.command("sbatch", "--parsable", "--partition=high", "--nodes=4", "--wrap=sleep 2").strip()
        assert slurm.await_state(urgent, *ENDED) == "COMPLETED"
    assert slurm.await_state(number, *ENDED, timeout_s=400) == "COMPLETED", job.log(number)
    assert "resumed" in job.log(number)
    complete = [run for run in job.workspace.runs("trial") if run.data.tags["outcome"] == "complete"]
    assert len(complete) == 30 and len({run.data.tags["sweeper.trial"] for run in complete}) == 30


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_node_whose_ray_does_not_start_is_left_out(slurm: Slurm, job: Job) -> None:
    node, ray = slurm.network.nodes["n2"], str(Path(sys.executable).with_name("ray"))
    node.run("mount", "--bind", "/bin/false", ray, check=True)  # on this node alone
    try:
        number = job.submit(f"gpus={GPUS}", "budget.trials=4", nodes=2, options=("--nodelist=n1,n2",))
        assert slurm.await_state(number, *ENDED, timeout_s=400) == "COMPLETED", job.log(number)
    finally:
        node.run("umount", ray, check=True)
    assert "1 of 2 nodes are up; the sweep starts with those" in job.log(number), job.log(number)
    assert {run.data.tags["node"] for run in job.workspace.runs("trial")} == {"n1"}


@pytest.mark.soak
def test_a_drained_node_gets_no_job(slurm: Slurm, job: Job) -> None:
    slurm.command("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    try:
        number = job.submit(f"gpus={GPUS}", "budget.trials=4", nodes=3)
        assert job.end(number) == "COMPLETED", job.log(number)
    finally:
        slurm.command("scontrol", "update", "nodename=n1", "state=resume")
    assert "n1" not in {run.data.tags["node"] for run in job.workspace.runs("trial")}


@pytest.mark.soak
def test_two_sweeps_run_in_one_allocation(job: Job) -> None:
    number = job.submit(f"gpus={GPUS}", "budget.trials=4", "-m", "space.sleep_s=0.1,0.2", nodes=2)
    assert job.end(number) == "COMPLETED", job.log(number)
    assert len(job.workspace.sweeps) == 2 and job.workspace.outcomes() == {"complete": 8}


@pytest.mark.soak
def test_a_trial_starts_its_program_by_srun(slurm: Slurm, job: Job) -> None:
    """`--overlap`, since Ray's own step has all CPUs of the job."""
    program = "srun --overlap --nodes=2 --ntasks=2 sh -c 'echo $(hostname) took {seconds}'"
    run = [f"command.run={shlex.split(program)}", "command.log={step_time_s: 'took ([0-9.]+)'}", "command.start=node"]
    sizes = ["--nodes=2", f"--gpus-per-node={GPUS}", SCRIPT, "workload=command", "hardware=mi300x", "gpus=4"]
    others = ["space.seconds=0.1", "command.warmup=0", "command.steps=2", "objective=step_time_ms", "budget.trials=1"]
    others += ["progress=never", "finals.top=0"]
    number = slurm.submit(job.workspace.path, *sizes, *run, *others)
    assert job.end(number) == "COMPLETED", job.log(number)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_job_at_its_time_limit_resubmits_itself_as_often_as_it_may(slurm: Slurm, job: Job) -> None:
    limits = ("--time=4", "--signal=B:TERM@90", "--export=ALL,SWEEPER_RESUBMIT=1")
    number = job.submit(f"gpus={GPUS}", "budget.trials=400", "space.sleep_s=1.0", options=limits)
    wait_for(job.lines, timeout_s=120)
    wait_for(lambda: "resubmitted, restart 1 of at most 1" in job.log(number), timeout_s=360)
    before = len(job.lines())
    wait_for(lambda: slurm.details_of(number)["Restarts"] == "1", timeout_s=60)
    assert slurm.await_state(number, *ENDED, timeout_s=600) == "FAILED", job.log(number)
    assert "not resubmitted: SWEEPER_RESUBMIT=1, and the job was restarted 1 times" in job.log(number)
    assert "resumed" in job.log(number) and len(job.lines()) > before > 0
    assert set(Counter(job.lines()).values()) == {1}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["ends", "fails", "is cancelled"])
def test_a_job_is_not_resubmitted_that(slurm: Slurm, job: Job, how: str) -> None:
    """It would be at its time limit."""
    trials = "budget.trials=400" if how == "is cancelled" else "budget.trials=2"
    behaviour = "space.behaviour=raise" if how == "fails" else "space.sleep_s=1.0"
    options = ("--export=ALL,SWEEPER_RESUBMIT=3",)
    number = job.submit(f"gpus={GPUS}", trials, behaviour, "trial.grace_s=1", options=options)
    if how == "is cancelled":
        wait_for(lambda: len(job.lines()) >= 2 * GPUS, timeout_s=120)
        slurm.command("scancel", number)
    expected = {"ends": "COMPLETED", "fails": "FAILED", "is cancelled": "CANCELLED"}[how]
    assert job.end(number) == expected, job.log(number)
    wait_for(lambda: number not in slurm.command("squeue", "--noheader", "--format=%i").split(), timeout_s=120)
    assert job.end(number) == expected and slurm.details_of(number)["Restarts"] == "0"
    assert "sweep.sbatch: stopped before" not in job.log(number)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_starts_in_one_job_run_one_after_the_other(slurm: Slurm, job: Job) -> None:
    overrides = [*PROBE, f"gpus={GPUS}", "budget.trials=4", "space.sleep_s=0.5"]
    starts = [shlex.join(["bash", SCRIPT, *overrides, f"name={name}"]) for name in ("first", "second")]
    options = ["--nodes=2", f"--gpus-per-node={GPUS}", "--exclusive", f"--output={job.workspace.path}/sweeper-%j.log"]
    number = slurm.submit(job.workspace.path, *options, f"--wrap={starts[0]} & {starts[1]} & wait")
    assert slurm.await_state(number, *ENDED, timeout_s=400) == "COMPLETED", job.log(number)
    assert f"waits until the other start in job {number} has ended" in job.log(number)
    assert len(job.workspace.sweeps) == 2 and job.workspace.outcomes() == {"complete": 8}
    assert not list(slurm.folder.glob(f".sweeper-{number}-*"))
