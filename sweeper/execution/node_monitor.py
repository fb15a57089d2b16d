"""Monitor a cluster's nodes during a sweep: nodes may join, be lost or be drained."""

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from sweeper.common.trials import BAD, LOST_NODE, Remeasurement, Trial, TrialRecord, TrialResult, TrialStatus
from sweeper.config.hardware import Node, Target
from sweeper.config.schema import Config
from sweeper.config.space import Value, point_key
from sweeper.execution import cluster
from sweeper.execution.gang_launcher import GangResources
from sweeper.execution.node_health import (
    TRIALS_BETWEEN_ROUNDS,
    ComparisonRound,
    NodeObservation,
    find_failing_nodes,
    find_last_round,
)

POLL_INTERVAL_S = 10.0
MAX_OBSERVATIONS = 5000  # attempts used for node health; with more, a check would take longer than trials
NO_ROUND = ComparisonRound(0, 0, {})


class NodeMonitor:
    """Decides which nodes a sweep uses.

    A local cluster has one node, and the sweep ends if that node is lost. On other clusters, joining nodes are used if
    they let more trials run at once. On CPUs, in the finals and with cluster.max_concurrent_trials, joining nodes only
    replace lost nodes. CPU nodes are never drained, and each trial keeps the planned number of cores.
    """

    def __init__(
        self, target: Target, config: Config, resources: GangResources, records: Mapping[int, TrialRecord]
    ) -> None:
        """Start from the planned target and the records of earlier runs of the sweep."""
        self.target = target  # the nodes in use
        self.drained: dict[str, str] = {}  # why each node was drained, by Ray's node id
        self._config = config
        self._resources, self._records = resources, records
        self._known_target = target  # includes every node that was ever up
        self._stays_in_domain = target.fits_gpu_domain(resources.ranks, resources.host_gib)
        self._is_cluster = all(node.id for node in target.nodes)
        self._compares = self._is_cluster and target.is_gpu
        self._places = len(target.nodes)  # the largest number of nodes ever in use at once
        self._discovery = cluster.NodeDiscovery()
        self._next_poll_s = 0.0
        self._unsuitable_ids, self._lost_ids = set[str](), set[str]()
        self._observations = deque[NodeObservation](maxlen=MAX_OBSERVATIONS)
        self._measured_trials = Counter[str]()  # the number of trials with an objective, by node
        self._suspects = set[str]()  # nodes on which a trial failed since the last check
        self._comparisons: list[NodeObservation] = []
        self._has_new_comparison = False
        self._comparing: dict[int, str] = {}  # the node of each comparison in flight, by trial number
        self._round = NO_ROUND
        self._nodes_to_measure: list[str] = []
        self._round_state: tuple[int, list[str]] = (0, [])  # the comparison count and nodes at the last update
        for record in sorted(records.values(), key=lambda record: record.ended_at_s):
            self.add_record(record)

    def count_gangs(self, target: Target | None = None) -> int:
        """Return how many trials run at once on `target` (default: the nodes in use). It is 0 if `target` would spread
        trials planned for a single NVLink domain over several domains."""
        target, limit = target or self.target, self._config.cluster.max_concurrent_trials
        ranks, host_gib, whole_nodes = self._resources.ranks, self._resources.host_gib, self._resources.whole_nodes
        if self._stays_in_domain and not target.fits_gpu_domain(ranks, host_gib):
            return 0
        fitting = target.count_gangs(ranks, None, whole_nodes=whole_nodes, host_gib=host_gib)
        return min(fitting, limit or fitting) if target.is_gpu else limit or fitting

    def describe_drained(self) -> list[str]:
        """Return a line for each drained node, with the reason and the number of trials that were measured on it."""
        return [
            f"{node.label}: {self.drained[node.id]}; its {self._measured_trials[node.id]} measured trials are kept"
            for node in self._known_target.nodes
            if node.id and self.drained.get(node.id)
        ]

    def add_record(self, record: TrialRecord) -> None:
        self._comparing.pop(record.number, None)
        is_complete = record.status is TrialStatus.COMPLETE
        value = record.metrics.get(self._config.workload.objective) if is_complete else None
        self.observe(record, record.params, record.remeasurement, value)

    def poll_changes(self, *, may_join: bool) -> list[str]:
        """Update `target` and return a line for each change since the last call. With `may_join`, the target may grow.

        Raises ClusterError if the driver's node is dead.
        """
        lines = []
        if time.monotonic() >= self._next_poll_s:
            self._next_poll_s = time.monotonic() + POLL_INTERVAL_S
            if self._is_cluster:
                lines = self._poll_nodes(may_join)
            else:
                cluster.list_nodes()  # raises if the only node is dead
        if self._compares and (self._suspects or self._has_new_comparison):
            lines += self._drain_nodes()
        return lines

    def observe(
        self,
        source: TrialRecord | TrialResult,
        params: Mapping[str, Value],
        remeasurement: Remeasurement | None,
        value: float | None = None,
    ) -> None:
        """Count a record, or a lost attempt that will be repeated, toward the health of its nodes."""
        nodes = tuple(str(source.where.get(LOST_NODE) or source.where.get("node_ids") or "").split())
        if not nodes:
            return
        times_s = source.started_at_s, source.ended_at_s
        observation = NodeObservation(nodes, point_key(params), source.status, *times_s, value, remeasurement)
        self._observations.append(observation)
        if value is not None:
            self._measured_trials.update(nodes)
        if remeasurement and not remeasurement.group:
            self._comparisons.append(observation)
            self._has_new_comparison = True
        if source.status in BAD:
            self._suspects |= {*nodes}

    def _poll_nodes(self, may_join: bool) -> list[str]:
        used_ids = {node.id for node in self.target.nodes}
        known_ids = {node.id for node in self._known_target.nodes if node.id}
        new_nodes, up = self._discovery.poll(known_ids | self._unsuitable_ids)
        lines = [f"left out {node.address} {node.code_problem}" for node in new_nodes if node.code_problem]
        self._unsuitable_ids |= {node.id for node in new_nodes if node.id and node.code_problem}
        if lost := [node for node in self.target.nodes if node.id not in up | self._lost_ids]:
            self._lost_ids |= {node.id for node in lost if node.id}
            suffix = "" if self._update_target() else "; trials that do not fit on the others wait until one joins"
            lines.append(f"lost     {_describe_nodes(lost)}{suffix}")
        new_nodes = [node for node in new_nodes if not node.code_problem]
        known_count = len(self._known_target.nodes)
        self._known_target = self._known_target.with_nodes(new_nodes)
        same = self._known_target.nodes[known_count:]
        self._unsuitable_ids |= {node.id for node in new_nodes if node.id} - {node.id for node in same}
        if same:
            is_limited = self._config.cluster.max_concurrent_trials is not None or not self.target.is_gpu
            self._update_target(can_grow=may_join and not is_limited)
        if joined := [node for node in self.target.nodes if node.id not in used_ids]:
            lines.append(f"joined   {_describe_nodes(joined)}")
        return lines

    def _drain_nodes(self) -> list[str]:
        workload = self._config.workload
        threshold = self._config.cluster.drain_below
        node_ids = [node.id for node in self.target.nodes if node.id]
        reasons = find_failing_nodes(self._observations, node_ids, self._suspects) if self._suspects else {}
        if self._has_new_comparison and threshold is not None and (last_round := find_last_round(self._comparisons)):
            reasons |= last_round.find_slow_nodes(node_ids, threshold, workload.direction)
        self._suspects = set()
        self._has_new_comparison = False
        lines = []
        for node in self.target.nodes:
            if node.id in reasons and self.count_gangs(self.target.without_nodes([node.id])):
                self.drained[node.id] = reasons[node.id]
                self._update_target()
                lines.append(f"drained  {node.label}: {reasons[node.id]}")
        return lines

    def _update_target(self, can_grow: bool = False) -> bool:
        """Remove lost and drained nodes from the target, replace them, and return whether a trial fits. If no trial
        fits, keep the old target. With `can_grow`, use all known nodes, otherwise at most as many as before."""
        remaining = self._known_target.without_nodes(self._lost_ids | self.drained.keys())
        if not can_grow:
            remaining = replace(remaining, nodes=remaining.nodes[: self._places])
        fits = self.count_gangs(remaining) if remaining.is_gpu else len(remaining.nodes) == self._places
        if fits:
            self.target = remaining
            self._places = max(self._places, len(remaining.nodes))
        return bool(fits)

    def plan_comparisons(
        self, best: TrialRecord | None, ended: int, nodes_with_capacity: Collection[str]
    ) -> list[tuple[TrialRecord, Remeasurement, str]]:
        """Return the trial to remeasure and the nodes with capacity to remeasure it on, in order to find slow nodes.

        A new round begins after every TRIALS_BETWEEN_ROUNDS `ended` trials per node. A round measures the best trial so
        far on each node.
        """
        threshold = self._config.cluster.drain_below
        node_ids = [node.id for node in self.target.nodes if node.id]
        fits_one_node = self._compares and self._resources.ranks <= min(node.gpus for node in self.target.nodes)
        if threshold is None or not fits_one_node or len(node_ids) < 2 or best is None:
            return []
        number = ended // (TRIALS_BETWEEN_ROUNDS * len(node_ids))
        state = (len(self._comparisons), node_ids)
        if state != self._round_state or number > self._round.number:
            self._round_state = state
            self._round = find_last_round(self._comparisons) or NO_ROUND
            if number > self._round.number:
                self._round = ComparisonRound(best.number, number, {})
            direction = self._config.workload.direction
            self._nodes_to_measure = self._round.select_nodes(node_ids, threshold, direction)
        if not self._round.number or self._round.trial not in self._records:
            return []
        record = self._records[self._round.trial]
        remeasurement = Remeasurement(self._round.trial, self._round.number, ())
        available = {*nodes_with_capacity} - {*self._comparing.values()}
        return [(record, remeasurement, node) for node in self._nodes_to_measure if node in available]

    def add_comparison(self, trial: Trial, node: str) -> None:
        self._comparing[trial.number] = node


def _describe_nodes(nodes: Sequence[Node]) -> str:
    names = ", ".join(node.label for node in nodes[:4])
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} ({names}{', …' if len(nodes) > 4 else ''})"
