"""The process that runs trials: one rank of a gang, kept warm between trials and never reused after a failure.

Imports nothing of the driver's, so that it starts fast.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from workloads.api.contract import Infeasible, Measurement, OutOfMemory, Pruned, Rank, Scalar, TrialTimeout
from workloads.api.trial import run_trial

LAST_LINES = 120  # of a traceback, at whose end a program's own last lines stand


@dataclass(frozen=True)
class Job:
    """One trial for one rank."""

    workload: str
    parameters: Mapping[str, Scalar]
    rank: Rank
    settings: Mapping[str, Any] | None = None
    collector: Any = None  # the actor that is told of steps while a trial runs, if anybody listens


@dataclass(frozen=True)
class RankResult:
    """What a rank says of its trial: a measurement, or why there is none."""

    rank: int
    started_at_s: float
    ended_at_s: float
    measurement: Measurement | None = None
    infeasible: bool = False
    pruned: bool = False
    timed_out: bool = False
    reusable: bool = False  # whether the process is as it was: it refused, and tried nothing
    reason: str = ""
    detail: str = ""


class Worker:
    """The actor. Its methods run one after the other, in the order in which they were called."""

    def handshake(self) -> dict[str, Scalar]:
        """Where this process is, where it could be met, and where what it prints goes."""
        log = Path("/proc/self/fd/2")  # Ray has put a file there
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return {
            "address": ray.util.get_node_ip_address(),
            "port": port,
            "node": socket.gethostname(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "log": str(log.readlink()) if log.is_symlink() else "",
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES") or "",
        }

    def run(self, job: Job) -> RankResult:
        """Run one trial. Whatever it raises comes back as a reply: the driver decides what it means."""
        started_at_s, rank = time.time(), job.rank
        if job.collector is not None:
            rank = replace(rank, reporter=RayStepReporter(job.collector, rank.sequence_number))
        try:
            measurement = run_trial(job.workload, job.parameters, rank, job.settings)
        except Infeasible as error:
            reusable = not isinstance(error, OutOfMemory)
            return RankResult(
                job.rank.rank, started_at_s, time.time(), infeasible=True, reusable=reusable, reason=str(error)
            )
        except Pruned:
            return RankResult(
                rank.rank, started_at_s, time.time(), pruned=True, reusable=True, reason="worse than others"
            )
        except TrialTimeout as error:
            lines = "\n".join(getattr(error, "__notes__", ()))
            return RankResult(rank.rank, started_at_s, time.time(), timed_out=True, reason=str(error), detail=lines)
        except Exception as error:
            last = traceback.format_exc().strip().splitlines()[-LAST_LINES:]
            reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
            return RankResult(job.rank.rank, started_at_s, time.time(), reason=reason, detail="\n".join(last))
        return RankResult(job.rank.rank, started_at_s, time.time(), measurement)


class RayStepReporter:
    """Speaks to the pool's ear of one trial (`workloads.contract.Listener`). Nobody who hears is no reason to end."""

    def __init__(self, collector: Any, sequence_number: int) -> None:
        self._collector, self._sequence_number = collector, sequence_number

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        return self._call(self._collector.report, step, dict(metrics))

    def finish(self) -> None:
        self._call(self._collector.finish)

    def is_finished(self) -> bool:
        return self._call(self._collector.is_finished)

    def _call(self, method: Any, *words: Any) -> bool:
        try:
            return bool(ray.get(method.remote(self._sequence_number, *words), timeout=30))
        except RayError:  # its node is gone
            return False


class StepCollector:
    """The actor that hears of steps while trials run, and answers whether to go on. Trials are known by their turn."""

    def __init__(self) -> None:
        self._reported: dict[tuple[int, int], tuple[float, dict[str, float]]] = {}
        self._pruned: set[int] = set()
        self._finished: set[int] = set()
        self._last: dict[int, int] = {}

    def report(self, sequence_number: int, step: int, metrics: dict[str, float]) -> bool:
        """A step is over; of several ranks that say so the first counts. Whether the trial is to end."""
        if step > self._last.get(sequence_number, 0):
            self._last[sequence_number] = step
            self._reported[sequence_number, step] = (time.time(), metrics)
        return sequence_number in self._pruned

    def take(self) -> list[tuple[int, int, float, dict[str, float]]]:
        """Turn, step, when, and figures of what was heard since this was last asked."""
        found = [(number, step, at_s, metrics) for (number, step), (at_s, metrics) in self._reported.items()]
        self._reported.clear()
        return found

    def prune(self, sequence_number: int) -> None:
        self._pruned.add(sequence_number)

    def finish(self, sequence_number: int) -> None:
        self._finished.add(sequence_number)

    def is_finished(self, sequence_number: int) -> bool:
        return sequence_number in self._finished
