"""The driver's work for a trial does not grow with the number of trials. `benchmarks/scale/` measures all of it."""

import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scale.simulated_ray import SimulatedRay
from sweeper.common.trials import Trial
from sweeper.config.hardware import Node, Target
from sweeper.config.schema import Budget, Hardware
from sweeper.execution import cluster, gang, gang_launcher, gang_pool
from sweeper.execution.gang_launcher import GangResources, GangSpec
from sweeper.execution.node_monitor import NodeMonitor
from sweeper.search.progress import SweepProgress
from tests.support.factories import trial_record
from tests.support.studies import SCORE
from workloads.api.contract import Measurement

IDS = [f"{n:056x}" for n in range(100)]


def build_target() -> Target:
    nodes = tuple(Node("n", 192, "a CPU", 8, "H200", id=node_id) for node_id in IDS)
    return Target(Hardware(name="h200"), "NVIDIA H200", nodes)


def build_monitor() -> NodeMonitor:
    config: Any = SimpleNamespace(
        workload=SimpleNamespace(objective="score", direction="maximize"),
        cluster=SimpleNamespace(max_concurrent_trials=None, drain_below=0.8),
    )
    return NodeMonitor(build_target(), config, GangResources(1), {})


def test_a_trial_costs_as_much_after_ten_thousand_trials_as_after_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.NodeDiscovery, "poll", lambda *_: ([], {*IDS}))
    progress = SweepProgress(SCORE, Budget(trials=100_000), [])
    monitor = build_monitor()

    def measure_s(first: int, count: int) -> float:
        """Return the CPU seconds of a trial."""
        started_s = time.process_time()
        for number in range(first, first + count):
            where = {"node_ids": IDS[number % len(IDS)]}
            record = trial_record(number, metrics={"score": 1.0}, where=where, started_at_s=1e9, ended_at_s=1e9)
            progress.add(record)
            monitor.add_record(record)
            monitor.poll_changes(may_join=True)
            monitor.plan_comparisons(progress.best, progress.finished_trials, set())
            progress.has_budget_for_more(8)
        return (time.process_time() - started_s) / count

    # The minimum of several runs, because other work on the machine only ever adds time.
    early_s = min(measure_s(100 * n, 100) for n in range(5))
    measure_s(500, 9_000)
    late_s = min(measure_s(9_500 + 100 * n, 100) for n in range(5))
    assert late_s < 3 * early_s


def test_running_trials_are_counted_once_a_round_and_not_once_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget and the progress ask for them at every trial: of 8,000 gangs, a count takes a millisecond."""
    simulation = SimulatedRay(pickle.dumps(Measurement(executed={}, step_times_s=(1.0,))))
    for module in (gang, gang_pool, gang_launcher):
        monkeypatch.setattr(module, "ray", simulation)
        monkeypatch.setattr(module, "time", simulation, raising=False)
    spec = GangSpec("matmul", {}, None, GangResources(1), timeout_s=300.0)
    pool = gang_pool.GangPool(build_target(), spec, 40)
    number = 0
    for _ in range(30):
        for _ in range(min(7, pool.capacity())):
            pool.submit(Trial(number, {"m": number}))
            number += 1
        running = [each.trials[0] for each in pool.gangs if each.ready and each.trials]
        assert pool.count_running() == len(running)
        assert pool.running_s() == pytest.approx(sum(simulation.monotonic() - trial.started_s for trial in running))
        assert pool._sum_running() is pool._sum_running()
        pool.wait(5.0)
    assert number > 80 and pool.count_running() > 30
