"""Nodes held against each other, by trials alone: where more of them fail than elsewhere, where equal work is slower.

Parameters are not to be taken for a node's fault. Failures count by point, and a point that failed on nodes that have
nothing in common counts nowhere. Speeds are compared between trials of the same parameters only, which the driver has
measured on every node for that (`Again` among nothing), and in the same round of it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sweeper.common.trials import BAD, Remeasurement, TrialRecord, TrialResult, TrialStatus
from sweeper.config.space import point_key
from sweeper.search.study import Trial

JUDGED = (*BAD, TrialStatus.COMPLETE, TrialStatus.PRUNED)
RECENT = 50  # so many of a node's last trials say how it is now
LEAST_FAILURES = 3
ONCE_IN = 2_000  # so rarely would chance alone bring as many failures as make a node suspect
TIMES_BEHIND = 3  # so many measurements of the same parameters in a row make a node slow
TRIALS_BETWEEN = 20  # of each node, from one round of comparing to the next


@dataclass(frozen=True)
class NodeObservation:
    """How a trial, or one try of it, ended on these nodes (Ray's ids). figure: its objective, where it has one."""

    nodes: tuple[str, ...]
    point: str
    status: TrialStatus
    started_at_s: float
    ended_at_s: float
    figure: float | None = None
    remeasurement: Remeasurement | None = None

    @staticmethod
    def of_record(record: TrialRecord, objective: str) -> NodeObservation:
        figure = record.metrics.get(objective) if record.status is TrialStatus.COMPLETE else None
        times_s = (record.started_at_s, record.ended_at_s)
        return NodeObservation(
            _nodes(record), point_key(record.params), record.status, *times_s, figure, record.remeasurement
        )

    @staticmethod
    def of_try(trial: Trial, outcome: TrialResult) -> NodeObservation:
        """A try that is no record, since the trial is tried again."""
        times_s = (outcome.started_at_s, outcome.ended_at_s)
        return NodeObservation(
            _nodes(outcome), point_key(trial.params), outcome.status, *times_s, remeasurement=trial.remeasurement
        )


def _nodes(of: TrialRecord | TrialResult) -> tuple[str, ...]:
    return tuple(str(of.where.get("node_ids") or "").split())


# ── where trials fail ──


def failing(sightings: Iterable[NodeObservation], nodes: Collection[str], suspects: Iterable[str]) -> dict[str, str]:
    """Those of the suspects on which more of the last trials failed than chance would have it, and how many; the worst
    first. They are held against the others of `nodes`, where any trial ended well.

    Failures of one node count once where they came from one event, so that trials which were lost together are one.
    """
    among = {*nodes}
    judged = [s for s in sightings if s.status in JUDGED and not among.isdisjoint(s.nodes)]
    to_blame = _points_to_blame(judged)
    judged = [s for s in judged if s.status not in BAD or s.point not in to_blame]
    found = []
    for node in among & {*suspects}:
        here = [s for s in judged if node in s.nodes][-RECENT:]
        there = [s for s in judged if node not in s.nodes]
        failed, failed_there = _failures(here), len({s.point for s in there if s.status in BAD})
        well, well_there = (sum(s.status not in BAD for s in each) for each in (here, there))
        chance = _as_many(failed, failed + well, failed + failed_there, failed + well + failed_there + well_there)
        if failed >= LEAST_FAILURES and chance * ONCE_IN < 1:
            words = f"{failed} of its last {failed + well} trials failed, {failed_there} of {failed_there + well_there}"
            found.append((chance, node, f"{words} elsewhere"))
    return {node: why for _, node, why in sorted(found)}


def _points_to_blame(sightings: Iterable[NodeObservation]) -> set[str]:
    """The points that failed on nodes that have nothing in common."""
    common: dict[str, set[str]] = {}
    for sighting in sightings:
        if sighting.status in BAD:
            common[sighting.point] = common.get(sighting.point, {*sighting.nodes}) & {*sighting.nodes}
    return {point for point, nodes in common.items() if not nodes}


def _failures(sightings: Sequence[NodeObservation]) -> int:
    """How many different points failed, of those that overlap in time one."""
    count, points, until_s = 0, set[str](), -math.inf
    for each in sorted((s for s in sightings if s.status in BAD), key=lambda s: s.ended_at_s):
        if each.point not in points and each.started_at_s >= until_s:
            count, until_s = count + 1, each.ended_at_s
        points.add(each.point)
    return count


def _as_many(least: int, here: int, failed: int, of_all: int) -> float:
    """The chance that at least so many of the failed are among those here, were they drawn from all (Fisher's test)."""
    ways = range(least, min(here, failed) + 1)
    return sum(math.comb(here, n) * math.comb(of_all - here, failed - n) for n in ways) / math.comb(of_all, failed)


# ── where equal work is slower ──


@dataclass(frozen=True)
class Round:
    """One point measured on every node at about the same time. `figures` by node, None where there was no figure."""

    of: int
    number: int
    figures: dict[str, list[float | None]]

    def wanted(self, nodes: Collection[str], below: float, direction: str) -> list[str]:
        """Where it is still to be measured: once on each node, and again where that was behind the others."""
        behind = self.ratios(nodes, direction)
        return [
            node
            for node in nodes
            if not (tries := self.figures.get(node, []))
            or (len(tries) < TIMES_BEHIND and max(behind.get(node, [math.inf])) < below)
        ]

    def behind(self, nodes: Collection[str], below: float, direction: str) -> dict[str, str]:
        """Those of `nodes` that were behind the others of them each time, and how far; the worst first."""
        found = {}
        for node, ratios in sorted(self.ratios(nodes, direction).items(), key=lambda each: max(each[1])):
            if len(ratios) >= TIMES_BEHIND and max(ratios) < below:
                speed = statistics.median(ratios)
                found[node] = f"trial {self.of} reached {speed:.2f} of what it did on the others, {len(ratios)} times"
        return found

    def ratios(self, nodes: Collection[str], direction: str) -> dict[str, list[float]]:
        """Each figure of a node over the median of the other nodes' medians, 0.9 being worse by a tenth whatever the
        direction. Nothing where a figure is not above zero: of those there is no ratio."""
        known = {node: [f for f in self.figures.get(node, []) if f is not None] for node in nodes}
        known = {node: figures for node, figures in known.items() if figures}
        if len(known) < 2 or not all(figure > 0 for figures in known.values() for figure in figures):
            return {}
        sign, middles = 1 if direction == "maximize" else -1, {n: statistics.median(f) for n, f in known.items()}
        in_order = sorted(middles, key=lambda node: middles[node])
        each = [middles[node] for node in in_order]
        others = {node: statistics.median(each[:place] + each[place + 1 :]) for place, node in enumerate(in_order)}
        return {node: [(figure / others[node]) ** sign for figure in figures] for node, figures in known.items()}


def last_round(sightings: Iterable[NodeObservation]) -> Round | None:
    """The round of comparing that was begun last."""
    rounds = defaultdict[tuple[int, int], list[NodeObservation]](list)
    for sighting in sightings:
        remeasurement = sighting.remeasurement
        if remeasurement is not None and not remeasurement.group and sighting.status is not TrialStatus.CANCELLED:
            rounds[remeasurement.round, remeasurement.trial].append(sighting)
    if not rounds:
        return None
    number, of = max(rounds)
    figures = defaultdict[str, list[float | None]](list)
    for sighting in rounds[number, of]:
        if len(sighting.nodes) == 1:
            figures[sighting.nodes[0]].append(sighting.figure)
    return Round(of, number, dict(figures))
