"""Times of trials by the driver's clock, from nodes whose clocks show something else."""

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.common.trials import TrialStatus
from sweeper.execution import gang as gang_module
from sweeper.execution.gang import MAX_DRIFT, Gang, NodeClocks, RunningTrial
from sweeper.execution.worker import RankResult
from workloads.api.contract import Measurement

DELAYS_S = st.lists(st.floats(0, 60), min_size=1, max_size=20)
AHEAD_S = (3600.0, -3600.0)  # of the driver's monotonic clock, by rank


@given(st.floats(-1e7, 1e7), DELAYS_S)
def test_a_time_is_late_by_at_most_the_least_delay_of_a_result(offset_s: float, delays_s: list[float]) -> None:
    clocks, now_s = NodeClocks(), 0.0
    for position, delay_s in enumerate(delays_s):
        ended_s = now_s + 1.0
        now_s = ended_s + delay_s
        clocks.observe("n", ended_s - offset_s, now_s)
        error_s = clocks.to_driver("n", ended_s - offset_s) - ended_s
        assert -1e-6 <= error_s <= delay_s + 1e-6  # no result is from the future
        assert error_s <= min(delays_s[: position + 1]) + MAX_DRIFT * now_s + 1e-6


def test_a_clock_that_runs_faster_is_followed() -> None:
    clocks = NodeClocks()
    for hour in range(100):
        clocks.observe("n", 3600.0 * hour * (1 - MAX_DRIFT / 2), 3600.0 * hour)
    last_s = 3600.0 * 99
    assert clocks.to_driver("n", last_s * (1 - MAX_DRIFT / 2)) == pytest.approx(last_s, abs=1e-6)


def test_a_gang_over_nodes_has_the_times_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks ran for two seconds and ended now; one node was started an hour before the driver's, one after it."""
    now_s, at_s = time.monotonic(), time.time()
    ends_s = [now_s + ahead_s for ahead_s in AHEAD_S]
    results = [RankResult(rank, end_s - 2, end_s, Measurement({}, (1.0,))) for rank, end_s in enumerate(ends_s)]
    monkeypatch.setattr(gang_module.ray, "get", lambda ref: results[ref])
    place = {"gpus": "0", "port": 1}
    locations: list[dict[str, Any]] = [place | {"node_id": f"n{rank}", "address": f"n{rank}"} for rank in range(2)]
    gang = Gang("worker", ["first", "second"], None, [], [], locations=locations)
    assert [rank.clock_mhz for rank in gang.build_ranks("cuda", 1, 9.0, clock_mhz=1980)] == [1980, 1980]
    gang.trials.append(RunningTrial(None, {0: 0, 1: 1}))
    result = gang.collect_result({0, 1})
    assert result is not None and result.ended_at_s - result.started_at_s == pytest.approx(2, abs=0.2)
    assert result.ended_at_s == pytest.approx(at_s, abs=0.5)


def test_ranks_that_measure_alone_keep_their_results_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, full = Measurement({}, (1.0,)), "out of memory: 71 GiB are held"
    results = [RankResult(0, status="infeasible", reason=full), RankResult(1, 0.0, 1.0, measured)]
    monkeypatch.setattr(gang_module.ray, "get", lambda ref: results[ref])
    place = {"gpus": "0", "port": 1, "node_id": "n", "address": "n", "node": "n"}
    for waits, arrived in ((False, {0}), (True, {1})):
        gang = Gang("worker", ["first", "second"], None, [], [], locations=[place, place])
        gang.trials.append(RunningTrial(None, {0: 0, 1: 1}, waits_for_all=waits))
        result = gang.collect_result({0})
        assert (result is None) == waits
        result = result or gang.collect_result(arrived)
        assert result is not None and (result.status, result.reason) == (TrialStatus.INFEASIBLE, full)
        assert result.of_ranks == {0: f"infeasible: {full}"} | ({1: measured} if waits else {})


@pytest.mark.parametrize("measured", [True, False])
def test_of_ranks_that_measure_alone_the_one_that_hangs_is_named(
    measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, full = Measurement({}, (1.0,)), RankResult(0, status="infeasible", reason="out of memory")
    monkeypatch.setattr(gang_module.ray, "get", lambda ref: RankResult(0, 0.0, 1.0, value) if measured else full)
    place = {"gpus": "0", "port": 1, "node_id": "n", "address": "n", "node": "n"}
    gang = Gang("worker", ["first", "second"], None, [], [], locations=[place, place])
    running = RunningTrial(None, {0: 0, 1: 1}, kill_after_s=9.0, timeout_s=9.0, waits_for_all=True)
    gang.trials.append(replace(running, started_s=time.monotonic()))
    assert gang.collect_result({0}) is None
    gang.trials[0].started_s -= 10
    result = gang.collect_result(set())
    late = "timed_out: took longer than trial.timeout_s=9"
    assert result is not None and result.of_ranks == {0: value if measured else "infeasible: out of memory", 1: late}
