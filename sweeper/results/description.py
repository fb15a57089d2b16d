"""`sweep.json` in a sweep's folder: what the sweep measures and on what, and how its last run ended."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper.metrics.criteria import DIRECTIONS, Criteria
from workloads.api.contract import Rank
from workloads.api.errors import UserInputError
from workloads.api.secrets import masked, masked_arguments

if TYPE_CHECKING:
    from sweeper.preflight.sweep_plan import SweepPlan

FILE = "sweep.json"


@dataclass(frozen=True)
class SweepEnd:
    """How the last run of a sweep ended.

    Attributes:
        is_over: the budget was used up and no finals were left.
        reason: why the loop ended before the budget, such as failures for one reason; empty if it did not.
        winner: number of the trial that won; None if no trial was complete.
        value, low, high: its objective and the bounds of its 95% interval; None where it has none.
        rounds: rounds of the finals that the value is the mean of; 0 for the value of a single trial.
        front: with several objectives, the numbers of the trials on their front; None from an earlier version.
    """

    is_over: bool
    reason: str
    winner: int | None
    value: float | None
    low: float | None
    high: float | None
    rounds: int
    at_s: float
    front: Sequence[int] | None = None


@dataclass(frozen=True)
class SweepDescription:
    """A sweep in plain values, secrets masked. Times are in seconds since 1970.

    Attributes:
        study: the id of its study, which its runs in MLflow have as a tag.
        arguments: the command line that runs or resumes it.
        settings: those of the workload's section; None if it has none.
        constants: the parameters that every trial has.
        space: the parameters as text.
        hardware, device: the name of the hardware, and the device's own name.
        gpus, ranks_per_node: ranks of a trial, and how many of them share a node.
        nodes: of the sweep.
        software: versions of the driver's packages by name.
        git: commit of the checkout that ran.
        budget_trials: trials of its budget, at most those of its space; None without a limit, or of an earlier version.
        started_at_s: of its last run.
        end: how that ended; None while it runs, and after it was killed.
    """

    name: str
    study: str
    arguments: Sequence[str]
    python: str
    host: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any] | None
    constants: Mapping[str, Any]
    space: Mapping[str, Any]
    hardware: str
    device: str
    gpus: int
    ranks_per_node: int
    nodes: int
    tracking_uri: str
    software: Mapping[str, str]
    git: Mapping[str, Any]
    budget_trials: int | None = None
    started_at_s: float = field(default_factory=time.time)
    end: SweepEnd | None = None

    @property
    def workload(self) -> str:
        return str(self.config["workload"]["name"])

    @property
    def objective(self) -> str:
        return str(self.config["workload"]["objective"])

    @property
    def direction(self) -> str:
        return str(self.config["workload"]["direction"])

    @property
    def criteria(self) -> Criteria:
        names = self.config.get("objective") or [self.objective]
        others = {name: DIRECTIONS[name] for name in names[1:]}
        limits = {name: bound for name, bound in self.config.get("limits", {}).items() if bound is not None}
        return Criteria.of({self.objective: self.direction, **others}, limits)

    @property
    def first_rank(self) -> Rank:
        return Rank(
            world_size=self.gpus,
            device="cpu" if self.hardware == "cpu" else "cuda",
            ranks_per_node=self.ranks_per_node,
            nodes=max(1, self.gpus // self.ranks_per_node),
        )

    def write(self, folder: Path) -> None:
        """Write the file whole or not at all: others read it at any time."""
        part = folder / f".{FILE}.part"
        part.write_text(json.dumps(asdict(self), indent=1, default=str))
        part.replace(folder / FILE)

    def with_end(self, end: SweepEnd | None) -> SweepDescription:
        return replace(self, end=end)


def describe_sweep(
    plan: SweepPlan, *, study: str, arguments: Sequence[str], provenance: Mapping[str, Any], uri: str
) -> SweepDescription:
    """Return the description of a sweep that starts, by the command line `arguments`, with its store's `uri`."""
    gpus = plan.resources.gpus
    return SweepDescription(
        name=plan.name,
        study=study,
        arguments=masked_arguments(arguments),
        python=sys.executable,
        host=platform.node(),
        config=masked(asdict(plan.config)),
        settings=None if plan.resolved.settings is None else masked(plan.resolved.settings),
        constants=masked(plan.space.constants),
        space=masked(plan.space.described()),
        hardware=plan.target.hardware.name,
        device=plan.target.model,
        gpus=gpus,
        ranks_per_node=plan.target.ranks_per_node(gpus),
        nodes=len(plan.target.nodes),
        tracking_uri=masked([uri])[0],
        software={name: version for name, version in provenance["versions"].items() if version},
        git=provenance["git"],
        budget_trials=plan.budget_trials,
    )


def read_description(folder: Path) -> SweepDescription | None:
    """Return the description of the sweep in a folder; None of a sweep without one, as earlier versions left it.

    Raises:
        UserInputError: the file is damaged, by a full disk or a crash of the machine.
    """
    try:
        fields = json.loads((folder / FILE).read_text())
        end = fields.pop("end")
        return SweepDescription(**fields, end=SweepEnd(**end) if end else None)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserInputError(f"{folder / FILE}: is damaged; the sweep's command writes it again") from error
