"""Detect disturbed CPU measurements by how long this process's threads wait for a core.

A parallel GEMM ends when its last thread ends. If another process holds one core, all threads wait for that process's
time slice. On 2 cores under load, a 0.34 ms GEMM took 80 ms in call after call, so neither the spread nor the median
shows the disturbance. Linux counts waits in /proc/self/task/*/schedstat; these exclude waits for a hypervisor.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from workloads.api.contract import HostBusy

MAX_WAITED = 0.05  # largest share of an undisturbed turn that threads wait, summed over threads
MAX_OVER_FASTEST = 3.0  # longest undisturbed turn over the fastest turn; bounds waits that Linux does not count
COMPUTING = 0.1  # a computing thread runs for at least this share of the busiest thread's time
EXTRA_S = 3.0  # how long to try further turns
HOPELESS_S = 10.0  # how long to try if threads wait most of the time in every turn
PAUSE_S = 0.01  # pause after a disturbed turn, because the scheduler prefers processes that have slept
UNUSABLE = 0.5  # share of time that threads wait; the rate is then too low by a factor of two or more


class Turn(NamedTuple):
    times_s: tuple[float, ...]  # one time per call
    waited_s: float  # how long threads waited for a core during the turn, summed over threads

    @property
    def wall_s(self) -> float:
        return sum(self.times_s)


class ThreadWaits:
    def __init__(self) -> None:
        self._files = [open(path, "rb", buffering=0) for path in Path("/proc/self/task").glob("*/schedstat")]  # noqa: SIM115

    def close(self) -> None:
        for file in self._files:
            file.close()

    def read(self) -> list[tuple[int, int]]:
        """Return how many nanoseconds each thread has run and waited since its start; 0 if not counted."""
        counts = []
        for file in self._files:
            try:
                ran, waited, *_ = os.pread(file.fileno(), 100, 0).split()
            except (OSError, ValueError):  # the thread has ended, or the kernel does not count
                ran, waited = b"0", b"0"
            counts.append((int(ran), int(waited)))
        return counts

    def waited_s(self, before: Sequence[tuple[int, int]]) -> float:
        """Return how many seconds computing threads have waited since `before`. Other threads, such as a worker's
        connection threads, run briefly now and then. Their waits delay nothing."""
        changes = [
            (ran - ran_0, waited - waited_0)
            for (ran, waited), (ran_0, waited_0) in zip(self.read(), before, strict=True)
        ]
        most_ns = max((ran for ran, _ in changes), default=0)
        return sum(waited for ran, waited in changes if ran >= COMPUTING * most_ns) / 1e9


def time_undisturbed(steps: Sequence[Callable[[], float]], repeats: int, threads: int) -> list[tuple[float, ...]]:
    """Return the times of `repeats` turns of `steps`. Each step returns its own time in seconds.

    Disturbed turns are repeated for at most EXTRA_S; then the least disturbed turns are returned. Each step runs on
    `threads` threads. Raises HostBusy if threads waited most of the time even in these turns, or in all turns of the
    first HOPELESS_S: such turns can take a hundred times as long as undisturbed ones.
    """
    with closing(ThreadWaits()) as waits:
        turns, started_s = list[Turn](), time.monotonic()
        while len(turns) < repeats:
            turns.append(_time_turn(steps, waits, threads))
            if time.monotonic() > started_s + HOPELESS_S:
                least_waited = min(turn.waited_s / turn.wall_s for turn in turns) / threads
                if least_waited > UNUSABLE:
                    break
        deadline_s = time.monotonic() + EXTRA_S
        while len(turns) >= repeats > len(_undisturbed(turns)) and time.monotonic() < deadline_s:
            time.sleep(PAUSE_S)
            for step in steps:
                step()  # warms the cache, which went cold during the pause
            turns.append(_time_turn(steps, waits, threads))
    return [turn.times_s for turn in select_turns(turns, repeats, threads)]


def _time_turn(steps: Sequence[Callable[[], float]], waits: ThreadWaits, threads: int) -> Turn:
    started_s = time.perf_counter()
    before = waits.read()
    times_s = tuple(step() for step in steps)
    waited_s = waits.waited_s(before)
    # Threads may also wait between the calls and the readings. These waits disturb nothing.
    outside_s = max(0.0, time.perf_counter() - started_s - sum(times_s))
    return Turn(times_s, max(0.0, waited_s - threads * outside_s))


def _undisturbed(turns: Sequence[Turn]) -> list[Turn]:
    fastest_s = min(turn.wall_s for turn in turns)
    return [t for t in turns if t.waited_s <= MAX_WAITED * t.wall_s and t.wall_s <= MAX_OVER_FASTEST * fastest_s]


def select_turns(turns: Sequence[Turn], repeats: int, threads: int) -> list[Turn]:
    """Return the first undisturbed turns, or the least disturbed turns. Raises HostBusy if even these are unusable."""
    if len(undisturbed := _undisturbed(turns)) >= repeats:
        return undisturbed[:repeats]
    selected = sorted(turns, key=lambda turn: turn.waited_s / turn.wall_s)[:repeats]
    waited = statistics.median(turn.waited_s / turn.wall_s for turn in selected) / threads
    over_fastest = statistics.median(turn.wall_s for turn in selected) / min(turn.wall_s for turn in turns)
    if waited > UNUSABLE or over_fastest > MAX_OVER_FASTEST:
        raise HostBusy(
            f"other processes hold the CPU: {len(undisturbed)} of {len(turns)} calls were undisturbed; the others' "
            f"threads waited for a core {waited:.0%} of the time and took {over_fastest:.1f} times the fastest call"
        )
    return selected
