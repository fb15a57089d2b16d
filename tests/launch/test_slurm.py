"""The Slurm script on two real Ray nodes of this machine, where Slurm is not installed: stand-ins for its commands.

The stand-in for srun starts the steps with the environment that Slurm gives them and passes SIGTERM on.
`tests/cluster/test_slurm.py` shows the script in Slurm itself.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROBE, REPOSITORY, CommandResult, Workspace, environment, find_processes, wait_for
from tests.support.amd import stand_in_environment
from tests.support.virtual_network import missing_reason
from tests.support.virtual_slurm import missing_slurm

SCRIPT = REPOSITORY / "launch" / "slurm" / "sweep.sbatch"
JOB_ID = str(os.getpid())  # starts in one job wait for each other, and other tests may run at the same time

# Run the step on every requested node, one core each; forward SIGTERM to all.
SRUN = """#!{python}
import os, signal, subprocess, sys
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
command = sys.argv[sys.argv.index("bash"):]
known = {{"nodes", "ntasks", "ntasks-per-node", "nodelist", "exclude"}}
known |= {{"cpu-bind", "no-kill", "wait", "kill-on-bad-exit"}}
assert options.keys() <= known, options
nodes = [n for n in ("node1", "node2") if n == options.get("nodelist", n) and n != options.get("exclude")]
assert len(nodes) == int(options["nodes"]) == int(options["ntasks"]), options
env = dict(os.environ, SLURM_CPUS_ON_NODE="1")
with open(__file__ + ".folders", "a") as folders:
    print(os.environ["RAY_FOLDER"], file=folders)
steps = []
for i, n in enumerate(nodes):
    step = dict(env, SLURMD_NODENAME=n, SLURM_PROCID=str(i))
    if "ROCR_VISIBLE_DEVICES" in env:  # on AMD nodes: here GPU 1 of node1, and GPU 2 of node2
        step["ROCR_VISIBLE_DEVICES"] = n.removeprefix("node")
    steps.append(subprocess.Popen(command, env=step))
signal.signal(signal.SIGTERM, lambda *_: [step.terminate() for step in steps])
sys.exit(max(step.wait() for step in steps))
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""


class Job:
    """A job of two nodes, which can be started again as Slurm requeues one."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.home = workspace, workspace.path / "home"
        tools = workspace.path / "bin"
        for folder in (self.home, tools):
            folder.mkdir()
        for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.script = tools / "slurm_script"  # Slurm runs a copy: nothing beside the script can be found from it
        shutil.copy(SCRIPT, self.script)
        self.mark, self.ledger = str(workspace.path), workspace.path / "ledger"
        self.env = environment(
            PATH=f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            HOME=str(self.home),
            SLURM_JOB_ID=JOB_ID,
            SLURM_JOB_NUM_NODES="2",
            SLURM_JOB_NODELIST="node[1-2]",
            SWEEPER_TEST=self.mark,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = ["bash", str(self.script), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.workspace.path, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def end(self, process: subprocess.Popen[str]) -> CommandResult:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            for pid in self.list_processes():
                os.kill(pid, signal.SIGKILL)
        return CommandResult(process.returncode, out, err)

    def list_processes(self) -> list[int]:
        """Return the processes of the job, including those that left its process group."""
        return find_processes("SWEEPER_TEST", self.mark)

    def ran(self) -> list[str]:
        """Return a line for each completed run of a rank."""
        return self.ledger.read_text().splitlines() if self.ledger.exists() else []


@pytest.fixture
def job(workspace: Workspace) -> Iterator[Job]:
    job = Job(workspace)
    yield job
    for folder in (workspace.path / "bin" / "srun.folders").read_text().splitlines():
        shutil.rmtree(folder, ignore_errors=True)  # Ray's logs, which a job leaves on its nodes
    Path(f"/tmp/sweeper-{JOB_ID}-{os.geteuid()}.lock").unlink()


@pytest.mark.skipif(not (missing_slurm() or missing_reason()), reason="Slurm is here: tests/cluster/test_slurm.py")
@pytest.mark.long(26)
def test_a_job_runs_on_all_its_nodes_and_leaves_no_process(job: Job) -> None:
    """Of AMD nodes; the one below is of nodes without GPUs."""
    job.env |= stand_in_environment() | {"ROCR_VISIBLE_DEVICES": "1"}  # Ray's import fails with the variable
    arguments = [*PROBE, "hardware=mi300x", "gpus=2", "search=random", "budget.trials=4", f"space.ledger={job.ledger}"]
    process = job.start(*arguments)
    try:
        (state,) = wait_for(lambda: list(job.home.glob(f".sweeper-{JOB_ID}-*")))
        token = wait_for(lambda: (state / "token").exists() and (state / "token").read_text().strip())
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert stat.S_IMODE((state / "token").stat().st_mode) == 0o600
        process.wait(timeout=90)
        # The recording process may write the report for some seconds more; a process of Ray would stay.
        wait_for(lambda: not job.list_processes(), timeout_s=30)
    finally:
        result = job.end(process)
    assert result.code == 0, result.err
    assert not list(job.home.iterdir())
    assert "4 complete" in result.out and token not in result.out + result.err
    ranks = Counter(line.split()[2] for line in job.ran())
    assert ranks == {"0": 4, "1": 4}  # each node has one GPU: a gang of two has room only on both


@pytest.mark.soak
def test_a_stopped_job_ends_cleanly_and_continues_when_requeued(job: Job) -> None:
    arguments = [*PROBE, "search=random", "budget.trials=8", "cluster.max_concurrent_trials=2", "space.sleep_s=0.5"]
    arguments.append(f"space.ledger={job.ledger}")
    process = job.start(*arguments)
    try:
        wait_for(lambda: len(job.ran()) >= 2)
        process.send_signal(signal.SIGTERM)  # to the batch shell alone, as --signal=B:TERM does
        process.wait(timeout=60)
        left = job.list_processes()
    finally:
        result = job.end(process)
    assert result.code == 130, result.err
    assert not left and not list(job.home.iterdir())
    before = job.ran()
    assert 2 <= len(before) < 8

    result = job.end(job.start(*arguments))
    assert result.code == 0, result.err
    after = job.ran()
    assert len(after) == len(set(after)) == 8 and after[: len(before)] == before
    assert len(job.workspace.runs("trial")) == 8 and job.workspace.states() == {"COMPLETE": 8}

    result = job.end(job.start(*arguments))
    assert result.code == 0 and "8 complete" in result.out, result.err
    assert job.ran() == after


def test_a_number_of_resubmissions_that_is_none_is_refused(workspace: Workspace) -> None:
    job = Job(workspace)
    job.env["SWEEPER_RESUBMIT"] = "yes"
    result = job.end(job.start(*PROBE))
    assert result.code == 2 and "SWEEPER_RESUBMIT=yes: allowed is how often a job may be restarted" in result.err
    assert not list(job.home.iterdir())


def test_a_head_that_does_not_start_gives_a_message(job: Job) -> None:
    (job.workspace.path / "bin" / "ray").write_text("#!/bin/sh\nexit 1\n")
    (job.workspace.path / "bin" / "ray").chmod(0o755)
    result = job.end(job.start(*PROBE))
    assert result.code == 1 and "Ray does not start" in result.err and "head.log on node1" in result.err
    assert not list(job.home.iterdir())


@pytest.mark.parametrize(
    ("site", "seen"),
    [
        ({"ROCR_VISIBLE_DEVICES": "9"}, ["HIP_VISIBLE_DEVICES=1"]),  # srun names the GPUs of each node
        ({"HIP_VISIBLE_DEVICES": "4,5"}, ["HIP_VISIBLE_DEVICES=4,5"]),
    ],
)
def test_ray_starts_on_a_node_with_the_gpus_that_slurm_names(job: Job, site: dict[str, str], seen: list[str]) -> None:
    ray = job.workspace.path / "bin" / "ray"
    ray.write_text(f"#!/bin/sh\nenv | grep VISIBLE_DEVICES >{job.workspace.path}/seen\nexit 1\n")
    ray.chmod(0o755)
    job.env = {name: value for name, value in job.env.items() if "VISIBLE_DEVICES" not in name} | site
    assert job.end(job.start(*PROBE)).code == 1
    assert (job.workspace.path / "seen").read_text().split() == seen
