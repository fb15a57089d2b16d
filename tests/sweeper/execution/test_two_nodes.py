"""Commands over two Ray nodes with an address and a name each: network namespaces of this machine, a bridge between."""

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

from tests.conftest import Done, Place, environment, processes_with, wait_for

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"),
]
HEAD = "10.77.0.10"
NODES = {"first": "10.77.0.11", "second": "10.77.0.12"}
GPUS = 2  # of each, only counted
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled"}  # the namespaces are reached from nowhere else
# What a trainer does with what it is told: meets the others, says where it is, and ends as it is to.
TRAINER = """
import json, os, socket, sys, time
import torch, torch.distributed as dist
folder, behaviour = sys.argv[1:]
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
said = {name: os.environ.get(name, "") for name in ("LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")}
said |= {"rank": dist.get_rank(), "total": total.item(), "node": socket.gethostname(), "parent": os.getppid()}
said |= {"devices": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
with open(f"{folder}/{dist.get_rank()}.json", "w") as file:
    json.dump(said, file)
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
ALONE = ["{python}"]
TRAINED = ["trainer.py", "{folder}", "{behaviour}"]


class Cluster:
    """A head without devices and two nodes of two, each in a network of its own."""

    def __init__(self) -> None:
        self._name = f"sweeper{os.getpid()}"
        self._raylets: list[subprocess.Popen[bytes]] = []
        try:
            self._wire()
            words = ["--head", f"--node-ip-address={HEAD}", "--port=6379", "--include-dashboard=false"]
            self._start("head", *words)
            for name, address in NODES.items():
                words = [f"--address={HEAD}:6379", f"--node-ip-address={address}", f"--num-gpus={GPUS}"]
                self._start(name, *words, '--resources={"accelerator_type:H200": 1}')
            all_there = f"import ray, sys; ray.init('{HEAD}:6379'); sys.exit(len(ray.nodes()) != {1 + len(NODES)})"
            wait_for(lambda: self._succeeds(all_there), timeout_s=120)
        except BaseException:
            self.close()
            raise

    def _wire(self) -> None:
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

    def _ip(self, place: str, *words: str) -> None:
        ip("-n", self._name + place, *words)

    def inside(self, place: str, *command: str) -> list[str]:
        """The command, there."""
        return ["ip", "netns", "exec", self._name + place, *command]

    def _start(self, place: str, *words: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        # What Ray keeps of one machine, no other sees: neither sockets nor logs.
        prepare = f'hostname {place} && mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$@"'
        find_hardware = ["unshare", "--uts", "--mount", "sh", "-c", prepare if place != "head" else 'exec "$@"', "sh"]
        command = [*find_hardware, ray, "start", *words, f"--num-cpus={0 if place == 'head' else GPUS}", "--block"]
        self._raylets.append(
            subprocess.Popen(
                self.inside(place, *command),
                env=environment(**ENVIRONMENT),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        if place == "head":
            wait_for(lambda: self._succeeds(f"import socket; socket.create_connection(('{HEAD}', 6379), 1)"))

    def _succeeds(self, program: str) -> bool:
        command = self.inside("head", sys.executable, "-c", program)
        return not subprocess.run(command, env=environment(**ENVIRONMENT), capture_output=True).returncode

    def close(self) -> None:
        for raylet in reversed(self._raylets):
            raylet.terminate()
        for raylet in self._raylets:
            raylet.wait(timeout=60)
        for place in (*NODES, "head"):
            subprocess.run(["ip", "netns", "delete", self._name + place], stderr=subprocess.DEVNULL)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class There(Place):
    """A place whose commands are given on the cluster's head."""

    cluster: Cluster

    def command(self, *words: str) -> list[str]:
        return self.cluster.inside("head", *super().command(*words))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.close()


@pytest.fixture
def there(tmp_path: Path, cluster: Cluster) -> There:
    found = There(tmp_path)
    found.cluster = cluster
    (tmp_path / "trainer.py").write_text(TRAINER)
    return found


def run(there: There, launcher: list[str], behaviour: str, *words: str) -> Done:
    mark = f"{{GLOO_SOCKET_IFNAME: eth0, TEST_OF: '{there.path}'}}"
    said = [f"command.run={[*launcher, *TRAINED]}", f"command.directory={there.path}", f"command.environment={mark}"]
    said += [
        "command.log={step_time_s: 'took ([0-9.]+)'}",
        f"space.folder='{there.path}'",
        f"space.behaviour={behaviour}",
    ]
    said += [
        "command.global_batch='8'",
        "command.sequence_length='128'",
        "workload=command",
        "hardware=h200",
        "gpus=4",
        "budget.trials=1",
        "finals.top=0",
        "progress=never",
    ]
    done = there.run(
        *said, f"cluster.address={HEAD}:6379", "cluster.insecure=true", *words, timeout_s=300, **ENVIRONMENT
    )
    assert not processes_with("TEST_OF", str(there.path))  # on neither node
    return done


def said_by_ranks(there: There) -> list[dict[str, Any]]:
    return [json.loads((there.path / f"{rank}.json").read_text()) for rank in range(2 * GPUS)]


@pytest.mark.parametrize("start", ["node", "gpu"])
def test_the_ranks_of_two_nodes_meet(there: There, start: str) -> None:
    done = run(there, TORCHRUN if start == "node" else ALONE, "ok", f"command.start={start}")
    assert done.code == 0, done.err
    said = said_by_ranks(there)
    assert [each["total"] for each in said] == [10.0] * 4
    nodes = [each["node"] for each in said]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3] and set(nodes) == set(NODES)
    assert {each["MASTER_ADDR"] for each in said} == {NODES[nodes[0]]}
    assert len({each["MASTER_PORT"] for each in said}) == 1
    if start == "node":
        assert [each["GROUP_RANK"] for each in said] == ["0", "0", "1", "1"]
        assert [each["LOCAL_RANK"] for each in said] == ["0", "1", "0", "1"]
        assert set(Counter(each["parent"] for each in said).values()) == {2}  # one launcher on each
        assert {each["devices"] for each in said} == {"0,1"}
    else:
        assert [each["LOCAL_RANK"] for each in said] == ["0"] * 4 and len({each["parent"] for each in said}) == 4
        assert [each["devices"] for each in said] == ["0", "1", "0", "1"]
    (trial,) = there.runs("trial")
    assert trial.data.metrics["step_time_ms"] == 10 and trial.data.tags["node"] == nodes[0]


def test_one_nodes_failure_ends_both_and_is_what_is_told(there: There) -> None:
    done = run(there, TORCHRUN, "fail")
    assert done.code == 1
    (trial,) = there.trials()
    record = json.loads(trial.user_attrs["record"])
    failed = said_by_ranks(there)[-1]["node"]
    assert record["status"] == "failed" and "Error: " in record["reason"], record["reason"]
    assert f"rank {GPUS} on {failed}:" in record["detail"], record["detail"]
    assert f"ValueError: out of luck on {failed}" in record["detail"], record["detail"]


def test_a_trial_that_takes_too_long_ends_on_both(there: There) -> None:
    done = run(there, TORCHRUN, "hang", "trial.timeout_s=40")
    assert done.code == 1
    (trial,) = there.trials()
    record = json.loads(trial.user_attrs["record"])
    assert record["status"] == "timed_out" and record["reason"] == "took longer than trial.timeout_s=40"
    assert all(f"still here on {node}" in record["detail"] for node in NODES), record["detail"]
