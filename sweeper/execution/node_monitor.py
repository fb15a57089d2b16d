"""The GPU nodes of a cluster while a sweep runs on it: which join, which are lost, which are set aside."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

from sweeper.common.trials import BAD, Remeasurement, TrialRecord, TrialResult
from sweeper.config.hardware import Node, Target
from sweeper.execution import cluster
from sweeper.execution.node_health import TRIALS_BETWEEN, NodeObservation, Round, failing, last_round
from sweeper.planning.plan import Plan
from sweeper.search.study import Trial

LOOKED_AT_EVERY_S = 10.0
SEEN_LAST = 5000  # so many tries say how nodes are; to look at more would take longer than trials do


class NodeMonitor:
    """`target` is what may be used now, of all nodes that were there at any time. `records`: of earlier runs.

    On a cluster of its own, and on CPUs, where one trial runs at a time, nothing ever changes.
    """

    def __init__(self, planned: Plan, records: Mapping[int, TrialRecord]) -> None:
        self._plan, self.target = planned, planned.target
        self._every = planned.target
        self._watched = planned.target.hardware.kind == "gpu" and all(node.id for node in planned.target.nodes)
        self._scout, self._unlike, self._gone = cluster.NodeDiscovery(), set[str](), set[str]()
        self._look_at_s = 0.0
        self.aside: dict[str, str] = {}  # why, by Ray's id
        self._sightings = deque[NodeObservation](maxlen=SEEN_LAST)
        self._measured = Counter[str]()  # how many trials have a figure, by node
        self._suspects = set[str]()  # where a trial failed since that was last looked at
        self._compared, self._compared_anew = list[NodeObservation](), False
        self._comparing: dict[int, str] = {}  # where trials in flight compare, by number
        self._round, self._wanted = Round(0, 0, {}), list[str]()  # the round of comparing, and where it is wanted,
        self._round_as_of: tuple[int, list[str]] = (0, [])  # as of so many measurements, of these nodes
        self._records = records
        for record in sorted(records.values(), key=lambda record: record.ended_at_s):
            self._note(NodeObservation.of_record(record, planned.config.workload.objective))

    def gangs(self, target: Target | None = None) -> int:
        """How many trials run at once."""
        wanted = self._plan.config.cluster.max_concurrent_trials
        planned = self._plan.resources
        most = (target or self.target).count_gangs(
            planned.gpus, None, whole_nodes=planned.whole_nodes, host_gib=planned.host_gib
        )
        return min(most, wanted or most)

    def said_aside(self) -> list[str]:
        """The nodes that were set aside, with why, and what became of their trials."""
        lines = []
        for node in self._every.nodes:
            if why := self.aside.get(node.id or ""):
                lines.append(f"{node.label}: {why}; {self._measured[node.id or '']} measured there stand as they are")
        return lines

    # ── what has changed ──

    def seen(self, record: TrialRecord) -> None:
        """A trial has ended."""
        self._comparing.pop(record.number, None)
        self._note(NodeObservation.of_record(record, self._plan.config.workload.objective))

    def tried(self, trial: Trial, outcome: TrialResult) -> None:
        """A trial was lost, and is tried again."""
        self._note(NodeObservation.of_try(trial, outcome))

    def news(self, *, may_join: bool) -> list[str]:
        """What has changed since this was last asked, a line each; `target` is then another."""
        if not self._watched:
            return []
        lines = []
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOKED_AT_EVERY_S
            lines = self._looked(may_join)
        if self._suspects or self._compared_anew:
            lines += self._set_aside()
        return lines

    def _note(self, sighting: NodeObservation) -> None:
        if not sighting.nodes:
            return
        self._sightings.append(sighting)
        if sighting.figure is not None:
            self._measured.update(sighting.nodes)
        if sighting.remeasurement and not sighting.remeasurement.group:
            self._compared.append(sighting)
            self._compared_anew = True
        if sighting.status in BAD:
            self._suspects |= {*sighting.nodes}

    def _looked(self, may_join: bool) -> list[str]:
        known = {node.id for node in self._every.nodes if node.id}
        found, up = self._scout.look(known | self._unlike)
        lines = []
        if lost := [node for node in self.target.nodes if node.id not in up | self._gone]:
            self._gone |= {node.id for node in lost if node.id}
            left = "" if self._use_the_rest() else "; none is left, trials wait for one to join"
            lines.append(f"lost     {_said(lost)}{left}")
        target = self._every.with_nodes(
            found if may_join and self._plan.config.cluster.max_concurrent_trials is None else ()
        )
        joined = target.nodes[len(self._every.nodes) :]
        self._unlike |= {node.id for node in found if node.id} - {node.id for node in joined}
        if joined:
            self._every = target
            if self._use_the_rest():
                lines.append(f"joined   {_said(joined)}")
        return lines

    def _set_aside(self) -> list[str]:
        nodes, lines = [node.id for node in self.target.nodes if node.id], []
        found = failing(self._sightings, nodes, self._suspects) if self._suspects else {}
        below = self._plan.config.cluster.drain_below
        if self._compared_anew and below is not None and (compared := last_round(self._compared)):
            found |= compared.behind(nodes, below, self._plan.config.workload.direction)
        self._suspects, self._compared_anew = set(), False
        for node in self.target.nodes:
            if node.id in found and self.gangs(self.target.without_nodes([node.id])):
                self.aside[node.id] = found[node.id]
                self._use_the_rest()
                lines.append(f"aside    {node.label}: {found[node.id]}")
        return lines

    def _use_the_rest(self) -> bool:
        """Whether there is anything to use; else the target stays as it was, and trials wait for nodes."""
        rest = self._every.without_nodes(self._gone | self.aside.keys())
        if self.gangs(rest):
            self.target = rest
            return True
        return False

    # ── equal work ──

    def to_compare(
        self, best: TrialRecord | None, ended: int, room: Collection[str]
    ) -> list[tuple[TrialRecord, Remeasurement, str]]:
        """What is to be measured again on which of the nodes that have room, now that so many trials have ended: from
        time to time the best one on each, to see which is slow."""
        below, nodes = self._plan.config.cluster.drain_below, [n.id for n in self.target.nodes if n.id]
        whole = self._watched and self._plan.resources.gpus <= min(node.gpus for node in self.target.nodes)
        if below is None or not whole or len(nodes) < 2 or best is None:
            return []
        number, state = ended // (TRIALS_BETWEEN * len(nodes)), (len(self._compared), nodes)
        if state != self._round_as_of or number > self._round.number:
            self._round_as_of, self._round = state, last_round(self._compared) or Round(0, 0, {})
            if number > self._round.number:
                self._round = Round(best.number, number, {})
            self._wanted = self._round.wanted(nodes, below, self._plan.config.workload.direction)
        if not self._round.number or self._round.of not in self._records:
            return []
        remeasurement, free = (
            Remeasurement(self._round.of, self._round.number, ()),
            {*room} - {*self._comparing.values()},
        )
        return [(self._records[remeasurement.trial], remeasurement, node) for node in self._wanted if node in free]

    def compares(self, trial: Trial, node: str) -> None:
        """This trial was submitted for it."""
        self._comparing[trial.number] = node


def _said(nodes: Sequence[Node]) -> str:
    names = ", ".join(node.label for node in nodes[:4])
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} ({names}{', …' if len(nodes) > 4 else ''})"
