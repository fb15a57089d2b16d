"""Compare nodes by their trials to find nodes where more trials fail or where the same work is slower.

A node is not blamed for the effects of parameters. Failures are counted by point, and a point is ignored if its
failures have no node in common. Speeds are compared only within a round, in which the driver measures the same
parameters on every node (a `Remeasurement` with an empty group).
"""

import math
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sweeper.common.trials import BAD, Remeasurement, TrialStatus

JUDGED_STATUSES = (*BAD, TrialStatus.COMPLETE, TrialStatus.PRUNED)
RECENT_TRIALS = 50  # only a node's last trials count because they show the present state
MIN_FAILURES = 3
SIGNIFICANCE_LEVEL = 1 / 2_000  # of the failure test: the probability that chance alone drains a node
SLOW_MEASUREMENTS = 3  # consecutive slow measurements of the same parameters after which a node is drained
TRIALS_BETWEEN_ROUNDS = 20  # trials per node between two comparison rounds


@dataclass(frozen=True)
class NodeObservation:
    """The outcome of one attempt at a trial, and the Ray ids of the nodes on which it ran."""

    nodes: tuple[str, ...]
    point: str  # `point_key` of the trial's parameters
    status: TrialStatus
    started_at_s: float
    ended_at_s: float
    value: float | None = None  # the objective, if the trial has one
    remeasurement: Remeasurement | None = None


def find_failing_nodes(
    observations: Iterable[NodeObservation], nodes: Collection[str], suspects: Iterable[str]
) -> dict[str, str]:
    """Return the suspects where significantly more recent trials failed than on other nodes, each with the reason.

    The node with the most significant failures comes first. Each suspect is compared with the other `nodes`, so the
    result is empty if no trial succeeded elsewhere. Failures on one node that overlap in time count once, because a
    single event may have caused all of them.
    """
    candidates = {*nodes}
    judged = [one for one in observations if one.status in JUDGED_STATUSES and not candidates.isdisjoint(one.nodes)]
    common_nodes: dict[str, set[str]] = {}  # nodes in every failure of a point; empty if the point itself is to blame
    for observation in judged:
        if observation.status in BAD:
            common_nodes.setdefault(observation.point, {*observation.nodes}).intersection_update(observation.nodes)
    judged = [observation for observation in judged if observation.status not in BAD or common_nodes[observation.point]]
    failing = []
    for node in candidates & {*suspects}:
        here = [observation for observation in judged if node in observation.nodes][-RECENT_TRIALS:]
        elsewhere = [observation for observation in judged if node not in observation.nodes]
        failed_here = _count_failures(here)
        failed_elsewhere = len({observation.point for observation in elsewhere if observation.status in BAD})
        trials_here = failed_here + sum(observation.status not in BAD for observation in here)
        trials_elsewhere = failed_elsewhere + sum(observation.status not in BAD for observation in elsewhere)
        # Fisher's exact test, one-sided: the probability of at least this many failures on the node by chance.
        failed, trials = failed_here + failed_elsewhere, trials_here + trials_elsewhere
        counts = range(failed_here, min(trials_here, failed) + 1)
        ways = sum(math.comb(trials_here, n) * math.comb(trials_elsewhere, failed - n) for n in counts)
        p_value = ways / math.comb(trials, failed)
        if failed_here >= MIN_FAILURES and p_value < SIGNIFICANCE_LEVEL:
            elsewhere_too = f"{failed_elsewhere} of {trials_elsewhere} elsewhere"
            failing.append((p_value, node, f"{failed_here} of its last {trials_here} trials failed, {elsewhere_too}"))
    return {node: reason for _, node, reason in sorted(failing)}


def _count_failures(observations: Iterable[NodeObservation]) -> int:
    failures = [observation for observation in observations if observation.status in BAD]
    count = 0
    points = set[str]()
    counted_until_s = -math.inf
    for failure in sorted(failures, key=lambda failure: failure.ended_at_s):
        if failure.point not in points and failure.started_at_s >= counted_until_s:
            count += 1
            counted_until_s = failure.ended_at_s
        points.add(failure.point)
    return count


@dataclass(frozen=True)
class ComparisonRound:
    """One round, in which one trial's parameters are measured on every node at about the same time."""

    trial: int
    number: int
    values: dict[str, list[float | None]]  # objective values by node; None for a failure

    def select_nodes(self, nodes: Collection[str], threshold: float, direction: str) -> list[str]:
        """Return the nodes to measure: unmeasured nodes, and nodes that were slow in every measurement so far."""
        ratios = self.compute_ratios(nodes, direction)
        slow = {node for node in nodes if max(ratios.get(node, [math.inf])) < threshold}
        measured = {node: len(self.values.get(node, [])) for node in nodes}
        return [n for n in nodes if not measured[n] or (n in slow and measured[n] < SLOW_MEASUREMENTS)]

    def find_slow_nodes(self, nodes: Collection[str], threshold: float, direction: str) -> dict[str, str]:
        """Return the nodes that were slow in every measurement, slowest first, each with the reason."""
        ordered = sorted(self.compute_ratios(nodes, direction).items(), key=lambda entry: max(entry[1]))
        slow = {node: own for node, own in ordered if len(own) >= SLOW_MEASUREMENTS and max(own) < threshold}
        medians = {node: f"{statistics.median(own):.2f} of the other nodes' median" for node, own in slow.items()}
        return {n: f"trial {self.trial} reached {medians[n]} in {len(own)} measurements" for n, own in slow.items()}

    def compute_ratios(self, nodes: Collection[str], direction: str) -> dict[str, list[float]]:
        """Return each node's values divided by the median of the other nodes' medians.

        Whether the objective is minimized or maximized, a ratio of 0.9 means 10% worse. The result is empty for fewer
        than two nodes, or if any value is zero or negative and so has no meaningful ratio."""
        values_of = {node: [value for value in self.values.get(node, []) if value is not None] for node in nodes}
        values_of = {node: values for node, values in values_of.items() if values}
        if len(values_of) < 2 or not all(value > 0 for values in values_of.values() for value in values):
            return {}
        exponent = 1 if direction == "maximize" else -1
        median_of = {node: statistics.median(values) for node, values in values_of.items()}
        ordered = sorted(median_of, key=lambda node: median_of[node])
        medians = [median_of[node] for node in ordered]
        others = {node: statistics.median(medians[:n] + medians[n + 1 :]) for n, node in enumerate(ordered)}
        return {node: [(value / others[node]) ** exponent for value in values] for node, values in values_of.items()}


def find_last_round(observations: Iterable[NodeObservation]) -> ComparisonRound | None:
    """Return the latest comparison round, or None before the first round."""
    rounds: dict[tuple[int, int], dict[str, list[float | None]]] = {}
    for observation in observations:
        remeasurement = observation.remeasurement
        if remeasurement is not None and not remeasurement.group and observation.status is not TrialStatus.CANCELLED:
            values = rounds.setdefault((remeasurement.round, remeasurement.trial), {})
            if len(observation.nodes) == 1:
                values.setdefault(observation.nodes[0], []).append(observation.value)
    if not rounds:
        return None
    number, trial = max(rounds)
    return ComparisonRound(trial, number, rounds[number, trial])
