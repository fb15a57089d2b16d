"""What a cluster loses, a sweep does not: several real Ray nodes on this machine, with GPUs that are only counted."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Place, wait_for

GPUS = {"num_cpus": 2, "num_gpus": 2, "resources": {"accelerator_type:H200": 1}}
SWEEP = ["workload=probe", "hardware=h200", "gpus=2", "finals.top=0", "search=random", "seed=3", "progress=never"]
SWEEP += ["cluster.insecure=true"]  # Ray's own helper for several nodes knows no token


class Cluster:
    """A head without devices, and nodes of two."""

    def __init__(self, nodes: int, port: int = 0) -> None:
        from ray.cluster_utils import Cluster as OfRay

        head = {"num_cpus": 0, "include_dashboard": False, "gcs_server_port": port}
        self._ray = OfRay(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(nodes)]
        self._ray.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._ray.address)

    def add(self, **environment: str) -> object:
        """A node more, what runs on it with this environment."""
        for left in (2, 1, 0):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                try:
                    return self._ray.add_node(**GPUS)
                except Exception:  # Ray gives a raylet's agents 30 s, which a busy machine may take
                    if not left:
                        raise
        raise AssertionError

    def up(self) -> int:
        """How many nodes the head takes to be up, itself among them."""
        return sum(node["Alive"] for node in self._ray.global_state.node_table())

    def lose(self, node: object) -> None:
        self._ray.remove_node(node, allow_graceful=False)

    def lose_head(self) -> None:
        for name in ("gcs_server", "raylet"):
            for started in self._ray.head_node.all_processes[name]:
                started.process.kill()

    def workers(self) -> list[int]:
        """The processes that trials run in, known by their logs: Ray writes their names over their environment."""
        session, found = self._ray.head_node.get_session_dir_path(), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                    found += [int(entry.name)] * str((entry / "fd/2").readlink()).startswith(session)
        return found

    def close(self) -> None:
        self._ray.shutdown()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))  # for the workers, should another checkout be installed
    found = Cluster(2)
    yield found
    found.close()


def finished_once(place: Place, ledger: Path, trials: int, ranks: int = 2) -> None:
    """Every trial has one final outcome, and none ran to its end twice."""
    assert place.states() == {"COMPLETE": trials}
    runs = place.runs("trial")
    assert Counter(run.info.status for run in runs) == {"FINISHED": trials}
    assert len({run.data.tags["sweeper.trial"] for run in runs}) == trials
    ended = Counter(ledger.read_text().splitlines())
    assert len(ended) == ranks * trials
    # A reply can be lost with the worker that had just sent it: then, and only then, is a trial run again.
    lost = sum(int(run.data.tags["attempts"]) - 1 for run in runs)
    assert sum(ended.values()) <= ranks * (trials + lost)


def start(place: Place, cluster: Cluster, trials: int, *words: str) -> subprocess.Popen[str]:
    address = f"cluster.address={cluster.address}"
    ledger = f"space.ledger={place.path / 'ledger'}"
    return place.start(*SWEEP, address, f"budget.trials={trials}", ledger, *words, RAY_AUTH_MODE="disabled")


def test_a_node_lost_within_a_gang_and_one_that_joins(place: Place, cluster: Cluster) -> None:
    process = start(place, cluster, 32, "space.sleep_s=1.0", "trial.retries=5")
    ledger = place.path / "ledger"
    wait_for(lambda: ledger.exists() and len(ledger.read_text().splitlines()) > 8)
    cluster.lose(cluster.nodes[0])
    cluster.add()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "lost, tried again" in err and "lost     1 node (" in err and "joined   1 node (" in err, err
    finished_once(place, ledger, 32)
    nodes = {run.data.tags["pid"] for run in place.runs("trial")}
    assert len(nodes) >= 3


@pytest.mark.soak
def test_a_head_that_is_lost_ends_the_driver_and_one_started_again_goes_on(place: Place, cluster: Cluster) -> None:
    process = start(place, cluster, 24, "space.sleep_s=1.0")
    ledger = place.path / "ledger"
    wait_for(lambda: ledger.exists() and len(ledger.read_text().splitlines()) > 8)
    address = cluster.address
    cluster.lose_head()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    said = (
        f"stopped  the cluster's head {address} does not answer; what had finished is kept. Start it again; to resume:"
    )
    assert said in err and err.rstrip().splitlines()[-1].startswith("  python -m sweeper"), err
    for node in cluster.nodes:
        node.kill_all_processes(check_alive=False, allow_graceful=False)  # type: ignore[attr-defined]
    wait_for(lambda: not cluster.workers())

    again = Cluster(2, port=int(address.rpartition(":")[2]))
    assert again.address == address
    process = start(place, again, 24, "space.sleep_s=1.0")
    _, err = process.communicate(timeout=120)
    again.close()
    assert process.returncode == 0 and "resumed" in err, err
    assert place.states() == {"COMPLETE": 24}
    ended = Counter(ledger.read_text().splitlines())
    assert len(ended) == 2 * 24 and sum(ended.values()) <= 2 * (24 + 4)  # two gangs held two trials each


class Apart:
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
        ray = ["ray", "start", f"--address={cluster.address}", f"--node-ip-address={at}.2", "--block"]
        ray += ["--num-cpus=2", "--num-gpus=2", '--resources={"accelerator_type:H200": 1}']
        self._command = ["ip", "netns", "exec", self._name, sys.executable, "-m", "ray.scripts.scripts", *ray[1:]]
        self.start()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet, start_new_session=True)

    def cut_off(self) -> None:
        subprocess.run(["ip", "link", "set", self._cable, "down"], check=True)

    def reconnect(self) -> None:
        subprocess.run(["ip", "link", "set", self._cable, "up"], check=True)

    def close(self) -> None:
        with suppress(ProcessLookupError, AttributeError):
            os.killpg(self.process.pid, signal.SIGKILL)
        found = subprocess.run(["ip", "netns", "pids", self._name], capture_output=True, text=True).stdout
        for pid in found.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", self._name], capture_output=True)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> Iterator[Apart]:
    found = Apart(cluster)
    yield found
    found.close()


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_node_that_is_cut_off_and_returns(
    place: Place, cluster: Cluster, apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For shorter than Ray waits for it nothing is lost; for longer its trials run elsewhere, at once, and when it
    returns it is another node, that is used."""
    wait_for(lambda: cluster.up() == 4)  # with the head
    process = start(place, cluster, 120, "space.sleep_s=1.0", "trial.retries=5")
    ledger = place.path / "ledger"

    def ended() -> int:
        return len(ledger.read_text().splitlines()) if ledger.exists() else 0

    wait_for(lambda: ended() > 18)
    apart.cut_off()
    time.sleep(3)
    apart.reconnect()
    before = ended()
    wait_for(lambda: ended() > before + 12)
    apart.cut_off()
    wait_for(lambda: cluster.up() == 3, timeout_s=90)
    before = ended()
    wait_for(lambda: ended() > before + 12)
    apart.reconnect()
    apart.process.wait(timeout=60)  # Ray ends a raylet that was given up
    apart.start()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "lost     1 node (10.203." in err and "joined   1 node (10.203." in err, err
    finished_once(place, ledger, 120)
    wait_for(lambda: not cluster.workers())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ill", "words", "code", "why"),
    [
        ("fails", [], 1, r"\d+ of its last \d+ trials failed, 0 of \d+ elsewhere"),
        ("slow", ["workload.objective=step_time_ms", "workload.direction=minimize"], 0, r"reached 0\.[3-8]\d of what"),
    ],
)
def test_an_ill_node_is_set_aside_and_said(
    place: Place, cluster: Cluster, ill: str, words: list[str], code: int, why: str
) -> None:
    """Of three nodes one is slow, or fails all its trials: the rest of the sweep runs on the other two."""
    cluster.add(SWEEPER_PROBE=ill)
    told = [f"cluster.address={cluster.address}", "budget.trials=240", "space.sleep_s=0.3", "gpus=1"]
    done = place.run(*SWEEP, *told, *words, RAY_AUTH_MODE="disabled")
    assert done.code == code, done.err
    assert re.search(rf"aside    \S+ \(\w+\): .*{why}.*; 4 trials at once", done.err), done.err
    (parent,) = place.runs("sweep")
    assert re.search(why, parent.data.tags["set_aside"]) and re.search(f"aside .*{why}", done.out), done.out
    searched = [run for run in place.runs("trial") if "again_of" not in run.data.tags]
    assert len(searched) == 240
    last = sorted(searched, key=lambda run: run.info.start_time)[-12:]
    (ill_node,) = re.findall(r"aside    \S+ \((\w+)\)", done.out)
    assert not any(run.data.tags["node_ids"].startswith(ill_node) for run in last)
    assert any(run.data.tags["node_ids"].startswith(ill_node) for run in searched)


@pytest.mark.soak
def test_no_two_trials_share_a_node_where_that_was_said(place: Place, cluster: Cluster) -> None:
    one = [f"cluster.address={cluster.address}", "budget.trials=12", "space.sleep_s=0.3", "gpus=1", "exclusive=node"]
    done = place.run(*SWEEP, *one, RAY_AUTH_MODE="disabled")
    assert done.code == 0 and "2 trials at once, no two on one node" in done.err, done.err
    assert len({run.data.tags["pid"] for run in place.runs("trial")}) == 2


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_minutes_of_all_that_can_happen(place: Place, cluster: Cluster) -> None:
    """Workers and nodes killed, workers stopped so that they hang, nodes that join, the driver killed: then, in peace,
    the rest. One outcome for each trial, and nothing run again but what was under way when something died."""
    chance, until, trials, driver_kills = random.Random(0), time.monotonic() + 600, 1500, 0
    words = ("space.sleep_s=1.0", "trial.retries=1000", "trial.timeout_s=20")
    process = start(place, cluster, trials, *words)
    nodes = list(cluster.nodes)
    while time.monotonic() < until:
        time.sleep(chance.uniform(2, 12))
        assert process.poll() is None or process.returncode == 0, process.communicate()[1]
        match chance.randrange(5):
            case 0 | 1 if workers := cluster.workers():
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(workers), chance.choice([signal.SIGKILL, signal.SIGSTOP]))
            case 2:
                cluster.lose(nodes.pop(chance.randrange(len(nodes))))
                nodes.append(cluster.add())
            case 3 if len(nodes) < 4:
                nodes.append(cluster.add())
            case 4:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                driver_kills += 1
                process = start(place, cluster, trials, *words)
    _, err = process.communicate(timeout=1000)
    assert process.returncode in (0, 1), err  # 1: some timed out
    runs = place.runs("trial")
    assert sum(place.states().values()) == trials == len({run.data.tags["sweeper.trial"] for run in runs}) == len(runs)
    outcomes = Counter(run.data.tags["outcome"] for run in runs)
    assert set(outcomes) <= {"complete", "timed_out"} and outcomes["timed_out"] < 60, outcomes
    ended = Counter((place.path / "ledger").read_text().splitlines())
    again = sum(int(run.data.tags["attempts"]) - 1 for run in runs) + 2 * 4 * driver_kills
    assert sum(ended.values()) <= 2 * (trials + again)
    assert not cluster.workers()
