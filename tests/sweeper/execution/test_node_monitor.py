"""Which nodes a sweep goes on with, by what its trials tell of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.config.hardware import Node, catalogue, select_target
from sweeper.config.resolution import CONF, resolve
from sweeper.config.space import Space
from sweeper.execution.node_health import TRIALS_BETWEEN
from sweeper.execution.node_monitor import NodeMonitor
from sweeper.planning.plan import Plan, Resources


def nodes_of(count: int, *words: str, gpus: int = 1, records: dict[int, TrialRecord] | None = None) -> NodeMonitor:
    """As many nodes n0, n1, … of eight GPUs, and what earlier runs left; nobody looks which of them are up."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        resolved = resolve(compose("config", overrides=["workload=probe", *words]))
    there = [Node("10.0.0.1", 64, "cpu", 8, "H200", id=f"n{n}") for n in range(count)]
    target = select_target(catalogue()["h200"], there, gpus)
    resources = Resources(target, gpus, target.count_gangs(gpus, None), False, 0.0)
    plan = Plan(
        *(resolved, resources, Space({}, {}), [], [], {}, "name", Path(), {}, None, []),
    )
    found = NodeMonitor(plan, {} if records is None else records)
    found._look_at_s = math.inf
    return found


def record(
    number: int, node: str, status: TrialStatus = TrialStatus.COMPLETE, remeasurement: Remeasurement | None = None
) -> TrialRecord:
    metrics = {"score": 1.0} if status is TrialStatus.COMPLETE else {}
    where = {"node_ids": node}
    return TrialRecord(
        number,
        {"x": number},
        status,
        "",
        "",
        metrics,
        [],
        where,
        number,
        number + 0.9,
        0.0,
        remeasurement=remeasurement,
    )


def up(nodes: NodeMonitor) -> list[str | None]:
    return [node.id for node in nodes.target.nodes]


def ends(nodes: NodeMonitor, numbers: range, bad: str) -> list[str]:
    """Trials in turns on all nodes, those on the bad ones failing; what is said meanwhile."""
    said = []
    for number in numbers:
        node = up(nodes)[number % len(up(nodes))]
        nodes.seen(record(number, str(node), TrialStatus.FAILED if str(node) in bad.split() else TrialStatus.COMPLETE))
        said += nodes.news(may_join=True)
    return said


def test_ill_nodes_are_set_aside_one_by_one_and_the_last_one_never() -> None:
    nodes = nodes_of(3)
    (first,) = ends(nodes, range(100), bad="n1")
    assert first.startswith("aside    10.0.0.1 (n1): 5 of its last 5 trials failed, 0 of ")
    assert up(nodes) == ["n0", "n2"] and nodes.gangs() == 16
    assert len(ends(nodes, range(100, 400), bad="n1 n0")) == 1 and up(nodes) == ["n2"]
    assert ends(nodes, range(400, 600), bad="n0 n1 n2") == [] and up(nodes) == ["n2"]
    assert [line.partition(":")[0] for line in nodes.said_aside()] == ["10.0.0.1 (n0)", "10.0.0.1 (n1)"]


def test_no_node_is_set_aside_without_which_no_trial_can_run() -> None:
    assert ends(nodes_of(2, gpus=16), range(100), bad="n1") == []
    assert len(ends(nodes_of(3, gpus=16), range(100), bad="n1")) == 1


def test_what_an_earlier_run_saw_is_known_to_the_next() -> None:
    earlier = [record(n, f"n{n % 3}", TrialStatus.FAILED if n % 3 == 1 else TrialStatus.COMPLETE) for n in range(60)]
    nodes = nodes_of(3, records=dict(enumerate(earlier)))
    assert len(nodes.news(may_join=True)) == 1 and up(nodes) == ["n0", "n2"]


def test_the_best_trial_is_measured_on_each_node_from_time_to_time() -> None:
    best, both = record(7, "n0"), {"n0", "n1"}
    known = {7: best}
    nodes = nodes_of(2, records=known)
    each = 2 * TRIALS_BETWEEN
    assert nodes.to_compare(best, each - 1, both) == []
    wanted = nodes.to_compare(best, each, both)
    assert wanted == [(best, Remeasurement(7, 1, ()), "n0"), (best, Remeasurement(7, 1, ()), "n1")]
    assert [node for *_, node in nodes.to_compare(best, each, {"n1"})] == ["n1"]
    for number, node in ((100, "n0"), (101, "n1")):
        nodes.seen(record(number, node, remeasurement=Remeasurement(7, 1, ())))
    assert nodes.to_compare(best, each + 1, both) == []
    other = known[9] = record(9, "n1")
    nodes.seen(other)
    assert [remeasurement.trial for _, remeasurement, _ in nodes.to_compare(other, 2 * each, both)] == [9, 9]


@pytest.mark.parametrize(
    ("count", "words", "gpus"), [(1, [], 1), (2, ["cluster.set_aside_below=null"], 1), (3, [], 16)]
)
def test_nodes_are_not_compared_where_they_cannot_be_or_need_not(count: int, words: list[str], gpus: int) -> None:
    nodes, best = nodes_of(count, *words, gpus=gpus), record(7, "n0")
    nodes.seen(best)
    assert nodes.to_compare(best, 1000, {"n0", "n1", "n2"}) == []
