"""Ray actors: workers, which run trials as ranks of a gang, and the step collector, which gathers reported steps.

A worker runs one trial after another but is never reused after a failure. To start workers quickly, this module
imports no driver code.
"""

import asyncio
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from sweeper.config.environment import PREFIX
from sweeper.execution.ray_internals import visible_gpus_variable
from workloads.api import contract
from workloads.api.errors import message_of
from workloads.api.processes import Orphans
from workloads.api.trial import run_trial
from workloads.api.visible_devices import settle

TRACEBACK_LINES = 120
BATCH_S = 0.02  # steps that arrive within this interval are returned together
# The driver's path of a command's folder, set if Ray has copied the folder to this node (see `shipping.py`).
SHIPPED_DIRECTORY = "SWEEPER_SHIPPED_DIRECTORY"
# Errors with a self-explanatory message. The program's last lines are kept, without our traceback.
EXPLAINED = (contract.ParameterMismatch, contract.ProgramFailed)


@dataclass(frozen=True)
class Job:
    """One rank's part of a trial."""

    workload: str
    parameters: Mapping[str, contract.Scalar]
    variables: Mapping[str, str | None]  # environment variables of the worker; None means not set
    rank: contract.Rank
    settings: Mapping[str, Any] | None = None
    collector: Any = None  # the `StepCollector` actor, if the workload reports steps


@dataclass(frozen=True)
class RankResult:
    """One rank's measurement, or the reason why there is none. Times use the node's monotonic clock."""

    rank: int
    started_s: float = 0.0
    ended_s: float = 0.0
    measurement: contract.Measurement | None = None
    status: str = "failed"  # value of a `TrialStatus`; used only without a measurement
    reusable: bool = False  # the process is in a clean state and can run another trial
    reason: str = ""  # a single line
    detail: str = ""  # the last lines of a program's output, or a traceback
    files: Mapping[str, bytes] = field(default_factory=dict)  # the program's files, as in `Measurement.files`
    left: Sequence[str] = ()  # command lines of leftover processes, which the worker ended


class Worker:
    """The actor for one rank. Its methods run one at a time, in call order."""

    def __init__(self) -> None:
        settle(os.environ, visible_gpus_variable())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Ray with a subreaper ignores SIGCHLD, which loses exit codes
        self._orphans = Orphans()

    def handshake(self) -> dict[str, contract.Scalar]:
        """Return the worker's node, GPUs and log, and a free port for a rendezvous."""
        log = Path("/proc/self/fd/2")  # Ray redirects stderr to a file
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
            "gpus": ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", [])),
        }

    def run(self, job: Job) -> RankResult:
        """Run one trial and end any processes that it leaves behind. An exception is returned in the result."""
        result = self._measure(job)
        return replace(result, left=self._orphans.end())

    def _measure(self, job: Job) -> RankResult:
        started_s = time.monotonic()
        reporter = RayStepReporter(job.collector, job.rank.sequence_number) if job.collector is not None else None
        set_variables = {name: value for name, value in job.variables.items() if value is not None}
        rank = replace(job.rank, environment=set_variables, reporter=reporter)
        try:
            check_variables(job.variables)
            measurement = run_trial(job.workload, job.parameters, rank, localize(job.settings))
            executed = {**measurement.executed, **check_variables(job.variables)}  # a workload may set variables
            measurement = replace(measurement, executed=executed)
        except BaseException as error:  # includes SystemExit, after which Ray would consider this process lost
            if hasattr(error, "ray_terminate_msg"):  # SIGTERM must end this process
                raise
            return replace(_describe_error(error), rank=rank.rank, started_s=started_s, ended_s=time.monotonic())
        return RankResult(rank.rank, started_s, time.monotonic(), measurement)


def localize(settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Replace the driver's folder in a command's settings with Ray's copy on this node."""
    if settings is None or os.environ.get(SHIPPED_DIRECTORY) != settings.get("directory", ""):
        return settings
    return {**settings, "directory": str(Path.cwd())}


def check_variables(requested: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the values of these variables in this process. Raises ParameterMismatch if any value differs."""
    actual = {name: os.environ.get(name) for name in requested}
    differences = []
    for name, value in requested.items():
        if actual[name] != value:
            here, there = (f"no {name}" if one is None else f"{name}={one}" for one in (actual[name], value))
            differences.append(f"{here}, requested {there}")
    if differences:
        raise contract.ParameterMismatch(f"the worker's environment has {'; '.join(differences)}")
    return {f"{PREFIX}{name}": value for name, value in actual.items()}


def _describe_error(error: BaseException) -> RankResult:
    output = contract.output_of(error)
    result = RankResult(0, reason=message_of(error), detail=output.last_lines, files=output.files)
    if isinstance(error, contract.Infeasible):
        return replace(result, status="infeasible", reusable=not isinstance(error, contract.OutOfMemory))
    if isinstance(error, contract.Pruned):
        return replace(result, status="pruned", reusable=True, reason="worse than other trials at the same step")
    if isinstance(error, contract.HostBusy):
        return replace(result, status="inconclusive", reusable=True)
    if isinstance(error, contract.TrialTimeout):
        return replace(result, status="timed_out")
    if isinstance(error, SystemExit):
        return replace(result, reason=f"the function called sys.exit({'' if error.code is None else repr(error.code)})")
    is_sentence = isinstance(error, contract.ProgramFailed)
    name = "" if is_sentence else f"{type(error).__name__}: "
    reason = f"{name}{message_of(error) or 'no message'}".splitlines()[0]
    if isinstance(error, EXPLAINED) and output.last_lines:
        return replace(result, reason=reason)
    lines = "\n".join(traceback.format_exc().strip().splitlines()[-TRACEBACK_LINES:])
    return replace(result, reason=reason, detail=f"{lines}\n\n{output.last_lines}".strip())


class RayStepReporter:
    """The `StepReporter` of one trial. It forwards steps to the collector, and training continues if that is lost."""

    def __init__(self, collector: Any, sequence_number: int) -> None:
        self._collector, self._sequence_number = collector, sequence_number

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        return self._call(self._collector.report, step, dict(metrics))

    def finish(self) -> None:
        self._call(self._collector.finish)

    def is_finished(self) -> bool:
        return self._call(self._collector.is_finished)

    def _call(self, method: Any, *args: Any) -> bool:
        try:
            return bool(ray.get(method.remote(self._sequence_number, *args), timeout=30))
        except RayError:  # the collector's node is lost
            return False


class StepCollector:
    """The actor that collects the steps of running trials by sequence number and signals ranks to stop."""

    def __init__(self) -> None:
        self._reported: list[tuple[int, int, float, dict[str, float]]] = []
        self._pruned: set[int] = set()
        self._finished: set[int] = set()
        self._last: dict[int, int] = {}
        self._arrived = asyncio.Event()

    async def report(self, sequence_number: int, step: int, metrics: dict[str, float]) -> bool:
        """Store a finished step unless another rank has already reported it. Return whether the trial is pruned."""
        if step > self._last.get(sequence_number, 0):
            self._last[sequence_number] = step
            self._reported.append((sequence_number, step, time.time(), metrics))
            self._arrived.set()
        return sequence_number in self._pruned

    async def take(self, patience_s: float = 0.0) -> list[tuple[int, int, float, dict[str, float]]]:
        """Return the steps since the last call, as tuples of sequence number, step, time and metrics.

        Wait up to `patience_s` for the first step, but then only BATCH_S for further steps. A longer wait would delay
        pruning: in a quarter of a second, a trial runs several more short steps.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), patience_s)
            await asyncio.sleep(min(BATCH_S, patience_s))
        self._arrived.clear()
        reports, self._reported = self._reported, []
        return reports

    async def prune(self, sequence_number: int) -> None:
        self._pruned.add(sequence_number)

    async def finish(self, sequence_number: int) -> None:
        self._finished.add(sequence_number)

    async def is_finished(self, sequence_number: int) -> bool:
        return sequence_number in self._finished
