"""Ray's place in a simulated cluster: workers that answer after a trial's time, by a clock that jumps while one waits.

The clock runs with the process's CPU time while the driver works. What the workers answer is a real measurement of a
product, taken first.
"""

from __future__ import annotations

import heapq
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

GPUS_OF_A_NODE = 8
TRIAL_S = (50.0, 70.0)  # a trial takes so long, evenly spread
DIFFERENT = 256  # so many different measurements there are: the figures of each are computed, and timed, once


class Ref:
    """A reply that comes at a time of the clock."""

    __slots__ = ("at_s", "there", "value")

    def __init__(self, at_s: float, value: Callable[[], Any]) -> None:
        self.at_s, self.value, self.there = at_s, value, False

    def __lt__(self, other: Ref) -> bool:
        return self.at_s < other.at_s


class Stage:
    """`ray` and `time` as `sweeper.gangs` uses them. `own_s`: what it took itself, of the process's time."""

    def __init__(self, measured: bytes) -> None:
        self._measured = pickle.loads(measured)
        self._pending: list[Ref] = []
        self._news = 0  # replies that came and nobody has fetched
        self._jumped_s = self.own_s = self.waited_s = 0.0
        self._workers = 0
        self.all_busy_s = 0.0  # when the last of the workers got its first trial
        self._begun_s = time.process_time()

    def monotonic(self) -> float:
        return time.process_time() - self._begun_s - self.own_s + self._jumped_s

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self._jumped_s += seconds

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._worker))

    def _worker(self) -> Any:
        number, self._workers = self._workers, self._workers + 1
        node, gpu = divmod(number, GPUS_OF_A_NODE)
        here = {"address": f"10.0.{node // 250}.{node % 250}", "port": 4242, "node": f"n{node}", "pid": number}
        here |= {"log": "", "gpus": str(gpu), "node_id": f"{node:056x}"}
        free_at_s = [0.0]

        def run(job: Any) -> Ref:
            """One after the other, as an actor does; the ranks of a gang take the same time."""
            took_s = random.Random(job.rank.sequence_number).uniform(*TRIAL_S)
            now_s = self.monotonic()
            if not free_at_s[0]:
                self.all_busy_s = now_s
            free_at_s[0] = max(free_at_s[0], now_s) + took_s
            return self._due(free_at_s[0], lambda: self._reply(job))

        hello = SimpleNamespace(remote=lambda: self._due(0.0, lambda: here))
        return SimpleNamespace(hello=hello, run=SimpleNamespace(remote=run))

    def _reply(self, job: Any) -> Any:
        """As fast as the point is, on every node."""
        from sweeper.execution.worker import RankResult

        factor = 1 + random.Random(str(job.parameters)).randrange(DIFFERENT) / DIFFERENT
        times_s = tuple(factor * time_s for time_s in self._measured.step_times_s)
        measured = replace(self._measured, executed=dict(job.parameters), step_times_s=times_s)
        return RankResult(job.rank.rank, 1e9, 1e9 + 60, measured)

    def _due(self, at_s: float, value: Callable[[], Any]) -> Ref:
        ref = Ref(at_s, value)
        heapq.heappush(self._pending, ref)
        return ref

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [ref.value() for ref in refs]
        self._news -= 1
        return refs.value()

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        begun_s = time.process_time()
        now_s = self.monotonic()
        if self._pending and not self._news and timeout > 0 and self._pending[0].at_s > now_s:
            step_s = min(timeout, self._pending[0].at_s - now_s)
            self._jumped_s += step_s
            self.waited_s += step_s
            now_s += step_s
        while self._pending and self._pending[0].at_s <= now_s:
            heapq.heappop(self._pending).there = True
            self._news += 1
        found = [ref for ref in refs if ref.there] if timeout == 0 else []
        self.own_s += time.process_time() - begun_s
        return found, []

    def kill(self, *_: Any, **__: Any) -> None:
        pass
