"""How a trial can end, and what is kept of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from workloads.api.contract import Measurement, Scalar


class TrialStatus(StrEnum):
    """complete, or what went wrong. Each kind is answered differently: see `docs/design.md`, the promises."""

    COMPLETE = "complete"
    INFEASIBLE = "infeasible"  # it cannot work on this device: told to the sampler, not tried again
    PRUNED = "pruned"  # ended early: others were better at the same step
    FAILED = "failed"  # an error in the code or the configuration
    LOST = "lost"  # the worker, the GPU or the node went, more often than trial.retries
    TIMED_OUT = "timed_out"  # took longer than trial.timeout_s
    CANCELLED = "cancelled"  # the user stopped the sweep: run again when it is resumed


BAD = (TrialStatus.FAILED, TrialStatus.LOST, TrialStatus.TIMED_OUT)  # as no trial should end


@dataclass(frozen=True)
class TrialResult:
    """What came back from the cluster for one trial.

    reason        one line; empty for a complete trial
    detail        the last lines of what the worker said, for a person
    measurements  one for each rank, complete trials only
    where         node, process and log of rank 0, and Ray's ids of all its nodes
    sound         whether its worker may be used again: it succeeded, or refused before it tried
    """

    status: TrialStatus
    started_at_s: float
    ended_at_s: float
    reason: str = ""
    detail: str = ""
    measurements: tuple[Measurement, ...] = ()
    where: Mapping[str, Scalar] = field(default_factory=dict)
    reusable: bool = False


@dataclass(frozen=True)
class Remeasurement:
    """A trial that measures another one's parameters again: trial `of`, in this round, beside all of `among`; among
    none it compares nodes (`sweeper/equals.py`)."""

    trial: int
    round: int
    group: tuple[int, ...]


@dataclass(frozen=True)
class TrialRecord:
    """One finished trial as it is stored: in the study, which is the truth, and from there in MLflow.

    reason: as in its outcome; of a complete trial, why it has no speed to rank
    files: paths of what the ranks left beside their figures
    """

    number: int
    params: Mapping[str, Scalar]
    status: TrialStatus
    reason: str
    detail: str
    metrics: Mapping[str, float]
    measurements: list[dict[str, Any]]
    where: Mapping[str, Scalar]
    started_at_s: float
    ended_at_s: float
    elapsed_s: float  # of the whole sweep's searching when this trial ended, over all its runs
    attempts: int = 1
    files: list[str] = field(default_factory=list)
    remeasurement: Remeasurement | None = None  # not of the search: a finalist measured again, or nodes compared

    @property
    def kind_of_reason(self) -> str:
        """Reasons that differ in numbers alone are of one kind."""
        return re.sub(r"[\d.,]+", "#", self.reason)

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=float)  # a workload may have left a NumPy number in its figures

    @staticmethod
    def from_json(text: str) -> TrialRecord:
        fields = json.loads(text)
        remeasurement = fields["remeasurement"]
        if remeasurement is not None:
            remeasurement["group"] = tuple(remeasurement["group"])
            remeasurement = Remeasurement(**remeasurement)
        return TrialRecord(**{**fields, "status": TrialStatus(fields["status"]), "remeasurement": remeasurement})
