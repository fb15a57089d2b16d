"""Read and write `sweep.json`: what a sweep measures, on which devices, and how the sweep's last run ended."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper.common.files import write_whole
from sweeper.metrics.criteria import DIRECTIONS, Criteria
from workloads.api.contract import Rank
from workloads.api.errors import UserInputError
from workloads.api.secrets import masked, masked_arguments

if TYPE_CHECKING:
    from sweeper.preflight.sweep_plan import SweepPlan

FILE = "sweep.json"


@dataclass(frozen=True)
class SweepEnd:
    is_over: bool  # whether the budget is used up and the finals are complete
    reason: str  # why the sweep ended early, such as repeated failures; empty if it did not
    winner: int | None  # the winning trial's number; None if no trial was complete
    value: float | None  # the winner's objective
    low: float | None  # low, high: the bounds of the 95% interval of `value`; None without an interval
    high: float | None
    rounds: int  # the number of finals rounds in the mean `value`; 0 for a single trial
    at_s: float
    # With several objectives: the numbers of the trials on the front, or None if an earlier version ended the sweep.
    front: Sequence[int] | None = None
    failed: int = 0  # how many trials failed, were lost or timed out; 0 if an earlier version ended the sweep


@dataclass(frozen=True)
class SweepDescription:
    """A description of a sweep in plain values, with secrets masked. Times are in seconds since 1970."""

    name: str
    study: str  # the id of the sweep's study, which is also a tag of the sweep's runs in MLflow
    arguments: Sequence[str]  # the command line that runs or resumes the sweep
    python: str
    host: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any] | None  # the settings in the workload's section; None if there is no section
    constants: Mapping[str, Any]  # parameters with the same value in every trial
    space: Mapping[str, Any]  # the space as text, by parameter
    hardware: str  # the device's name in the catalog
    device: str  # the device's name according to the driver
    gpus: int  # ranks per trial
    ranks_per_node: int
    nodes: int  # the number of nodes in the sweep
    tracking_uri: str
    software: Mapping[str, str]  # versions of the packages on the driver, by name
    git: Mapping[str, Any]  # the commit of the checkout that ran
    # The trials in the budget, capped at the size of the space, or None without a limit or in earlier versions.
    budget_trials: int | None = None
    cpus: int | None = None  # how many of the machine's cores the sweep uses; None means all, by default
    started_at_s: float = field(default_factory=time.time)  # the start of the last run
    end: SweepEnd | None = None  # how the last run ended; None if it is still running or was killed

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
        directions = DIRECTIONS | self.config.get("metrics", {})
        others = {name: directions[name] for name in names[1:]}
        bounds = self.config.get("limits", {}).items()
        limits = {name: [bound, directions[name]] for name, bound in bounds if bound is not None}
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
        """Write `sweep.json` atomically, because other processes may read it at any time."""
        write_whole(folder / FILE, json.dumps(asdict(self), indent=1, default=str))


def describe_sweep(
    plan: SweepPlan, *, study: str, arguments: Sequence[str], provenance: Mapping[str, Any], uri: str
) -> SweepDescription:
    """Return the description of a sweep at its start. `arguments` is the command line, and `uri` the MLflow store."""
    gpus, node = plan.resources.gpus, plan.target.nodes[0]
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
        cpus=node.cpus if node.idle_cpus or plan.config.cluster.cpus else None,
    )


def read_description(folder: Path) -> SweepDescription:
    """Read a sweep's description. Raises UserInputError if the file is missing or damaged."""
    try:
        fields = json.loads((folder / FILE).read_text())
        end = fields.pop("end")
        return SweepDescription(**fields, end=SweepEnd(**end) if end else None)
    except FileNotFoundError as error:
        raise UserInputError(f"{folder}: there is no sweep") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserInputError(f"{folder / FILE}: is damaged; the sweep's command writes it again") from error
