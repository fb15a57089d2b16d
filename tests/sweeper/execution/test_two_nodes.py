"""Command workloads over two Ray nodes, each with its own address and host name.

The nodes are network namespaces of this machine, connected by a bridge.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CommandResult, Workspace, environment, find_processes, wait_for
from tests.support import namespaces

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"),
]
HEAD = "10.77.0.10"
NODES = {"first": "10.77.0.11", "second": "10.77.0.12"}
GPUS = 2  # of each node; Ray only counts them
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled"}  # the namespaces are not reachable from outside
# Joins the process group, writes its environment to a file, and then ends as `behaviour` requires.
TRAINER = """
import json, os, socket, sys, time
import torch, torch.distributed as dist
folder, behaviour = sys.argv[1:]
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
rank = {name: os.environ.get(name, "") for name in ("LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")}
rank |= {"rank": dist.get_rank(), "total": total.item(), "node": socket.gethostname(), "parent": os.getppid()}
rank |= {"devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""), "algorithm": os.environ.get("NCCL_ALGO", "")}
with open(f"{folder}/{dist.get_rank()}.json", "w") as file:
    json.dump(rank, file)
dist.barrier()
if behaviour == "fail" and dist.get_rank() == dist.get_world_size() - 1:
    raise ValueError("out of luck on " + socket.gethostname())
for _ in range(600 if behaviour == "hang" else 0):
    print("still here on", socket.gethostname(), flush=True)
    time.sleep(1)
for _ in range(20):
    dist.barrier()
    if dist.get_rank() == 0:
        print("took 0.01", flush=True)
"""
TORCHRUN = ["{python}", "-m", "torch.distributed.run", "--nnodes={nodes}", "--node-rank={node_rank}"]
TORCHRUN += ["--nproc-per-node={gpus_per_node}", "--master-addr={master_address}", "--master-port={master_port}"]
PYTHON = ["{python}"]
TRAINER_COMMAND = ["trainer.py", "{folder}", "{behaviour}"]


class Cluster:
    """A head without devices and two nodes with two GPUs, each in its own network namespace."""

    def __init__(self) -> None:
        namespaces.remove_abandoned()
        self._name = namespaces.name_namespace()
        self._raylets: list[subprocess.Popen[bytes]] = []
        try:
            self._create_network()
            arguments = ["--head", f"--node-ip-address={HEAD}", "--port=6379", "--include-dashboard=false"]
            self._start("head", *arguments)
            for name, address in NODES.items():
                arguments = [f"--address={HEAD}:6379", f"--node-ip-address={address}", f"--num-gpus={GPUS}"]
                self._start(name, *arguments, '--resources={"accelerator_type:H200": 1}')
            all_up = f"import ray, sys; ray.init('{HEAD}:6379'); sys.exit(len(ray.nodes()) != {1 + len(NODES)})"
            wait_for(lambda: self._succeeds(all_up), timeout_s=120)
        except BaseException:
            self.close()
            raise

    def _create_network(self) -> None:
        ip("netns", "add", f"{self._name}head")
        self._ip("head", "link", "add", "bridge", "type", "bridge")
        self._ip("head", "address", "add", f"{HEAD}/24", "dev", "bridge")
        for name, address in NODES.items():
            ip("netns", "add", self._name + name)
            self._ip("head", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", self._name + name)
            self._ip("head", "link", "set", name, "master", "bridge", "up")
            self._ip(name, "address", "add", f"{address}/24", "dev", "eth0")
            self._ip(name, "link", "set", "eth0", "up")
        for name in ("head", *NODES):
            self._ip(name, "link", "set", "lo", "up")
        self._ip("head", "link", "set", "bridge", "up")

    def _ip(self, node: str, *arguments: str) -> None:
        ip("-n", self._name + node, *arguments)

    def command_on(self, node: str, *command: str) -> list[str]:
        """Return the command line that runs `command` in the node's network namespace."""
        return ["ip", "netns", "exec", self._name + node, *command]

    def _start(self, node: str, *arguments: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        # /tmp/ray holds Ray's sockets and logs, which real nodes do not share.
        prepare = f'hostname {node} && mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$@"'
        isolate = ["unshare", "--uts", "--mount", "sh", "-c", prepare if node != "head" else 'exec "$@"', "sh"]
        command = [*isolate, ray, "start", *arguments, f"--num-cpus={0 if node == 'head' else GPUS}", "--block"]
        self._raylets.append(
            subprocess.Popen(
                self.command_on(node, *command),
                env=environment(**ENVIRONMENT),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        if node == "head":
            wait_for(lambda: self._succeeds(f"import socket; socket.create_connection(('{HEAD}', 6379), 1)"))

    def _succeeds(self, program: str) -> bool:
        command = self.command_on("head", sys.executable, "-c", program)
        return not subprocess.run(command, env=environment(**ENVIRONMENT), capture_output=True).returncode

    def close(self) -> None:
        for raylet in reversed(self._raylets):
            raylet.terminate()
        for raylet in self._raylets:
            raylet.wait(timeout=60)
        for node in (*NODES, "head"):
            subprocess.run(["ip", "netns", "delete", self._name + node], stderr=subprocess.DEVNULL)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class HeadPlace(Workspace):
    """A directory whose commands run on the cluster's head."""

    cluster: Cluster

    def command(self, *arguments: str) -> list[str]:
        return self.cluster.command_on("head", *super().command(*arguments))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def head(tmp_path: Path, cluster: Cluster) -> HeadPlace:
    workspace = HeadPlace(tmp_path)
    workspace.cluster = cluster
    (tmp_path / "trainer.py").write_text(TRAINER)
    return workspace


def run_trainer(head: HeadPlace, launcher: list[str], behaviour: str, *overrides: str) -> CommandResult:
    """Run a sweep of one trial on all four GPUs, and check that it leaves no process on either node."""
    environment_variables = f"{{GLOO_SOCKET_IFNAME: eth0, TEST_OF: '{head.path}'}}"
    sweep = [
        f"command.run={[*launcher, *TRAINER_COMMAND]}",
        f"command.directory={head.path}",
        f"command.environment={environment_variables}",
        "command.log={step_time_s: 'took ([0-9.]+)'}",
        f"space.folder='{head.path}'",
        f"space.behaviour={behaviour}",
        "command.global_batch='8'",
        "command.sequence_length='128'",
        "workload=command",
        "hardware=h200",
        "gpus=4",
        "budget.trials=1",
        "finals.top=0",
        "progress=never",
        f"cluster.address={HEAD}:6379",
        "cluster.insecure=true",
    ]
    result = head.run(*sweep, *overrides, timeout_s=300, **ENVIRONMENT)
    assert not find_processes("TEST_OF", str(head.path))
    return result


def read_ranks(head: HeadPlace) -> list[dict[str, Any]]:
    """Return what each rank's trainer wrote."""
    return [json.loads((head.path / f"{rank}.json").read_text()) for rank in range(2 * GPUS)]


@pytest.mark.parametrize("start", ["node", "gpu"])
def test_the_ranks_of_two_nodes_join_one_process_group(head: HeadPlace, start: str) -> None:
    overrides = [f"command.start={start}", "space.env.NCCL_ALGO=Ring"]
    result = run_trainer(head, TORCHRUN if start == "node" else PYTHON, "ok", *overrides)
    assert result.code == 0, result.err
    ranks = read_ranks(head)
    assert [rank["total"] for rank in ranks] == [10.0] * 4
    assert [rank["algorithm"] for rank in ranks] == ["Ring"] * 4
    nodes = [rank["node"] for rank in ranks]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3] and set(nodes) == set(NODES)
    assert {rank["MASTER_ADDR"] for rank in ranks} == {NODES[nodes[0]]}
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
    if start == "node":
        assert [rank["GROUP_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
        assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
        assert set(Counter(rank["parent"] for rank in ranks).values()) == {2}  # one launcher on each
        assert {rank["devices"] for rank in ranks} == {"0,1"}
    else:
        assert [rank["LOCAL_RANK"] for rank in ranks] == ["0"] * 4 and len({rank["parent"] for rank in ranks}) == 4
        assert [rank["devices"] for rank in ranks] == ["0", "1", "0", "1"]
    (trial,) = head.runs("trial")
    assert trial.data.metrics["step_time_ms"] == 10 and trial.data.tags["node"] == nodes[0]


def test_a_failure_on_one_node_ends_the_programs_of_both_and_is_reported(head: HeadPlace) -> None:
    result = run_trainer(head, TORCHRUN, "fail")
    assert result.code == 1
    (trial,) = head.trials()
    record = trial.user_attrs["record"]
    failed_node = read_ranks(head)[-1]["node"]
    assert record["status"] == "failed" and "Error: " in record["reason"], record["reason"]
    assert f"rank {GPUS} on {failed_node}:" in record["detail"], record["detail"]
    assert f"ValueError: out of luck on {failed_node}" in record["detail"], record["detail"]


def test_a_trial_that_times_out_ends_on_both_nodes(head: HeadPlace) -> None:
    result = run_trainer(head, TORCHRUN, "hang", "trial.timeout_s=40")
    assert result.code == 1
    (trial,) = head.trials()
    record = trial.user_attrs["record"]
    assert record["status"] == "timed_out" and record["reason"] == "took longer than trial.timeout_s=40"
    assert all(f"still here on {node}" in record["detail"] for node in NODES), record["detail"]
