"""What the driver does for a trial does not grow with the trials before it: all of it is in `benchmarks/scale/`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.hardware import Node, Target
from sweeper.config.schema import Budget, Hardware
from sweeper.execution import cluster
from sweeper.execution.node_monitor import NodeMonitor
from sweeper.search.state import SweepProgress

IDS = [f"{n:056x}" for n in range(100)]


def plan() -> Any:
    """As much of one as the nodes of a sweep look at."""
    nodes = tuple(Node("n", 192, "a CPU", 8, "H200", ("NVIDIA H200",) * 8, node_id) for node_id in IDS)
    said = SimpleNamespace(
        workload=SimpleNamespace(objective="score", direction="maximize"),
        cluster=SimpleNamespace(workers=None, set_aside_below=0.8),
    )
    target = Target(Hardware(name="h200"), "NVIDIA H200", nodes)
    return SimpleNamespace(target=target, config=said, gpus=1, whole_nodes=False, host_gib=0.0)


def test_a_trial_costs_the_books_as_much_after_ten_thousand_as_after_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.NodeDiscovery, "look", lambda *_: ([], {*IDS}))
    board, nodes = SweepProgress("score", "maximize", Budget(trials=100_000), []), NodeMonitor(plan(), {})

    def took_s(first: int, count: int) -> float:
        begun_s = time.process_time()
        for number in range(first, first + count):
            where = {"node_ids": IDS[number % len(IDS)]}
            record = TrialRecord(
                number, {"x": number}, TrialStatus.COMPLETE, "", "", {"score": 1.0}, [], where, 1e9, 1e9, 1.0
            )
            board.add(record)
            nodes.seen(record)
            nodes.news(may_join=True)
            nodes.to_compare(board.best, board.ended, set())
            board.wants_more(8)
        return (time.process_time() - begun_s) / count

    # The quickest of several hundreds: what else runs on the machine only ever adds.
    early = min(took_s(100 * n, 100) for n in range(5))
    took_s(500, 9_000)
    late = min(took_s(9_500 + 100 * n, 100) for n in range(5))
    assert late < 3 * early
