"""A simulated Ray cluster: workers that reply after the time of a trial, by a clock that jumps while the driver waits.

While the driver works, the clock runs with the process's CPU time. It is read once a call of `wait`: reading the CPU
time takes up to 60 us in a virtual machine, and the driver reads the clock for each of thousands of gangs. The workers
reply with a real measurement of a matrix product, which is taken first.
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

GPUS_PER_NODE = 8
TRIAL_S = (50.0, 70.0)  # the duration of a trial is uniform between these
DISTINCT_MEASUREMENTS = 256  # the metrics of each are derived, and timed, once


class Ref:
    """A reference to a reply that arrives at a time of the simulated clock."""

    __slots__ = ("arrived", "at_s", "value")

    def __init__(self, at_s: float, value: Callable[[], Any]) -> None:
        self.at_s = at_s
        self.value = value
        self.arrived = False

    def __lt__(self, other: Ref) -> bool:
        return self.at_s < other.at_s


class SimulatedRay:
    """Replaces the modules `ray` and `time` in `sweeper.execution`.

    Attributes:
        own_s: CPU seconds of the process that the simulation itself took.
        waited_s: simulated seconds that the driver waited.
        all_busy_s: when the last of the workers got its first trial.
    """

    def __init__(self, pickled_measurement: bytes) -> None:
        self._now_s = 0.0
        self._measurement = pickle.loads(pickled_measurement)
        self._pending: list[Ref] = []
        self._unread = 0  # replies that arrived and were not fetched
        self._jumped_s = 0.0
        self._workers = 0
        self.own_s = 0.0
        self.waited_s = 0.0
        self.all_busy_s = 0.0
        self._started_s = time.process_time()

    # ── the module `time` ──

    def monotonic(self) -> float:
        return self._now_s

    time = monotonic

    def read_clock(self) -> float:
        """Set the clock to the time that has passed, and return it."""
        self._now_s = time.process_time() - self._started_s - self.own_s + self._jumped_s
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._jumped_s += seconds
        self.read_clock()

    # ── the module `ray` ──

    def nodes(self) -> list[Any]:
        return []

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start_worker))

    def _start_worker(self) -> Any:
        number = self._workers
        self._workers += 1
        node, gpu = divmod(number, GPUS_PER_NODE)
        location = {"address": f"10.0.{node // 250}.{node % 250}", "port": 4242, "node": f"n{node}", "pid": number}
        location |= {"log": "", "gpus": str(gpu), "node_id": f"{node:056x}"}
        free_at_s = 0.0

        def run(job: Any) -> Ref:
            """Run jobs one after the other, as an actor does. The ranks of a gang take the same time."""
            nonlocal free_at_s
            duration_s = random.Random(job.rank.sequence_number).uniform(*TRIAL_S)
            now_s = self.monotonic()
            if not free_at_s:
                self.all_busy_s = now_s
            free_at_s = max(free_at_s, now_s) + duration_s
            return self._reply_at(free_at_s, lambda: self._build_result(job))

        handshake = SimpleNamespace(remote=lambda: self._reply_at(0.0, lambda: location))
        return SimpleNamespace(handshake=handshake, run=SimpleNamespace(remote=run))

    def _build_result(self, job: Any) -> Any:
        """Build a result whose speed depends on the parameters alone, not on the node."""
        from sweeper.execution.worker import RankResult

        factor = 1 + random.Random(str(job.parameters)).randrange(DISTINCT_MEASUREMENTS) / DISTINCT_MEASUREMENTS
        step_times_s = tuple(factor * time_s for time_s in self._measurement.step_times_s)
        measurement = replace(self._measurement, executed=dict(job.parameters), step_times_s=step_times_s)
        return RankResult(job.rank.rank, 1e9, 1e9 + 60, measurement)

    def _reply_at(self, at_s: float, value: Callable[[], Any]) -> Ref:
        ref = Ref(at_s, value)
        self._push(ref)
        return ref

    def _push(self, ref: Ref) -> None:
        heapq.heappush(self._pending, ref)

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [ref.value() for ref in refs]
        self._unread -= 1
        return refs.value()

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        started_s = time.process_time()
        now_s = self.read_clock()
        if self._pending and not self._unread and timeout > 0 and self._pending[0].at_s > now_s:
            step_s = min(timeout, self._pending[0].at_s - now_s)
            self._jumped_s += step_s
            self.waited_s += step_s
            now_s = self._now_s = now_s + step_s
        while self._pending and self._pending[0].at_s <= now_s:
            self._arrive(heapq.heappop(self._pending))
        arrived = [ref for ref in refs if ref.arrived] if timeout == 0 else []
        self.own_s += time.process_time() - started_s
        return arrived, []

    def _arrive(self, ref: Ref) -> None:
        ref.arrived = True
        self._unread += 1

    def kill(self, *_: Any, **__: Any) -> None:
        pass
