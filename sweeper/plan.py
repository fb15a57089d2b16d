"""What a sweep will do, held against the cluster that is there, before anything is started."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper import cluster, config
from sweeper.config import Config
from sweeper.hardware import Target, choose
from sweeper.recorder import check_uri
from sweeper.space import Space
from workloads import registry


@dataclass(frozen=True)
class Plan:
    """What a sweep will do, all of it checked, before anything is started."""

    config: Config
    target: Target
    space: Space
    left_out: list[str]
    first: list[dict[str, Any]]
    gangs: int
    identity: dict[str, Any]
    name: str
    folder: Path

    def said_devices(self) -> str:
        target, gpus = self.target, self.config.gpus
        have = f"{target.devices} x {target.model}" if target.hardware.kind == "gpu" else target.model
        each = "" if gpus == 1 else f", on {gpus} {'GPUs' if target.hardware.kind == 'gpu' else 'processes'} each"
        return f"{have}; {self.gangs} trial{'s' if self.gangs > 1 else ''} at once{each}"

    def said_search(self) -> str:
        budget, size = self.config.budget, self.space.size
        points = "continuous" if math.isinf(size) else f"{size:,.0f} point{'s' if size > 1 else ''}"
        limits = [
            f"{budget.trials} trials" if budget.trials else "",
            f"{budget.time_s:g} s" if budget.time_s else "",
            f"{budget.patience} trials without a better one" if budget.patience else "",
        ]
        what = ", ".join(self.space.dimensions) or "one point"
        by = f"by {self.config.search.sampler}, seed {self.config.seed}"
        return f"{what} ({points}) {by}, until {' or '.join(filter(None, limits))}"


def plan(said: Config) -> Plan:
    """Hold what was said against the cluster that is there. Raises SaidWrongly."""
    if said.tracking.uri:
        check_uri(said.tracking.uri)
    target = choose(said.hardware, cluster.look(said.cluster.address), said.gpus)
    gangs = target.gangs(said.gpus, said.cluster.workers)
    space, left_out = config.read_space(said, target.hardware.kind, target.architecture)
    if said.search.sampler == "grid":
        next(space.points())
    identity = {
        "workload": said.workload.name,
        "method": registry.load(said.workload.name).method,
        "objective": f"{said.workload.direction} {said.workload.objective}",
        "space": space.described(),
        "device": target.model,
        "gpus": said.gpus,
        "sampler": said.search.sampler,
        "seed": said.seed,
    }
    if target.hardware.kind == "cpu":  # trials beside one another share its cores and disturb each other's timings
        identity["workers"] = gangs
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:6]
    kind = (
        [target.hardware.name, str(space.constants["dtype"])] if "dtype" in space.constants else [target.hardware.name]
    )
    name = said.name or "-".join([said.workload.name, *kind, said.search.sampler, digest])
    first = config.read_first(said, space, target.hardware.kind)
    folder = Path(said.dir).expanduser().resolve() / "sweeps" / name
    return Plan(said, target, space, left_out, first, gangs, identity, name, folder)
