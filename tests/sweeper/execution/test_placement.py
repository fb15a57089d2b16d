"""Gangs are placed whole, in as few nodes as will do, and sweeps that share a cluster do not wait for each other for
ever."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Place, wait_for
from tests.support.ray_cluster import Cluster, ended, finished_once, start


def places(tmp_path: Path, *names: str) -> list[Place]:
    for name in names:
        (tmp_path / name).mkdir()
    return [Place(tmp_path / name) for name in names]


def nodes_of(run: Any) -> list[str]:
    return str(run.data.tags["node_ids"]).split()


@pytest.mark.soak
def test_two_sweeps_on_one_cluster_both_come_to_their_end(tmp_path: Path, cluster: Cluster) -> None:
    """Gangs of two and of four for six GPUs, started at once. Each gang is in as few nodes as will do."""
    cluster.add()
    twos, fours = places(tmp_path, "twos", "fours")
    one = start(twos, cluster, 24, "space.sleep_s=0.5", "gpus=2")
    other = start(fours, cluster, 12, "space.sleep_s=0.5", "gpus=4")
    for process in (one, other):
        _, err = process.communicate(timeout=150)
        assert process.returncode == 0, err
    finished_once(twos, 24, ranks=2)
    finished_once(fours, 12, ranks=4)
    assert {len(nodes_of(run)) for run in twos.runs("trial")} == {1}
    assert {len(nodes_of(run)) for run in fours.runs("trial")} == {2}
    assert not cluster.placement_groups()


@pytest.mark.soak
def test_small_trials_run_in_the_gap_that_large_ones_leave(tmp_path: Path, cluster: Cluster) -> None:
    """Of six GPUs a gang of four leaves two, on which trials of one GPU run meanwhile."""
    cluster.add()
    large, small = places(tmp_path, "large", "small")
    first = start(large, cluster, 60, "space.sleep_s=0.5", "gpus=4")
    wait_for(lambda: ended(large))
    second = start(small, cluster, 12, "space.sleep_s=0.5", "gpus=1")
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0 and first.poll() is None, err
    finished_once(small, 12, ranks=1)
    (gap,) = Counter(node for run in small.runs("trial") for node in nodes_of(run))
    _, err = first.communicate(timeout=150)
    assert first.returncode == 0, err
    assert not any(gap in nodes_of(run) for run in large.runs("trial"))


@pytest.mark.soak
def test_the_hosts_memory_is_reserved_with_the_gpus(tmp_path: Path, cluster: Cluster) -> None:
    """Two GPUs and 8 GiB a node: of trials that take 6 GiB of it one runs on each, of two sweeps together as well."""
    both = places(tmp_path, "one", "other")
    words = ("gpus=1", "space.sleep_s=0.5", "space.host_gib=6")
    processes = [start(place, cluster, 10, *words) for place in both]
    for process in processes:
        _, err = process.communicate(timeout=150)
        assert process.returncode == 0 and "2 trials at once" in err, err
    runs = [run for place in both for run in place.runs("trial")]
    assert len(runs) == 20
    for run in runs:
        at, node = (run.info.start_time + run.info.end_time) / 2, run.data.tags["node_ids"]
        beside = [r for r in runs if r.data.tags["node_ids"] == node and r.info.start_time < at < r.info.end_time]
        assert beside == [run]


@pytest.mark.soak
def test_one_command_sweeps_two_kinds_of_hardware_side_by_side(place: Place, cluster: Cluster) -> None:
    """Each takes the nodes that it asked for; one Ctrl-C stops both, and the same command goes on with both."""
    cluster.add_of("H100")
    words = ["-m", "workload=probe", "hardware=h200,h100", "search=random", "finals.top=0", "budget.trials=30"]
    words += ["space.sleep_s=0.5", "cluster.insecure=true", f"cluster.address={cluster.address}"]
    process = place.start(*words, RAY_AUTH_MODE="disabled")
    wait_for(lambda: sum(path.stat().st_size > 4000 for path in place.path.glob("sweeps/*/study.journal")) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "h100: stopping" in err and "h200: stopping" in err, err
    done = place.run(*words, RAY_AUTH_MODE="disabled")
    assert done.code == 0 and "h100: probe on H100: 30 complete" in done.out, done.out + done.err
    assert "h200: probe on H200: 30 complete" in done.out
    runs = [run for run in place.runs("trial") if run.data.tags["outcome"] == "complete"]
    of = {kind: [run for run in runs if run.data.tags["device"] == kind] for kind in ("H100", "H200")}
    assert {len(found) for found in of.values()} == {30}
    nodes = [{node for run in found for node in nodes_of(run)} for found in of.values()]
    assert not nodes[0] & nodes[1] and [len(found) for found in nodes] == [1, 2]
