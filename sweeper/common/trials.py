"""Define trials, which are points of the space, and their results and stored records."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from sweeper.common.format import short_value
from workloads.api.contract import Measurement, Scalar


class TrialStatus(StrEnum):
    """The final status of a trial. `docs/architecture.md` explains how each status is handled."""

    COMPLETE = "complete"
    INFEASIBLE = "infeasible"  # cannot run on this device; the sampler learns from the trial, which is not retried
    PRUNED = "pruned"  # ended early, because other trials were better at the same step
    FAILED = "failed"  # an error in the code or the configuration
    LOST = "lost"  # the worker, the GPU or the node was lost more often than trial.retries
    TIMED_OUT = "timed_out"  # took longer than trial.timeout_s
    INCONCLUSIVE = "inconclusive"  # other processes disturbed the measurement, even when repeated
    CANCELLED = "cancelled"  # the user stopped the sweep; a resumed sweep runs the trial again


BAD = (TrialStatus.FAILED, TrialStatus.LOST, TrialStatus.TIMED_OUT)  # statuses that make a sweep exit with 1
WITHOUT_RESULT = (*BAD, TrialStatus.INCONCLUSIVE)  # statuses of trials that a sweep offers to rerun
# The statuses of the trials that each value of the key `retry` reruns.
RETRIED = {
    "failed": (TrialStatus.FAILED, TrialStatus.TIMED_OUT),
    "lost": (TrialStatus.LOST,),
    "inconclusive": (TrialStatus.INCONCLUSIVE,),
    "infeasible": (TrialStatus.INFEASIBLE,),
    "all": (*WITHOUT_RESULT, TrialStatus.INFEASIBLE),
}


def narrowest_retry(statuses: Collection[TrialStatus]) -> str:
    """Return the value of `retry` that reruns the trials with any of these statuses and as few others as possible."""
    return next(name for name, retried in RETRIED.items() if set(statuses) <= set(retried))


LOST_NODE = "lost_node_id"  # in `where` of a lost trial: the Ray ID of the dead worker's node
LEFT = "left_processes"  # in `where`: command lines of processes that the trial left behind and the sweep ended
SHARED_FIELDS = ("fixed", "work")  # record fields that are usually equal in all trials of a sweep


def mask_numbers(reason: str) -> str:
    """Mask a reason's numbers except exit codes, because reasons that differ only in numbers are of one kind."""
    return re.sub(r"(exit code \d+)|[\d.,]+", lambda match: match[1] or "#", reason)


@dataclass(frozen=True)
class TrialResult:
    status: TrialStatus
    started_at_s: float
    ended_at_s: float
    reason: str = ""  # one line; empty for a complete trial
    detail: str = ""  # the last lines of the worker's output
    measurements: tuple[Measurement, ...] = ()  # one per rank if the trial is complete
    files: Mapping[str, bytes] = field(default_factory=dict)  # other results by name, if there are no measurements
    where: Mapping[str, Scalar] = field(default_factory=dict)  # node, process and log of rank 0; Ray IDs of all nodes
    reusable: bool = False  # whether the workers can run another trial, after success or after rejecting the trial
    of_ranks: Mapping[int, Measurement | str] = field(default_factory=dict)  # of a failed trial: results or reasons


@dataclass(frozen=True)
class Remeasurement:
    """Marks a trial that remeasures the parameters of an earlier `trial` in a round."""

    trial: int
    round: int
    group: tuple[int, ...]  # all trials of the round; empty for a comparison of nodes (`execution/node_health.py`)

    def __str__(self) -> str:
        """Follows the trial's number in messages, because the budget does not count this trial."""
        return f" (round {self.round} of trial {self.trial})"


@dataclass(frozen=True)
class Retry:
    trial: int  # the number of the earlier attempt
    changed: tuple[str, ...] = ()  # the changes since the earlier attempt, as phrases
    replaces: bool = True  # whether the retry replaces the earlier attempt; False if the earlier outcome is better

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Retry:
        return Retry(fields["trial"], tuple(fields["changed"]), fields.get("replaces", True))


@dataclass(frozen=True)
class Trial:
    """One point of the space, with a number in the study. `params` contains only the parameters that vary."""

    number: int
    params: dict[str, Scalar]
    remeasurement: Remeasurement | None = None
    retry: Retry | None = None
    clock_mhz: float = 0.0  # the clock for which a round of the finals waits (`Rank.clock_mhz`)


@dataclass(frozen=True)
class TrialRecord:
    """A finished trial as stored in the study and then copied to MLflow."""

    number: int
    params: Mapping[str, Scalar]
    status: TrialStatus
    reason: str  # as in the trial's result; for a complete trial, the reason that it has no speed to rank
    detail: str
    metrics: Mapping[str, float]
    measurements: list[dict[str, Any]]
    where: Mapping[str, Scalar]
    started_at_s: float
    ended_at_s: float
    elapsed_s: float  # total search time over all runs of the sweep, when the trial ended
    attempts: int = 1
    files: list[str] = field(default_factory=list)  # paths of other results of the ranks
    fixed: Mapping[str, Scalar] = field(default_factory=dict)  # values not searched: constants, defaults, settings
    work: Mapping[str, str] = field(default_factory=dict)  # the identity of the work (`sweeper/preflight/work.py`)
    remeasurement: Remeasurement | None = None  # set in finals and node comparisons, which are not part of the search
    retry: Retry | None = None

    @property
    def duration_s(self) -> float:
        return self.ended_at_s - self.started_at_s

    @property
    def all_params(self) -> dict[str, Scalar]:
        return {**self.fixed, **self.params}

    @property
    def repeats(self) -> dict[str, int]:
        """What the trial measures again, by column: a finalist and its round, or an earlier attempt."""
        retry_of = {"retry_of": self.retry.trial} if self.retry else {}
        again = self.remeasurement
        return ({"remeasured_trial": again.trial, "round": again.round} if again else {}) | retry_of

    @property
    def superseded(self) -> int | None:
        """The number of the attempt to discard: the earlier attempt or this one. None without a retry."""
        if self.retry is None or self.status is TrialStatus.CANCELLED:
            return None
        return self.retry.trial if self.retry.replaces else self.number

    def weighed_against(self, earlier: TrialRecord | None) -> TrialRecord:
        """Return the record; if this retry measured nothing, mark it as not replacing a complete `earlier` attempt."""
        has_result = self.status in (TrialStatus.COMPLETE, TrialStatus.INCONCLUSIVE)
        if self.retry is None or earlier is None or earlier.status is not TrialStatus.COMPLETE or has_result:
            return self
        return replace(self, retry=replace(self.retry, replaces=False))

    @property
    def kind_of_reason(self) -> str:
        return mask_numbers(self.reason)

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=float)  # metrics of a workload may contain NumPy numbers

    @staticmethod
    def from_json(text: str) -> TrialRecord:
        return TrialRecord.from_fields(json.loads(text))

    @staticmethod
    def from_fields(fields: dict[str, Any], earlier: TrialRecord | None = None) -> TrialRecord:
        """Build a record from plain values. Sharing equal `SHARED_FIELDS` with `earlier` saves 25% of the memory."""
        shared = {name: getattr(earlier, name) for name in SHARED_FIELDS} if earlier else {}
        fields = fields | {name: value for name, value in shared.items() if value == fields.get(name)}
        remeasurement = fields["remeasurement"]
        if remeasurement is not None:
            remeasurement["group"] = tuple(remeasurement["group"])
            remeasurement = Remeasurement(**remeasurement)
        retry = Retry.from_dict(fields["retry"]) if fields.get("retry") else None
        status = TrialStatus(fields["status"])
        return TrialRecord(**(fields | {"status": status, "remeasurement": remeasurement, "retry": retry}))


def rank_file_name(rank: int, name: str) -> str:
    """Return the name under which to store a rank's file. Files of the first rank keep their names."""
    return f"rank{rank}_{name}" if rank else name


def run_name(number: int, params: Mapping[str, object], remeasurement: Remeasurement | None) -> str:
    """Return the name of a trial's MLflow run: `0012 m=4096 n=512`, or `0040 round 1 of 0003 m=4096 n=512`."""
    parts = [f"{number:04d}"]
    if remeasurement:
        parts.append(f"round {remeasurement.round} of {remeasurement.trial:04d}")
    parts += [f"{name}={short_value(value)}" for name, value in params.items()]
    return " ".join(parts)[:250]
