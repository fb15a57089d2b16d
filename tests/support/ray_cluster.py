"""A cluster of real Ray nodes on this machine, with GPUs that Ray only counts, and ways to break its nodes."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Workspace
from tests.support import lean_ray, namespaces

NODE_RESOURCES: dict[str, Any] = {"num_cpus": 2, "num_gpus": 2, "resources": {"accelerator_type:H200": 1}}
SWEEP = ["workload=probe", "hardware=h200", "gpus=2", "finals.top=0", "search=random", "seed=3", "progress=never"]
SWEEP += ["cluster.insecure=true"]  # ray.cluster_utils.Cluster does not support tokens


class Cluster:
    """A head without devices, and nodes with two GPUs each. Its processes inherit this process's environment."""

    def __init__(self, nodes: int, port: int = 0) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        from sweeper.execution.ray_internals import without_unused_processes

        # A dashboard's agent costs a node 3 s of CPU time, and a node ends where its agent takes 15 s to start.
        self._lean = without_unused_processes
        head = {"num_cpus": 0, "include_dashboard": False, "gcs_server_port": port}
        with self._lean():
            self._ray = RayCluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(nodes)]
        self._ray.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._ray.address)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def add(self, memory_gib: float = 8, **environment: str) -> Any:
        """Add a node whose processes have these environment variables."""
        for attempts_left in (2, 1, 0):
            with pytest.MonkeyPatch.context() as patch, self._lean():
                for name, value in environment.items():
                    patch.setenv(name, value)
                try:
                    return self._ray.add_node(**NODE_RESOURCES, memory=int(memory_gib * 2**30))
                except Exception:  # Ray gives a raylet's agents 30 s to start; a busy machine may take longer
                    if not attempts_left:
                        raise
        raise AssertionError

    def add_of(self, accelerator: str) -> Any:
        """Add a node with another kind of GPU."""
        with self._lean():
            return self._ray.add_node(**{**NODE_RESOURCES, "resources": {f"accelerator_type:{accelerator}": 1}})

    def add_labeled(self, gpu_domain: str | None = None) -> Any:
        """Add a node with the labels that Ray gives a node with GPUs, and that of an NVLink domain."""
        labels = {"ray.io/accelerator-type": "H200"} | ({"ray.io/gpu-domain": gpu_domain} if gpu_domain else {})
        with self._lean():
            return self._ray.add_node(**NODE_RESOURCES, labels=labels)

    def count_alive(self) -> int:
        """Return how many nodes the head takes to be alive, itself included."""
        return sum(node["Alive"] for node in self._ray.global_state.node_table())

    def lose(self, node: Any) -> None:
        self._ray.remove_node(node, allow_graceful=False)

    def lose_all(self) -> None:
        """Kill the head first, then every node."""
        self.lose_head()
        for node in self._ray.worker_nodes:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        self._ray.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        for pid in self.worker_pids():  # a stopped worker does not notice that its raylet is gone
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def lose_head(self) -> None:
        for name in ("gcs_server", "raylet"):
            for process_info in self._ray.head_node.all_processes.get(name, []):
                process_info.process.kill()

    def restart_head(self, down_s: float) -> None:
        """Kill the head's control store and start it again; the head's raylet stays. Needs `external_storage`."""
        self._ray.head_node.kill_gcs_server(check_alive=False)
        time.sleep(down_s)
        self._ray.head_node.start_gcs_server()

    @contextmanager
    def stopped_head(self) -> Iterator[None]:
        """Stop the process of the head's control store for a while."""
        (info,) = self._ray.head_node.all_processes["gcs_server"]
        os.kill(info.process.pid, signal.SIGSTOP)
        yield
        os.kill(info.process.pid, signal.SIGCONT)

    def worker_pids(self, node: Any = None) -> list[int]:
        """Return the processes that run trials, of one node or of all, by their logs: Ray changes their environment."""
        session = self._ray.head_node.get_session_dir_path()
        parent = f"PPid:\t{node.all_processes['raylet'][0].process.pid}\n" if node else ""
        pids = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                is_worker = entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::Worker")
                is_own = is_worker and str((entry / "fd/2").readlink()).startswith(session)
                if is_own and parent in (entry / "status").read_text():
                    pids.append(int(entry.name))
        return pids

    def count_placement_groups(self) -> int:
        """Return how many placement groups exist that have not been removed."""
        table = self._ray.global_state.placement_group_table()
        return sum(group["state"] != "REMOVED" for group in table.values())

    def close(self) -> None:
        self._ray.shutdown()


class RayNode:
    """A node with two GPUs that `ray start` runs in a process of its own, as a user starts it."""

    command: list[str]

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def pids(self) -> list[int]:
        raise NotImplementedError

    def close(self) -> None:
        pids = self.pids()
        with suppress(AttributeError):
            pids.append(self.process.pid)  # not listed while it is starting
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(AttributeError):
            self.process.wait()


def joining(cluster: Cluster, *arguments: str) -> list[str]:
    """Return the arguments of `ray start` for a node of this cluster."""
    sizes = ["--num-cpus=2", "--num-gpus=2", '--resources={"accelerator_type:H200": 1}']
    return [f"--address={cluster.address}", "--block", *sizes, *arguments]


class RemoteNode(RayNode):
    """A node in a network namespace of its own, whose link to the head can be cut."""

    def __init__(self, cluster: Cluster) -> None:
        namespaces.remove_abandoned()
        self._namespace = namespaces.name_namespace()
        self._link, inner_link = f"sw{os.getpid()}a", f"sw{os.getpid()}b"  # at most 15 characters
        subnet = f"10.203.{os.getpid() % 250}"
        for arguments in (
            f"netns add {self._namespace}",
            f"link add {self._link} type veth peer name {inner_link} netns {self._namespace}",
            f"addr add {subnet}.1/30 dev {self._link}",
            f"link set {self._link} up",
            f"-n {self._namespace} addr add {subnet}.2/30 dev {inner_link}",
            f"-n {self._namespace} link set {inner_link} up",
            f"-n {self._namespace} link set lo up",
            f"-n {self._namespace} route add default via {subnet}.1",
        ):
            if subprocess.run(["ip", *arguments.split()], capture_output=True).returncode:
                self.close()
                pytest.skip("a network namespace needs root and iproute2")
        arguments = joining(cluster, f"--node-ip-address={subnet}.2")
        self.command = ["ip", "netns", "exec", self._namespace, *lean_ray.command(*arguments)]
        self.start()

    def cut_off(self) -> None:
        subprocess.run(["ip", "link", "set", self._link, "down"], check=True)

    def reconnect(self) -> None:
        subprocess.run(["ip", "link", "set", self._link, "up"], check=True)

    def pids(self) -> list[int]:
        return namespaces.list_processes(self._namespace)

    def close(self) -> None:
        super().close()
        subprocess.run(["ip", "netns", "delete", self._namespace], capture_output=True)


class BareNode(RayNode):
    """A node on which these folders are empty, in a mount namespace of its own and started in another folder.

    It runs Ray's own command, since it does not have this checkout.
    """

    def __init__(self, cluster: Cluster, hidden: Sequence[Path], folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("a mount namespace needs root")
        mounts = "".join(f"mount -t tmpfs none {shlex.quote(str(path))} && " for path in hidden)
        in_folder = ["env", f"--chdir={folder}", "--unset=PYTHONPATH"]
        self.command = ["unshare", "--mount", "sh", "-c", f'{mounts}exec "$@"', "sh", *in_folder]
        self.command += [sys.executable, "-m", "ray.scripts.scripts", "start", *joining(cluster)]
        self.start()

    def pids(self) -> list[int]:
        """Return the processes in the mount namespace, which is that of the process that was started."""
        pids = []
        with suppress(AttributeError, OSError):
            namespace = Path(f"/proc/{self.process.pid}/ns/mnt").readlink()
            for entry in Path("/proc").iterdir():
                with suppress(OSError):
                    if entry.name.isdigit() and (entry / "ns/mnt").readlink() == namespace:
                        pids.append(int(entry.name))
        return pids


class LowMemoryNode(RayNode):
    """A node limited to 2 GiB of this machine's memory."""

    def __init__(self, cluster: Cluster) -> None:
        self._cgroup = Path(f"/sys/fs/cgroup/memory/sweeper{os.getpid()}")
        try:
            self._cgroup.mkdir()
            (self._cgroup / "memory.limit_in_bytes").write_text(str(2 << 30))
        except OSError:
            pytest.skip("a memory limit needs root and cgroups v1")
        # Ray reads its limit where the limit of the whole machine is.
        mount = f'unshare --mount sh -c \'mount --bind {self._cgroup} /sys/fs/cgroup/memory && exec "$@"\' sh "$@"'
        limited = ["sh", "-c", f"echo $$ > {self._cgroup}/cgroup.procs; exec {mount}", "sh"]
        self.command = [*limited, *lean_ray.command(*joining(cluster, "--object-store-memory=80000000"))]
        self.start()

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self._cgroup / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        super().close()
        for _ in range(50):
            with suppress(OSError):
                return self._cgroup.rmdir()
            time.sleep(0.1)


def sweep_arguments(workspace: Workspace, cluster: Cluster, trials: int, *overrides: str) -> list[str]:
    """Return the arguments of a sweep with gangs of two. Each rank writes a line to a ledger when it completes."""
    ledger = f"space.ledger={workspace.path / 'ledger'}"
    return [*SWEEP, f"cluster.address={cluster.address}", f"budget.trials={trials}", ledger, *overrides]


def start_sweep(workspace: Workspace, cluster: Cluster, trials: int, *overrides: str) -> subprocess.Popen[str]:
    return workspace.start(*sweep_arguments(workspace, cluster, trials, *overrides), RAY_AUTH_MODE="disabled")


def count_completions(workspace: Workspace) -> Counter[str]:
    """Return how often each rank of each trial has completed, from the ledger."""
    ledger = workspace.path / "ledger"
    return Counter(ledger.read_text().splitlines()) if ledger.exists() else Counter()


def assert_completed_once(workspace: Workspace, trials: int, ranks: int = 2, held: int = 1) -> None:
    """Assert that every trial has one final result and that only trials of lost gangs completed twice.

    Args:
        held: how many trials of a lost gang may complete twice: the running one; where a gang was only cut off from
            the head, the next one too.
    """
    runs = [run for run in workspace.runs("trial") if "remeasured_trial" not in run.data.tags]
    assert Counter(run.info.status for run in runs) == {"FINISHED": trials}
    assert len({run.data.tags["sweeper.trial"] for run in runs}) == trials
    assert len(count_completions(workspace)) == ranks * trials
    # A result can be lost with the worker that has just sent it. Only then is a completed trial run again.
    lost = sum(int(run.data.tags["attempts"]) - 1 for run in runs)
    compared = len(workspace.runs("trial")) - trials
    assert count_completions(workspace).total() <= ranks * (trials + held * lost + compared)
