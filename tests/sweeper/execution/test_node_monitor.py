"""The results of trials decide which nodes a sweep uses."""

import math
from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir

from sweeper.common.trials import LOST_NODE, Remeasurement, TrialRecord, TrialStatus
from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Node
from sweeper.config.resolution import CONF, resolve
from sweeper.config.schema import Hardware
from sweeper.execution.gang_launcher import GangResources
from sweeper.execution.node_health import TRIALS_BETWEEN_ROUNDS
from sweeper.execution.node_monitor import NodeMonitor
from sweeper.preflight.devices import select_target
from tests.support.factories import trial_record


def build_monitor(
    count: int, *overrides: str, gpus: int = 1, records: dict[int, TrialRecord] | None = None, domains: str = ""
) -> NodeMonitor:
    """Build a monitor of nodes n0, n1, … with eight GPUs and records of earlier runs. It does not poll Ray.

    A letter of `domains` is the NVLink domain of a node.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = resolve(compose("config", overrides=["workload=probe", *overrides])).config
    nodes = [
        Node("10.0.0.1", 64, "cpu", 8, "H200", id=f"n{n}", gpu_domain=domains[n : n + 1] or None) for n in range(count)
    ]
    target = select_target(catalogue()["h200"], nodes, gpus)
    monitor = NodeMonitor(target, config, GangResources(gpus), {} if records is None else records)
    monitor._next_poll_s = math.inf
    return monitor


def record_on(
    number: int, node: str, status: TrialStatus = TrialStatus.COMPLETE, remeasurement: Remeasurement | None = None
) -> TrialRecord:
    return trial_record(
        number,
        status=status,
        metrics={"score": 1.0} if status is TrialStatus.COMPLETE else {},
        where={"node_ids": node},
        started_at_s=number,
        ended_at_s=number + 0.9,
        elapsed_s=0.0,
        remeasurement=remeasurement,
    )


def used_nodes(monitor: NodeMonitor) -> list[str | None]:
    return [node.id for node in monitor.target.nodes]


def add_trials(monitor: NodeMonitor, numbers: range, failing: str) -> list[str]:
    """Add trials on all nodes, of which those on the failing nodes fail. Returns the lines about changes."""
    lines = []
    for number in numbers:
        node = str(used_nodes(monitor)[number % len(used_nodes(monitor))])
        status = TrialStatus.FAILED if node in failing.split() else TrialStatus.COMPLETE
        monitor.add_record(record_on(number, node, status))
        lines += monitor.poll_changes(may_join=True)
    return lines


def test_failing_nodes_are_drained_one_by_one_but_never_the_last_node() -> None:
    monitor = build_monitor(3)
    (line,) = add_trials(monitor, range(100), failing="n1")
    assert line.startswith("drained  10.0.0.1 (n1): 5 of its last 5 trials failed, 0 of ")
    assert used_nodes(monitor) == ["n0", "n2"] and monitor.count_gangs() == 16
    assert len(add_trials(monitor, range(100, 400), failing="n1 n0")) == 1 and used_nodes(monitor) == ["n2"]
    assert add_trials(monitor, range(400, 600), failing="n0 n1 n2") == [] and used_nodes(monitor) == ["n2"]
    assert [line.partition(":")[0] for line in monitor.describe_drained()] == ["10.0.0.1 (n0)", "10.0.0.1 (n1)"]


def test_a_node_is_not_drained_if_no_trial_fits_on_the_others() -> None:
    assert add_trials(build_monitor(2, gpus=16), range(100), failing="n1") == []
    assert len(add_trials(build_monitor(3, gpus=16), range(100), failing="n1")) == 1


@pytest.mark.parametrize(("domains", "drained"), [("aab", 0), ("aaa", 1), ("aabb", 1)])
def test_a_node_is_not_drained_if_trials_would_leave_their_nvlink_domain(domains: str, drained: int) -> None:
    """They would be measured over another network under the same name."""
    monitor = build_monitor(len(domains), gpus=16, domains=domains)
    assert len(add_trials(monitor, range(100), failing="n1")) == drained
    assert monitor.count_gangs() == 1


def test_records_of_an_earlier_run_are_taken_into_account() -> None:
    earlier = [record_on(n, f"n{n % 3}", TrialStatus.FAILED if n % 3 == 1 else TrialStatus.COMPLETE) for n in range(60)]
    monitor = build_monitor(3, records=dict(enumerate(earlier)))
    assert len(monitor.poll_changes(may_join=True)) == 1 and used_nodes(monitor) == ["n0", "n2"]


def test_each_round_measures_the_best_trial_on_every_node() -> None:
    best = record_on(7, "n0")
    both = {"n0", "n1"}
    records = {7: best}
    monitor = build_monitor(2, records=records)
    trials_per_round = 2 * TRIALS_BETWEEN_ROUNDS
    assert monitor.plan_comparisons(best, trials_per_round - 1, both) == []
    comparisons = monitor.plan_comparisons(best, trials_per_round, both)
    assert comparisons == [(best, Remeasurement(7, 1, ()), "n0"), (best, Remeasurement(7, 1, ()), "n1")]
    assert [node for *_, node in monitor.plan_comparisons(best, trials_per_round, {"n1"})] == ["n1"]
    for number, node in ((100, "n0"), (101, "n1")):
        monitor.add_record(record_on(number, node, remeasurement=Remeasurement(7, 1, ())))
    assert monitor.plan_comparisons(best, trials_per_round + 1, both) == []
    better = records[9] = record_on(9, "n1")
    monitor.add_record(better)
    comparisons = monitor.plan_comparisons(better, 2 * trials_per_round, both)
    assert [remeasurement.trial for _, remeasurement, _ in comparisons] == [9, 9]


@pytest.mark.parametrize(
    ("count", "overrides", "gpus"),
    [
        pytest.param(1, [], 1, id="one_node"),
        pytest.param(2, ["cluster.drain_below=null"], 1, id="disabled"),
        pytest.param(3, [], 16, id="trials_over_two_nodes"),
    ],
)
def test_comparison_is_skipped_where_it_is_impossible_or_disabled(count: int, overrides: list[str], gpus: int) -> None:
    monitor, best = build_monitor(count, *overrides, gpus=gpus), record_on(7, "n0")
    monitor.add_record(best)
    assert monitor.plan_comparisons(best, 1000, {"n0", "n1", "n2"}) == []


def test_a_node_that_joins_with_other_code_is_left_out_by_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = build_monitor(2)
    joining = [Node("10.0.0.9", 0, "", id="n9", code_problem="has gpu-sweeper 0.1.0")]
    up = {"n0", "n1", "n9"}
    monkeypatch.setattr(
        monitor._discovery, "poll", lambda known: ([node for node in joining if node.id not in known], up)
    )
    lines = []
    for _ in range(2):
        monitor._next_poll_s = 0.0
        lines += monitor.poll_changes(may_join=True)
    assert len(lines) == 1 and lines[0].startswith("left out 10.0.0.9 has gpu-sweeper 0.1.0")
    assert used_nodes(monitor) == ["n0", "n1"]


def cpu_node(name: str) -> Node:
    return Node("10.0.0.1", 64, "cpu", id=name)


class Joining:
    """What `NodeDiscovery.poll` would return: the nodes that are up, of which a monitor asks for those it lacks."""

    def __init__(self, monitor: NodeMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monitor = monitor
        self.up = list(monitor.target.nodes)
        monkeypatch.setattr(monitor._discovery, "poll", self._poll)

    def _poll(self, known: set[str]) -> tuple[list[Node], set[str | None]]:
        return [node for node in self.up if node.id not in known], {node.id for node in self.up}

    def lines(self, *up: Node, may_join: bool = True) -> list[str]:
        """Return the changes once exactly these nodes are up, by their first word."""
        self.up, self._monitor._next_poll_s = list(up), 0.0
        return [line.split()[0] for line in self._monitor.poll_changes(may_join=may_join)]


def test_on_cpus_a_node_that_joins_takes_the_place_of_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial's cores are those of all nodes of the plan, so another count of nodes would be another measurement."""
    first, second, third, fourth = map(cpu_node, "abcd")
    monitor = build_monitor(1)
    monitor = NodeMonitor(
        select_target(Hardware("cpu", kind="cpu"), [first, second], 1), monitor._config, GangResources(1), {}
    )
    cluster = Joining(monitor, monkeypatch)
    assert cluster.lines(first, second, third) == [] and used_nodes(monitor) == ["a", "b"]
    assert cluster.lines(first, third) == ["lost", "joined"] and used_nodes(monitor) == ["a", "c"]
    assert cluster.lines(third) == ["lost"] and used_nodes(monitor) == ["a", "c"]
    assert cluster.lines(third, fourth) == ["joined"] and used_nodes(monitor) == ["c", "d"]
    assert monitor.count_gangs() == 1


@pytest.mark.parametrize("overrides", [[], ["cluster.max_concurrent_trials=8"]], ids=["finals", "limited"])
def test_where_no_further_node_is_used_one_still_replaces_a_lost_one(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = build_monitor(2, *overrides)
    cluster = Joining(monitor, monkeypatch)
    first, second = monitor.target.nodes
    third = replace(first, id="n3")
    assert cluster.lines(first, second, third, may_join=bool(overrides)) == [] and used_nodes(monitor) == ["n0", "n1"]
    assert cluster.lines(second, third, may_join=bool(overrides)) == ["lost", "joined"]
    assert used_nodes(monitor) == ["n1", "n3"]


def test_a_node_that_joins_during_the_search_is_used_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = build_monitor(2)
    cluster = Joining(monitor, monkeypatch)
    first, second = monitor.target.nodes
    assert cluster.lines(first, second, replace(first, id="n3")) == ["joined"] and monitor.count_gangs() == 24
    assert cluster.lines(second) == ["lost"] and monitor.count_gangs() == 8


def test_a_lost_attempt_counts_for_the_node_of_the_worker_that_is_gone() -> None:
    """The other nodes of its gang are not at fault, however many of its attempts are lost."""
    monitor = build_monitor(3, gpus=16)
    for number in range(60):
        gang = ["n0 n1", "n1 n2", "n0 n2"][number % 3]
        is_lost = "n1" in gang
        record = record_on(number, gang, TrialStatus.LOST if is_lost else TrialStatus.COMPLETE)
        monitor.add_record(replace(record, where={**record.where, **({LOST_NODE: "n1"} if is_lost else {})}))
    (line,) = monitor.poll_changes(may_join=True)
    assert line.startswith("drained  10.0.0.1 (n1): ") and ", 0 of 20 elsewhere" in line
