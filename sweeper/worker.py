"""The process that runs trials: one rank of a gang, kept warm between trials and never reused after a failure.

Imports nothing of the driver's, so that it starts fast.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from workloads.contract import Infeasible, Measurement, OutOfMemory, Rank, Scalar
from workloads.trial import run_trial


@dataclass(frozen=True)
class Job:
    """One trial for one rank."""

    workload: str
    parameters: Mapping[str, Scalar]
    rank: Rank
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reply:
    """What a rank says of its trial: a measurement, or why there is none."""

    rank: int
    started_at_s: float
    ended_at_s: float
    measurement: Measurement | None = None
    infeasible: bool = False
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
            "pid": os.getpid(),
            "log": str(log.readlink()) if log.is_symlink() else "",
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES") or "",
        }

    def run(self, job: Job) -> Reply:
        """Run one trial. Whatever it raises comes back as a reply: the driver decides what it means."""
        started_at_s = time.time()
        try:
            measurement = run_trial(job.workload, job.parameters, job.rank, job.settings)
        except Infeasible as error:
            sound = not isinstance(error, OutOfMemory)
            return Reply(job.rank.rank, started_at_s, time.time(), infeasible=True, sound=sound, reason=str(error))
        except Exception as error:
            last = traceback.format_exc().strip().splitlines()[-30:]
            reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
            return Reply(job.rank.rank, started_at_s, time.time(), reason=reason, detail="\n".join(last))
        return Reply(job.rank.rank, started_at_s, time.time(), measurement)
