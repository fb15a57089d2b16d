"""What a cluster loses, a sweep does not: several real Ray nodes on this machine, with GPUs that are only counted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.conftest import REPOSITORY, Place, wait_for
from tests.support.ray_cluster import SWEEP, Apart, Cluster, Tight, ended, finished_once, start


@pytest.fixture
def apart(cluster: Cluster) -> Iterator[Apart]:
    found = Apart(cluster)
    yield found
    found.close()


@pytest.fixture
def tight(cluster: Cluster) -> Iterator[Tight]:
    found = Tight(cluster)
    yield found
    found.close()


@pytest.mark.soak
def test_a_node_lost_within_a_gang_one_that_joins_and_a_worker_killed(place: Place, cluster: Cluster) -> None:
    """The short form of `test_chaos.py`."""
    process = start(place, cluster, 32, "space.sleep_s=1.0", "trial.retries=5")
    wait_for(lambda: ended(place).total() > 8)
    cluster.lose(cluster.nodes[0])
    for pid in cluster.workers()[-1:]:
        with suppress(ProcessLookupError):  # it may be one that ends with its node
            os.kill(pid, signal.SIGKILL)
    cluster.add()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "lost, tried again" in err and "lost     1 node (" in err and "joined   1 node (" in err, err
    finished_once(place, 32)
    nodes = {run.data.tags["pid"] for run in place.runs("trial")}
    assert len(nodes) >= 3


@pytest.mark.soak
def test_a_head_that_is_lost_ends_the_driver_and_one_started_again_goes_on(place: Place, cluster: Cluster) -> None:
    process = start(place, cluster, 24, "space.sleep_s=1.0")
    wait_for(lambda: ended(place).total() > 8)
    address = cluster.address
    cluster.lose_head()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"stopped  the cluster's head {address} does not answer; what had finished is kept. Start it again" in err
    assert "to resume:" in err and err.rstrip().splitlines()[-1].startswith("  python -m sweeper"), err
    cluster.lose_all()
    wait_for(lambda: not cluster.workers())

    remeasurement = Cluster(2, cluster.port)
    assert remeasurement.address == address
    process = start(place, remeasurement, 24, "space.sleep_s=1.0")
    _, err = process.communicate(timeout=120)
    remeasurement.close()
    assert process.returncode == 0 and "resumed" in err, err
    assert place.states() == {"COMPLETE": 24}
    assert len(ended(place)) == 2 * 24
    assert ended(place).total() <= 2 * (24 + 4)  # two gangs held two trials each


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_node_that_is_cut_off_and_returns(place: Place, impatient: None, cluster: Cluster, apart: Apart) -> None:
    """For shorter than Ray waits for it nothing is lost; for longer its trials run elsewhere, at once, and when it
    returns it is another node, that is used."""
    wait_for(lambda: cluster.up() == 4)  # with the head
    process = start(place, cluster, 120, "space.sleep_s=1.0", "trial.retries=5")
    wait_for(lambda: ended(place).total() > 18)
    apart.cut_off()
    time.sleep(3)
    apart.reconnect()
    before = ended(place).total()
    wait_for(lambda: ended(place).total() > before + 12)
    apart.cut_off()
    wait_for(lambda: cluster.up() == 3, timeout_s=90)
    before = ended(place).total()
    wait_for(lambda: ended(place).total() > before + 12)
    apart.reconnect()
    apart.process.wait(timeout=60)  # Ray ends a raylet that was given up
    apart.start()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "lost     1 node (10.203." in err and "joined   1 node (10.203." in err, err
    finished_once(place, 120, held=2)
    wait_for(lambda: not cluster.workers())


@pytest.mark.soak
def test_a_node_that_does_not_answer_holds_nobody(place: Place, cluster: Cluster) -> None:
    """Its raylet is stopped, and the head does not know that yet: the other two are found meanwhile."""
    (raylet,) = cluster.nodes[0].all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGSTOP)
    code = """
import sys, time
from sweeper.cluster import Scout, _init
_init(address=sys.argv[1])
scout, found, longest_s, until_s = Scout(), [], 0.0, time.monotonic() + 20
while len(found) < 2 and time.monotonic() < until_s:
    began_s = time.monotonic()
    more, up = scout.look({node.id for node in found})
    found += more
    longest_s = max(longest_s, time.monotonic() - began_s)
    time.sleep(0.5)
print(len(up), sorted(node.gpus for node in found), longest_s)
"""
    command = [sys.executable, "-c", code, cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    os.kill(raylet.process.pid, signal.SIGCONT)
    up, *found, longest_s = done.stdout.split()
    assert (up, found) == ("3", ["[0,", "2]"]) and float(longest_s) < 3, done


@pytest.mark.soak
def test_a_trial_that_leaks_memory_is_ended_by_ray_and_said_to_be_infeasible(
    place: Place, cluster: Cluster, tight: Tight
) -> None:
    for node in cluster.nodes:
        cluster.lose(node)
    wait_for(lambda: cluster.up() == 2)
    words = ["gpus=1", "search=grid", "space.x=0", "space.y=range(0,6)", "space.behaviour=ok,leak", "cluster.workers=1"]
    done = place.run(*SWEEP, *words, f"cluster.address={cluster.address}", "budget.trials=4", RAY_AUTH_MODE="disabled")
    assert done.code == 0, done.err
    outcomes = Counter((run.data.params["behaviour"], run.data.tags["outcome"]) for run in place.runs("trial"))
    assert outcomes == {("ok", "complete"): 2, ("leak", "infeasible"): 2}
    assert "2 infeasible: out of memory: the node was running low on memory and Ray ended the worker" in done.out


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
