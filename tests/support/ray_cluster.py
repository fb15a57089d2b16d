"""Real Ray nodes on this machine, with GPUs that are only counted, and what may happen to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Place

GPUS: dict[str, Any] = {"num_cpus": 2, "num_gpus": 2, "resources": {"accelerator_type:H200": 1}}
SWEEP = ["workload=probe", "hardware=h200", "gpus=2", "finals.top=0", "search=random", "seed=3", "progress=never"]
SWEEP += ["cluster.insecure=true"]  # Ray's own helper for several nodes knows no token


class Cluster:
    """A head without devices, and nodes of two. Its processes get this process's environment."""

    def __init__(self, nodes: int, port: int = 0) -> None:
        from ray.cluster_utils import Cluster as OfRay

        head = {"num_cpus": 0, "include_dashboard": False, "gcs_server_port": port}
        self._ray = OfRay(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(nodes)]
        self._ray.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._ray.address)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def add(self, memory_gib: float = 8, **environment: str) -> Any:
        """A node more, what runs on it with this environment."""
        for left in (2, 1, 0):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                try:
                    return self._ray.add_node(**GPUS, memory=int(memory_gib * 2**30))
                except Exception:  # Ray gives a raylet's agents 30 s, which a busy machine may take
                    if not left:
                        raise
        raise AssertionError

    def add_of(self, accelerator: str) -> Any:
        """A node more, with devices of another kind."""
        return self._ray.add_node(**{**GPUS, "resources": {f"accelerator_type:{accelerator}": 1}})

    def up(self) -> int:
        """How many nodes the head takes to be up, itself among them."""
        return sum(node["Alive"] for node in self._ray.global_state.node_table())

    def lose(self, node: Any) -> None:
        self._ray.remove_node(node, allow_graceful=False)

    def lose_all(self) -> None:
        """The head first, then every node."""
        self.lose_head()
        for node in self._ray.worker_nodes:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        self._ray.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        for pid in self.workers():  # a stopped one does not see that its raylet is gone
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def lose_head(self) -> None:
        for name in ("gcs_server", "raylet"):
            for started in self._ray.head_node.all_processes.get(name, []):
                started.process.kill()

    def workers(self) -> list[int]:
        """The processes that trials run in, known by their logs: Ray writes their names over their environment."""
        session, found = self._ray.head_node.get_session_dir_path(), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                    found += [int(entry.name)] * str((entry / "fd/2").readlink()).startswith(session)
        return found

    def placement_groups(self) -> int:
        """How many there are that have not been removed."""
        table = self._ray.global_state.placement_group_table()
        return sum(group["state"] != "REMOVED" for group in table.values())

    def close(self) -> None:
        self._ray.shutdown()


class Started:
    """A node of two devices, started as a user starts it."""

    command: list[str]

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stdout=quiet, stderr=quiet, start_new_session=True)

    def processes(self) -> list[int]:
        raise NotImplementedError

    def close(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(AttributeError):
            self.process.wait()


def ray_start(cluster: Cluster, *more: str) -> list[str]:
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--block"]
    return [*words, "--num-cpus=2", "--num-gpus=2", '--resources={"accelerator_type:H200": 1}', *more]


class Apart(Started):
    """A node in a network of its own, behind a cable that can be pulled out."""

    def __init__(self, cluster: Cluster) -> None:
        self._name = f"sw{os.getpid()}"
        outer, inner, at = f"{self._name}a", f"{self._name}b", f"10.203.{os.getpid() % 250}"
        for words in (
            f"netns add {self._name}",
            f"link add {outer} type veth peer name {inner} netns {self._name}",
            f"addr add {at}.1/30 dev {outer}",
            f"link set {outer} up",
            f"-n {self._name} addr add {at}.2/30 dev {inner}",
            f"-n {self._name} link set {inner} up",
            f"-n {self._name} link set lo up",
            f"-n {self._name} route add default via {at}.1",
        ):
            if subprocess.run(["ip", *words.split()], capture_output=True).returncode:
                self.close()
                pytest.skip("a network needs root, and iproute2")
        self._cable = outer
        self.command = ["ip", "netns", "exec", self._name, *ray_start(cluster, f"--node-ip-address={at}.2")]
        self.start()

    def cut_off(self) -> None:
        subprocess.run(["ip", "link", "set", self._cable, "down"], check=True)

    def reconnect(self) -> None:
        subprocess.run(["ip", "link", "set", self._cable, "up"], check=True)

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self._name], capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def close(self) -> None:
        super().close()
        subprocess.run(["ip", "netns", "delete", self._name], capture_output=True)


class Tight(Started):
    """A node that may have 2 GiB of this machine's memory and not more."""

    def __init__(self, cluster: Cluster) -> None:
        self._group = Path(f"/sys/fs/cgroup/memory/sweeper{os.getpid()}")
        try:
            self._group.mkdir()
            (self._group / "memory.limit_in_bytes").write_text(str(2 << 30))
        except OSError:
            pytest.skip("a limit of memory needs root, and cgroups of the first version")
        # Ray reads its limit where the whole machine's is.
        seen = f'unshare --mount sh -c \'mount --bind {self._group} /sys/fs/cgroup/memory && exec "$@"\' sh "$@"'
        within = ["sh", "-c", f"echo $$ > {self._group}/cgroup.procs; exec {seen}", "sh"]
        self.command = [*within, *ray_start(cluster, "--object-store-memory=80000000")]
        self.start()

    def processes(self) -> list[int]:
        return [int(pid) for pid in (self._group / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        super().close()
        for _ in range(50):
            with suppress(OSError):
                return self._group.rmdir()
            time.sleep(0.1)


def words_for(place: Place, cluster: Cluster, trials: int, *words: str) -> list[str]:
    """A sweep of gangs of two that writes a line for each rank that has run a trial to its end."""
    ledger = f"space.ledger={place.path / 'ledger'}"
    return [*SWEEP, f"cluster.address={cluster.address}", f"budget.trials={trials}", ledger, *words]


def start(place: Place, cluster: Cluster, trials: int, *words: str) -> subprocess.Popen[str]:
    return place.start(*words_for(place, cluster, trials, *words), RAY_AUTH_MODE="disabled")


def ended(place: Place) -> Counter[str]:
    """How often each rank of each trial has run to its end."""
    ledger = place.path / "ledger"
    return Counter(ledger.read_text().splitlines()) if ledger.exists() else Counter()


def finished_once(place: Place, trials: int, ranks: int = 2, held: int = 1) -> None:
    """Every trial has one final outcome, and none ran to its end twice but what a gang held when it was lost: what it
    ran, and where it was only cut off also what it was to run next."""
    runs = [run for run in place.runs("trial") if "again_of" not in run.data.tags]
    assert Counter(run.info.status for run in runs) == {"FINISHED": trials}
    assert len({run.data.tags["sweeper.trial"] for run in runs}) == trials
    assert len(ended(place)) == ranks * trials
    # A reply can be lost with the worker that had just sent it: then, and only then, is a trial run again.
    lost = sum(int(run.data.tags["attempts"]) - 1 for run in runs)
    compared = len(place.runs("trial")) - trials
    assert ended(place).total() <= ranks * (trials + held * lost + compared)
