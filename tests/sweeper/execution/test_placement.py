"""Gangs are placed as a whole on as few nodes as possible, and sweeps on a shared cluster do not block each other."""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Workspace, wait_for
from tests.support.ray_cluster import Cluster, assert_completed_once, count_completions, start_sweep


def make_places(tmp_path: Path, *names: str) -> list[Workspace]:
    for name in names:
        (tmp_path / name).mkdir()
    return [Workspace(tmp_path / name) for name in names]


def node_ids(run: Any) -> list[str]:
    return str(run.data.tags["node_ids"]).split()


@pytest.mark.soak
def test_two_sweeps_on_one_cluster_both_complete(tmp_path: Path, cluster: Cluster) -> None:
    """Gangs of two and of four start at once on six GPUs. Each gang spans as few nodes as possible."""
    cluster.add()
    twos, fours = make_places(tmp_path, "twos", "fours")
    sweeps = [
        start_sweep(twos, cluster, 24, "space.sleep_s=0.5", "gpus=2"),
        start_sweep(fours, cluster, 12, "space.sleep_s=0.5", "gpus=4"),
    ]
    for sweep in sweeps:
        _, err = sweep.communicate(timeout=150)
        assert sweep.returncode == 0, err
    assert_completed_once(twos, 24, ranks=2)
    assert_completed_once(fours, 12, ranks=4)
    assert {len(node_ids(run)) for run in twos.runs("trial")} == {1}
    assert {len(node_ids(run)) for run in fours.runs("trial")} == {2}
    assert not cluster.count_placement_groups()


@pytest.mark.soak
def test_a_gang_that_fits_a_node_waits_for_one_and_is_never_split(tmp_path: Path, cluster: Cluster) -> None:
    """Another sweep holds three of four GPUs at first, and one GPU of a node stays free."""
    singles, pairs = make_places(tmp_path, "singles", "pairs")
    single_sweep = start_sweep(singles, cluster, 6, "space.sleep_s=4", "gpus=1", "cluster.max_concurrent_trials=3")
    wait_for(lambda: count_completions(singles))
    pair_sweep = start_sweep(pairs, cluster, 4, "space.sleep_s=0.2", "gpus=2")
    for sweep in (single_sweep, pair_sweep):
        _, err = sweep.communicate(timeout=150)
        assert sweep.returncode == 0, err
    assert_completed_once(pairs, 4, ranks=2)
    assert {len(node_ids(run)) for run in pairs.runs("trial")} == {1}


@pytest.mark.soak
def test_small_trials_run_on_the_gpus_that_large_ones_leave_free(tmp_path: Path, cluster: Cluster) -> None:
    """A gang of four leaves two of six GPUs free, on which trials of one GPU run meanwhile."""
    cluster.add()
    large, small = make_places(tmp_path, "large", "small")
    large_sweep = start_sweep(large, cluster, 60, "space.sleep_s=0.5", "gpus=4")
    wait_for(lambda: count_completions(large))
    small_sweep = start_sweep(small, cluster, 12, "space.sleep_s=0.5", "gpus=1")
    _, err = small_sweep.communicate(timeout=150)
    assert small_sweep.returncode == 0 and large_sweep.poll() is None, err
    assert_completed_once(small, 12, ranks=1)
    (free_node,) = Counter(node for run in small.runs("trial") for node in node_ids(run))
    _, err = large_sweep.communicate(timeout=150)
    assert large_sweep.returncode == 0, err
    assert not any(free_node in node_ids(run) for run in large.runs("trial"))


@pytest.mark.soak
def test_host_memory_is_reserved_together_with_gpus(tmp_path: Path, cluster: Cluster) -> None:
    """A node has two GPUs and 8 GiB: only one trial of 6 GiB runs on each, also with two sweeps."""
    places = make_places(tmp_path, "one", "other")
    overrides = ("gpus=1", "space.sleep_s=0.5", "space.host_gib=6")
    sweeps = [start_sweep(workspace, cluster, 10, *overrides) for workspace in places]
    for sweep in sweeps:
        _, err = sweep.communicate(timeout=150)
        assert sweep.returncode == 0 and "2 trials at once" in err, err
    runs = [run for workspace in places for run in workspace.runs("trial")]
    assert len(runs) == 20
    for run in runs:
        middle, node = (run.info.start_time + run.info.end_time) / 2, run.data.tags["node_ids"]
        on_node = [other for other in runs if other.data.tags["node_ids"] == node]
        assert [other for other in on_node if other.info.start_time < middle < other.info.end_time] == [run]


@pytest.mark.soak
def test_one_command_sweeps_two_kinds_of_hardware_in_parallel(workspace: Workspace, cluster: Cluster) -> None:
    """Each sweep uses the nodes of its hardware. One Ctrl-C stops both, and the same command resumes both."""
    cluster.add_of("H100")
    arguments = ["-m", "workload=probe", "hardware=h200,h100", "search=random", "finals.top=0", "budget.trials=30"]
    arguments += ["space.sleep_s=0.5", "cluster.insecure=true", f"cluster.address={cluster.address}"]
    process = workspace.start(*arguments, RAY_AUTH_MODE="disabled")
    wait_for(lambda: sum(path.stat().st_size > 4000 for path in workspace.path.glob("sweeps/*/study.journal")) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "h100: stopping" in err and "h200: stopping" in err, err
    result = workspace.run(*arguments, RAY_AUTH_MODE="disabled")
    assert result.code == 0 and "h100: probe on H100: 30 complete" in result.out, result.out + result.err
    assert "h200: probe on H200: 30 complete" in result.out
    complete = [run for run in workspace.runs("trial") if run.data.tags["outcome"] == "complete"]
    runs = {kind: [run for run in complete if run.data.tags["device"] == kind] for kind in ("H100", "H200")}
    assert {len(runs_of_kind) for runs_of_kind in runs.values()} == {30}
    nodes = {kind: {node for run in runs_of_kind for node in node_ids(run)} for kind, runs_of_kind in runs.items()}
    assert not nodes["H100"] & nodes["H200"] and [len(nodes["H100"]), len(nodes["H200"])] == [1, 2]
