"""Sweeps over nodes that have their own addresses, host names and temporary files."""

import signal
from collections import Counter

import pytest

from tests.conftest import wait_for
from tests.support.virtual_cluster import Cluster, NodeWorkspace
from tests.support.virtual_mlflow import start_mlflow, uri_of

PROBE = ["workload=probe", "search=random"]


def count_lines(head: NodeWorkspace) -> Counter[str]:
    """Return how often each rank of each point has run to its end."""
    ledger = head.path / "ledger"
    return Counter(ledger.read_text().splitlines()) if ledger.exists() else Counter()


@pytest.mark.soak
def test_trials_run_on_every_node_and_gangs_within_one(head: NodeWorkspace) -> None:
    result = head.sweep(*PROBE, "gpus=2", "budget.trials=12", "space.sleep_s=0.3", f"space.ledger={head.path}/ledger")
    assert result.code == 0, result.err
    assert head.outcomes() == {"complete": 12}
    assert {run.data.tags["node"] for run in head.runs("trial")} == {"first", "second"}
    assert set(count_lines(head).values()) == {1} and len(count_lines(head)) == 24


@pytest.mark.soak
def test_a_gang_trains_over_nodes_by_gloo(head: NodeWorkspace) -> None:
    sizes = ["space.model=llama_tiny", "space.sequence_length=64", "space.global_batch=8", "space.micro_batch=1"]
    layout = ["space.dp_replicate=1", "space.dp_shard=4", "space.tp=1", "space.cp=1", "space.pp=1", "space.dtype=fp32"]
    others = ["space.stages_per_rank=1", "space.schedule=1f1b", "space.checkpointing=none", "space.compile=false"]
    others += ["space.reshard_after_forward=true", "hardware=cpu", "gpus=4", "budget.trials=1"]
    result = head.sweep("workload=parallel", *sizes, *layout, *others)
    assert result.code == 0, result.err
    (trial,) = head.runs("trial")
    assert trial.data.tags["outcome"] == "complete" and len(set(trial.data.tags["node_ids"].split())) == 2


@pytest.mark.soak
def test_results_go_to_mlflow_on_a_node_of_its_own(two_workers: Cluster, head: NodeWorkspace) -> None:
    node = two_workers.nodes["store"]
    start_mlflow(node, head.path)
    result = head.sweep(*PROBE, "gpus=1", "budget.trials=6", f"tracking.uri={uri_of(node)}")
    assert result.code == 0, result.err
    runs = head.runs("trial", uri=f"sqlite:///{head.path}/server.db")
    assert Counter(run.data.tags["outcome"] for run in runs) == {"complete": 6}


@pytest.mark.soak
def test_a_signal_stops_a_sweep_in_order_and_the_same_command_resumes_it(head: NodeWorkspace) -> None:
    overrides = [*PROBE, "gpus=2", "budget.trials=20", "space.sleep_s=0.5", f"space.ledger={head.path}/ledger"]
    process = head.start_sweep(*overrides)
    wait_for(lambda: len(count_lines(head)) >= 6)
    head.interrupt(process, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    result = head.sweep(*overrides)
    assert result.code == 0 and "resumed" in result.err, result.err
    assert head.outcomes()["complete"] == 20
    wait_for(lambda: not any(node.pids_of("ray::Worker") for node in head.cluster.nodes.values()))
