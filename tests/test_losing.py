"""What a cluster loses, a sweep does not: several real Ray nodes on this machine, with GPUs that are only counted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Place, wait_for

GPUS = {"num_cpus": 2, "num_gpus": 2, "resources": {"accelerator_type:H200": 1}}
SWEEP = ["workload=probe", "hardware=h200", "gpus=2", "finals.top=0", "search=random", "seed=3", "progress=never"]
SWEEP += ["cluster.insecure=true"]  # Ray's own helper for several nodes knows no token


class Cluster:
    """A head without devices, and nodes of two."""

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster as OfRay

        self._ray = OfRay(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.add() for _ in range(nodes)]
        self._ray.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._ray.address)

    def add(self) -> object:
        return self._ray.add_node(**GPUS)

    def lose(self, node: object) -> None:
        self._ray.remove_node(node, allow_graceful=False)

    def workers(self) -> list[int]:
        """The processes that trials run in."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        self._ray.shutdown()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
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
    assert "lost, tried again" in err and "joined   1 node" in err, err
    finished_once(place, ledger, 32)
    nodes = {run.data.tags["pid"] for run in place.runs("trial")}
    assert len(nodes) >= 3


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
