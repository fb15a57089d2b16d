"""A sweep survives the loss of nodes, workers and the head: several real Ray nodes on this machine."""

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

from tests.conftest import REPOSITORY, Workspace, wait_for
from tests.support.ray_cluster import (
    SWEEP,
    Cluster,
    LowMemoryNode,
    RemoteNode,
    assert_completed_once,
    count_completions,
    start_sweep,
)


@pytest.fixture
def remote_node(cluster: Cluster) -> Iterator[RemoteNode]:
    node = RemoteNode(cluster)
    yield node
    node.close()


@pytest.fixture
def low_memory_node(cluster: Cluster) -> Iterator[LowMemoryNode]:
    node = LowMemoryNode(cluster)
    yield node
    node.close()


@pytest.mark.soak
def test_a_sweep_survives_a_lost_node_a_new_node_and_a_killed_worker(workspace: Workspace, cluster: Cluster) -> None:
    """The short form of `test_faults.py`."""
    process = start_sweep(workspace, cluster, 32, "space.sleep_s=1.0", "trial.retries=5")
    wait_for(lambda: count_completions(workspace).total() > 8)
    cluster.lose(cluster.nodes[0])
    for pid in cluster.worker_pids()[-1:]:
        with suppress(ProcessLookupError):  # it may end together with its node
            os.kill(pid, signal.SIGKILL)
    cluster.add()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "lost, retrying" in err and "lost     1 node (" in err and "joined   1 node (" in err, err
    assert_completed_once(workspace, 32)
    pids = {run.data.tags["pid"] for run in workspace.runs("trial")}
    assert len(pids) >= 3


@pytest.mark.soak
def test_a_lost_head_ends_the_driver_and_a_restarted_head_resumes_the_sweep(
    workspace: Workspace, cluster: Cluster
) -> None:
    process = start_sweep(workspace, cluster, 24, "space.sleep_s=1.0")
    wait_for(lambda: count_completions(workspace).total() > 8)
    address = cluster.address
    cluster.lose_head()
    _, err = process.communicate(timeout=100)  # Ray waits for 60 s, the sweep for a little less
    assert process.returncode == 1
    assert f"stopped  the cluster's head {address} does not respond; finished trials are kept. Start it again" in err
    assert "to resume:" in err and err.rstrip().splitlines()[-1].startswith("  python -m sweeper"), err
    cluster.lose_all()
    wait_for(lambda: not cluster.worker_pids())

    restarted = Cluster(2, cluster.port)
    assert restarted.address == address
    process = start_sweep(workspace, restarted, 24, "space.sleep_s=1.0")
    _, err = process.communicate(timeout=120)
    restarted.close()
    assert process.returncode == 0 and "resumed" in err, err
    assert workspace.states() == {"COMPLETE": 24}
    assert len(count_completions(workspace)) == 2 * 24
    assert count_completions(workspace).total() <= 2 * (24 + 4)  # two gangs held two trials each


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_sweep_survives_a_node_that_is_cut_off_and_returns(
    workspace: Workspace, short_ray_timeouts: None, cluster: Cluster, remote_node: RemoteNode
) -> None:
    """A short interruption loses nothing. After a long one its trials run elsewhere, and it joins as a new node."""
    wait_for(lambda: cluster.count_alive() == 4)  # with the head
    process = start_sweep(workspace, cluster, 120, "space.sleep_s=1.0", "trial.retries=5")
    wait_for(lambda: count_completions(workspace).total() > 18)
    remote_node.cut_off()
    time.sleep(3)
    remote_node.reconnect()
    before = count_completions(workspace).total()
    wait_for(lambda: count_completions(workspace).total() > before + 12)
    remote_node.cut_off()
    wait_for(lambda: cluster.count_alive() == 3, timeout_s=90)
    before = count_completions(workspace).total()
    wait_for(lambda: count_completions(workspace).total() > before + 12)
    remote_node.reconnect()
    remote_node.process.wait(timeout=60)  # Ray ends the raylet of a node that it has declared dead
    remote_node.start()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "lost     1 node (10.203." in err and "joined   1 node (10.203." in err, err
    assert_completed_once(workspace, 120, held=2)
    wait_for(lambda: not cluster.worker_pids())


@pytest.mark.soak
def test_a_node_that_does_not_answer_does_not_block_discovery(workspace: Workspace, cluster: Cluster) -> None:
    """The raylet of a node is stopped and the head does not know it yet: the other two are discovered meanwhile."""
    (raylet,) = cluster.nodes[0].all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGSTOP)
    program = """
import sys, time
from sweeper.execution.cluster import NodeDiscovery, init_ray
init_ray(address=sys.argv[1])
discovery, nodes, longest_poll_s, deadline_s = NodeDiscovery(), [], 0.0, time.monotonic() + 20
while len(nodes) < 2 and time.monotonic() < deadline_s:
    started_s = time.monotonic()
    new_nodes, alive = discovery.poll({node.id for node in nodes})
    nodes += new_nodes
    longest_poll_s = max(longest_poll_s, time.monotonic() - started_s)
    time.sleep(0.5)
print(len(alive), sorted(node.gpus for node in nodes), longest_poll_s)
"""
    command = [sys.executable, "-c", program, cluster.address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    os.kill(raylet.process.pid, signal.SIGCONT)
    alive, *gpus, longest_poll_s = result.stdout.split()
    assert (alive, gpus) == ("3", ["[0,", "2]"]) and float(longest_poll_s) < 3, result


@pytest.mark.soak
def test_a_trial_that_leaks_memory_is_ended_by_ray_and_infeasible(
    workspace: Workspace, cluster: Cluster, low_memory_node: LowMemoryNode
) -> None:
    for node in cluster.nodes:
        cluster.lose(node)
    wait_for(lambda: cluster.count_alive() == 2)
    overrides = ["gpus=1", "search=grid", "space.x=0", "space.y=range(0,6)", "space.behaviour=ok,leak"]
    overrides += ["cluster.max_concurrent_trials=1", f"cluster.address={cluster.address}", "budget.trials=4"]
    result = workspace.run(*SWEEP, *overrides, RAY_AUTH_MODE="disabled")
    assert result.code == 0, result.err
    outcomes = Counter((run.data.params["behaviour"], run.data.tags["outcome"]) for run in workspace.runs("trial"))
    assert outcomes == {("ok", "complete"): 2, ("leak", "infeasible"): 2}
    assert "2 infeasible: out of memory: the node was running low on memory and Ray ended the worker" in result.out


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "overrides", "code", "reason"),
    [
        ("fails", [], 1, r"\d+ of its last \d+ trials failed, 0 of \d+ elsewhere"),
        ("slow", ["workload.objective=step_time_ms", "workload.direction=minimize"], 0, r"reached 0\.[3-8]\d of the"),
    ],
)
def test_a_faulty_node_is_drained_and_reported(
    workspace: Workspace, cluster: Cluster, fault: str, overrides: list[str], code: int, reason: str
) -> None:
    """One of three nodes is slow, or fails all its trials: the rest of the sweep runs on the other two."""
    cluster.add(SWEEPER_PROBE=fault)
    sweep = [f"cluster.address={cluster.address}", "budget.trials=240", "space.sleep_s=0.3", "gpus=1"]
    result = workspace.run(*SWEEP, *sweep, *overrides, RAY_AUTH_MODE="disabled")
    assert result.code == code, result.err
    assert re.search(rf"drained  \S+ \(\w+\): .*{reason}.*; 4 trials at once", result.err), result.err
    (parent,) = workspace.runs("sweep")
    assert re.search(reason, parent.data.tags["drained"]) and re.search(f"drained .*{reason}", result.out), result.out
    searched = [run for run in workspace.runs("trial") if "remeasured_trial" not in run.data.tags]
    assert len(searched) == 240
    last = sorted(searched, key=lambda run: run.info.start_time)[-12:]
    (drained_node,) = re.findall(r"drained  \S+ \((\w+)\)", result.out)
    assert not any(run.data.tags["node_ids"].startswith(drained_node) for run in last)
    assert any(run.data.tags["node_ids"].startswith(drained_node) for run in searched)


@pytest.mark.soak
def test_exclusive_trials_do_not_share_a_node(workspace: Workspace, cluster: Cluster) -> None:
    sweep = [f"cluster.address={cluster.address}", "budget.trials=12", "space.sleep_s=0.3", "gpus=1", "exclusive=node"]
    result = workspace.run(*SWEEP, *sweep, RAY_AUTH_MODE="disabled")
    assert result.code == 0 and "2 trials at once, none shares a node" in result.err, result.err
    assert len({run.data.tags["pid"] for run in workspace.runs("trial")}) == 2
