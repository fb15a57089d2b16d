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

from workloads.contract import Hopeless, Infeasible, Measurement, OutOfMemory, Rank, Scalar
from workloads.trial import run_trial

LAST_LINES = 120  # of a traceback, at whose end a program's own last lines stand


@dataclass(frozen=True)
class Job:
    """One trial for one rank."""

    workload: str
    parameters: Mapping[str, Scalar]
    rank: Rank
    settings: Mapping[str, Any] | None = None
    ear: Any = None  # the actor that is told of steps while a trial runs, if anybody listens


@dataclass(frozen=True)
class Reply:
    """What a rank says of its trial: a measurement, or why there is none."""

    rank: int
    started_at_s: float
    ended_at_s: float
    measurement: Measurement | None = None
    infeasible: bool = False
    hopeless: bool = False
    sound: bool = False  # whether the process is as it was: it refused, and tried nothing
    reason: str = ""
    detail: str = ""


class Worker:
    """The actor. Its methods run one after the other, in the order in which they were called."""

    def hello(self) -> dict[str, Scalar]:
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

    def run(self, job: Job) -> Reply:
        """Run one trial. Whatever it raises comes back as a reply: the driver decides what it means."""
        started_at_s, rank = time.time(), job.rank
        if job.ear is not None:
            rank = replace(rank, listener=Mouth(job.ear, rank.turn))
        try:
            measurement = run_trial(job.workload, job.parameters, rank, job.settings)
        except Infeasible as error:
            sound = not isinstance(error, OutOfMemory)
            return Reply(job.rank.rank, started_at_s, time.time(), infeasible=True, sound=sound, reason=str(error))
        except Hopeless:
            return Reply(rank.rank, started_at_s, time.time(), hopeless=True, sound=True, reason="worse than others")
        except Exception as error:
            last = traceback.format_exc().strip().splitlines()[-LAST_LINES:]
            reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
            return Reply(job.rank.rank, started_at_s, time.time(), reason=reason, detail="\n".join(last))
        return Reply(job.rank.rank, started_at_s, time.time(), measurement)


class Mouth:
    """Speaks to the pool's ear of one trial (`workloads.contract.Listener`). Nobody who hears is no reason to end."""

    def __init__(self, ear: Any, turn: int) -> None:
        self._ear, self._turn = ear, turn

    def heard(self, step: int, figures: Mapping[str, float]) -> bool:
        return self._asked(self._ear.heard, step, dict(figures))

    def enough(self) -> None:
        self._asked(self._ear.enough)

    def is_over(self) -> bool:
        return self._asked(self._ear.is_over)

    def _asked(self, method: Any, *words: Any) -> bool:
        try:
            return bool(ray.get(method.remote(self._turn, *words), timeout=30))
        except RayError:  # its node is gone
            return False


class Ear:
    """The actor that hears of steps while trials run, and answers whether to go on. Trials are known by their turn."""

    def __init__(self) -> None:
        self._heard: dict[tuple[int, int], tuple[float, dict[str, float]]] = {}
        self._hopeless: set[int] = set()
        self._over: set[int] = set()
        self._last: dict[int, int] = {}

    def heard(self, turn: int, step: int, figures: dict[str, float]) -> bool:
        """A step is over; of several ranks that say so the first counts. Whether the trial is to end."""
        if step > self._last.get(turn, 0):
            self._last[turn] = step
            self._heard[turn, step] = (time.time(), figures)
        return turn in self._hopeless

    def take(self) -> list[tuple[int, int, float, dict[str, float]]]:
        """Turn, step, when, and figures of what was heard since this was last asked."""
        found = [(turn, step, at_s, figures) for (turn, step), (at_s, figures) in self._heard.items()]
        self._heard.clear()
        return found

    def end(self, turn: int) -> None:
        self._hopeless.add(turn)

    def enough(self, turn: int) -> None:
        self._over.add(turn)

    def is_over(self, turn: int) -> bool:
        return turn in self._over
