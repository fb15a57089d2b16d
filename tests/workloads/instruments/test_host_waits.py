"""Calls that other processes disturb are noticed, measured again, and refused where nothing else is left."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator

import pytest

from tests.support.any_load.sitecustomize import ORIGINAL
from workloads.instruments import host_waits
from workloads.instruments.host_waits import HostBusy, ThreadWaits, Turn, select_turns, time_undisturbed


@pytest.fixture(autouse=True)
def real_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ORIGINAL[host_waits.__name__].items():
        monkeypatch.setattr(host_waits, name, value)


CALM = Turn((0.001,), 0.0)
STALLED = Turn((0.030,), 0.055)  # both threads wait for a time slice in every call


def spin() -> None:
    while True:
        pass


@pytest.fixture
def busy_core() -> Iterator[int]:
    """Let two other processes compute on one core, and this one with them."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(0, {core})
    others = [multiprocessing.get_context("fork").Process(target=spin, daemon=True) for _ in range(2)]
    for other in others:
        other.start()
    yield core
    for other in others:
        other.kill()
        other.join()
    os.sched_setaffinity(0, cores)


def test_the_waits_of_threads_are_counted(busy_core: int) -> None:
    waits = ThreadWaits()
    before, started_s = waits.read(), time.perf_counter()
    while time.perf_counter() - started_s < 0.3:
        pass
    waited_s = waits.waited_s(before)
    waits.close()
    assert 0.05 < waited_s < 0.5  # of three processes on one core each waits most of the time


def test_waits_of_threads_that_hardly_run_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of Ray has a dozen: on a busy machine they wait longer than the threads that compute."""
    waits = ThreadWaits()
    monkeypatch.setattr(waits, "read", lambda: [(9_000_000, 1_000_000), (5_000_000, 500_000), (10_000, 8_000_000)])
    assert waits.waited_s([(0, 0)] * 3) == pytest.approx(0.0015)
    waits.close()


def test_stalled_calls_are_left_out_although_they_agree_with_each_other() -> None:
    """Their median has a tight interval, 30 times too long."""
    assert select_turns([STALLED] * 7 + [CALM] * 7, 7, threads=2) == [CALM] * 7


def test_a_stall_that_the_system_does_not_count_is_seen_from_the_fastest_call() -> None:
    uncounted = Turn((0.030,), 0.0)
    assert select_turns([uncounted, CALM, uncounted, CALM], 2, threads=2) == [CALM, CALM]


@pytest.mark.parametrize("turns", [[STALLED] * 14, [CALM, *[Turn((0.030,), 0.0)] * 13]])
def test_calls_of_which_none_can_be_used_are_refused(turns: list[Turn]) -> None:
    with pytest.raises(HostBusy, match="other processes hold the CPU"):
        select_turns(turns, 7, threads=2)


def test_slightly_disturbed_calls_are_used_where_there_are_no_better_ones() -> None:
    disturbed = Turn((0.001,), 0.0002)
    assert select_turns([disturbed, STALLED, CALM], 2, threads=1) == [CALM, disturbed]


def test_a_short_call_is_timed_without_the_time_slices_of_others(
    busy_core: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_waits, "EXTRA_S", 60.0)  # 3 s are too few with ten processes on a core

    def compute() -> float:
        started_s = time.perf_counter()
        sum(range(100_000))
        return time.perf_counter() - started_s

    times_s = [time_s for (time_s,) in time_undisturbed([compute], 15, threads=1)]
    assert len(times_s) == 15 and max(times_s) < host_waits.MAX_OVER_FASTEST * min(times_s)
    assert statistics.median(times_s) < 0.02


def test_calls_that_only_wait_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_waits, "HOPELESS_S", 0.02)
    monkeypatch.setattr(ThreadWaits, "waited_s", lambda *_: 10.0)
    calls: list[float] = []

    def wait() -> float:
        time.sleep(0.01)
        calls.append(0.01)
        return 0.01

    with pytest.raises(HostBusy):
        time_undisturbed([wait], 1000, threads=1)
    assert len(calls) < 10


def test_without_other_processes_nothing_is_repeated() -> None:
    calls = iter(range(4))
    assert time_undisturbed([lambda: 1.0 + 0.01 * next(calls)], 4, threads=1) == [(1.0,), (1.01,), (1.02,), (1.03,)]
