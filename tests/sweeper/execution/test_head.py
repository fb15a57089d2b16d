"""A sweep waits for its cluster's head as long as Ray does, and ends with a message before Ray ends it without one."""

import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from sweeper.execution import head
from sweeper.execution.cluster import ClusterError, NodeDiscovery, list_nodes
from tests.conftest import Workspace, wait_for
from tests.support.ray_cluster import Cluster, assert_completed_once, count_completions, start_sweep
from workloads.api.errors import UserInputError


@pytest.mark.parametrize(("limit", "timeout_s"), [(None, 55), ("600", 595), ("4", 2)])
def test_the_timeout_is_a_little_below_rays(
    limit: str | None, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(head.LIMIT_VARIABLE, limit or "")
    assert head.read_timeout_s() == timeout_s


def test_a_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(head.LIMIT_VARIABLE, "10m")
    with pytest.raises(UserInputError, match=r"reconnect_timeout_s=10m: expected a number of seconds"):
        head.read_timeout_s()


def test_ray_reads_its_limit_from_this_variable() -> None:
    binary = (Path(ray.__file__).parent / "_raylet.so").read_bytes()
    assert head.LIMIT_VARIABLE.encode() in binary, (
        f"Ray {ray.__version__} no longer reads {head.LIMIT_VARIABLE}: look for its successor in"
        " src/ray/common/ray_config_def.h, put it and its default into sweeper/execution/head.py and"
        " docs/guides/cluster.md"
    )


def test_a_head_that_comes_back_in_time_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setenv(head.LIMIT_VARIABLE, "3")  # lost after 1.5 s
    lost = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    with head.on_head_lost(lambda address: lost.set() if address == f"127.0.0.1:{port}" else None):
        head.watch(f"127.0.0.1:{port}")
        server.close()
        assert head.is_away() and not lost.wait(0.3)
        with socket.create_server(("127.0.0.1", port)):
            assert not lost.wait(1.8) and not head.is_away()
        assert lost.wait(10)
    head.watch(None)
    assert not head.is_away()


def test_nodes_are_not_read_while_the_head_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.nodes` blocks until the head is back; trials would end meanwhile and no others start."""
    monkeypatch.setattr(head, "is_away", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: pytest.fail("read without a head"))
    assert NodeDiscovery().poll({"a node"}) == ([], {"a node"})


def test_a_dead_node_of_the_driver_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reports no error then, and no result arrives. test_kills.py kills a raylet (soak)."""
    entry = {"Alive": True, "NodeID": "a", "NodeManagerAddress": "10.0.0.7"}
    monkeypatch.setattr(ray, "nodes", lambda: [entry])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    assert list_nodes() == [entry]
    entry["Alive"] = False
    with pytest.raises(ClusterError, match=r"10\.0\.0\.7 is dead"):
        list_nodes()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_head_that_restarts_within_rays_limit_costs_no_trial(
    workspace: Workspace, external_storage: Path, cluster: Cluster
) -> None:
    """The head is down for 45 of 60 s. Its state is in RocksDB, so it knows its nodes, gangs and driver again."""
    process = start_sweep(workspace, cluster, 60, "space.sleep_s=1.0")
    wait_for(lambda: count_completions(workspace).total() > 8)
    before = count_completions(workspace).total()
    cluster.restart_head(45)
    during = count_completions(workspace).total() - before
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0 and not re.search("lost|retrying", err), err
    assert_completed_once(workspace, 60)
    assert {run.data.tags["attempts"] for run in workspace.runs("trial")} == {"1"}
    assert during >= 2 * 20, "trials did not go on without the head"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_head_that_hangs_costs_no_trial(workspace: Workspace, cluster: Cluster) -> None:
    """The head's process is stopped for 45 s and continues: connections to it are accepted and not answered."""
    process = start_sweep(workspace, cluster, 60, "space.sleep_s=1.0")
    wait_for(lambda: count_completions(workspace).total() > 8)
    with cluster.stopped_head():
        time.sleep(45)
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0 and not re.search("lost|retrying", err), err
    assert_completed_once(workspace, 60)
