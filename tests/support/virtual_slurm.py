"""Slurm on the nodes of a virtual network: a controller, nodes with counted GPUs, and munge on each of them."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.conftest import environment, wait_for
from tests.support.virtual_network import Network

CONTROLLER = "control"
GPUS = 2  # of each node: files that Slurm takes for devices
CPUS = 2
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue")
# Nodes share this machine's /run and /var, so everything that a daemon writes is in a node's own /tmp.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/tmp/munge/socket
CredType=cred/munge
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile=/tmp/slurmctld.log
SlurmdLogFile=/tmp/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = f"NodeName={{name}} NodeAddr={{address}} CPUs={CPUS} RealMemory=2000 Gres=gpu:{GPUS} State=UNKNOWN"
GRES = f"NodeName={{names}} Name=gpu File=/tmp/gpu[0-{GPUS - 1}] Flags=amd_gpu_env"


def missing_slurm() -> str:
    """Return which of Slurm's programs are missing, or an empty string."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    return f"not installed: {', '.join(missing)} (slurmctld, slurmd, slurm-client, munge)" if missing else ""


class Slurm:
    """A controller and nodes with two GPUs each, in namespaces of their own.

    Args:
        folder: a folder that all nodes share, also the home folder of the user who submits jobs.
        names: the nodes that run jobs.
        variables: further variables of the jobs.
    """

    def __init__(self, folder: Path, names: Sequence[str], variables: dict[str, str]) -> None:
        self.folder, self.names = folder, names
        self.network = Network([CONTROLLER, *names], folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder), "PATH": path, **variables}
        try:
            self._configure()
            for name in (CONTROLLER, *names):
                self.start_daemons(name)
            wait_for(lambda: self._states() == {"IDLE"}, timeout_s=60)
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        addresses = self.network.addresses
        nodes = "\n".join(NODE.format(name=name, address=addresses[name]) for name in self.names)
        text = CONFIGURATION.format(controller=CONTROLLER, address=addresses[CONTROLLER], nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(GRES.format(names=",".join(self.names)) + "\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def start_daemons(self, name: str) -> None:
        """Start munge, and Slurm's daemon of the controller or of a node."""
        devices = " ".join(f"&& mknod -m 666 /tmp/gpu{number} c 1 3" for number in range(GPUS))  # as /dev/null
        prepare = f"mkdir -p -m 755 /tmp/munge /tmp/slurmctld /tmp/slurmd {devices}"
        files = (
            "--socket=/tmp/munge/socket --pid-file=/tmp/munge/pid --log-file=/tmp/munge/log --seed-file=/tmp/munge/seed"
        )
        munge = f"munged --force --key-file={self.folder}/munge.key {files}"
        daemon = "slurmctld" if name == CONTROLLER else f"slurmd -N {name}"
        started = self.run_on(name, "sh", "-c", f"{prepare} && {munge} && {daemon}")
        assert started.returncode == 0, started.stdout + started.stderr

    def run_on(self, name: str, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        node = self.network.nodes[name]
        line = node.command(*command, folder=folder or self.folder)
        return subprocess.run(line, capture_output=True, text=True, env=environment(**self.variables))

    def command(self, *command: str, folder: Path | None = None) -> str:
        """Run one of Slurm's commands on the controller's node, and return what it prints."""
        done = self.run_on(CONTROLLER, *command, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _states(self) -> set[str]:
        return {*self.command("sinfo", "--noheader", "--format=%T").upper().split()}

    def submit(self, folder: Path, *arguments: str) -> str:
        """Submit the project's script with these options and overrides, and return the number of the job."""
        return self.command("sbatch", "--parsable", *arguments, folder=folder).strip()

    def state_of(self, job: str) -> str:
        """Return the state of a job, such as RUNNING, COMPLETED or TIMEOUT."""
        return self.details_of(job)["JobState"]

    def details_of(self, job: str) -> dict[str, str]:
        words = self.command("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_state(self, job: str, *states: str, timeout_s: float = 240) -> str:
        wait_for(lambda: self.state_of(job) in states, timeout_s=timeout_s)
        return self.state_of(job)

    def close(self) -> None:
        self.network.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
