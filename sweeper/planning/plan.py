"""What a sweep will do, held against the cluster that is there, before anything is started."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sweeper.common.errors import UserInputError
from sweeper.common.secrets import masked
from sweeper.config import resolution
from sweeper.config.hardware import Target, catalogue, choose, is_a, on_paper
from sweeper.config.resolution import Config
from sweeper.config.space import Space
from sweeper.execution import cluster
from sweeper.planning import ceilings, cost_model
from sweeper.planning.cost_model import CostEstimates
from sweeper.tracking.client import check_uri
from sweeper.ui.tables import said_point, shown_width

PROMISING = 5  # so many points that a workload thinks the best of are tried first


@dataclass(frozen=True)
class Plan:
    """What a sweep will do, all of it checked, before anything is started."""

    config: Config
    target: Target
    space: Space
    excluded: list[str]
    first: list[dict[str, Any]]
    gpus: int
    gangs: int
    whole_nodes: bool  # whether no two trials run on one node
    host_gib: float  # that is reserved of a node's memory for each process of a trial
    identity: dict[str, Any]
    name: str
    folder: Path
    reached_tflops: dict[str, float]
    foresight: CostEstimates | None
    nodes: list[int]  # on how many times the devices of a trial what is foreseen is wanted as well

    @property
    def directory(self) -> Path:
        """What the user said with dir=: where the results of all sweeps are."""
        return self.folder.parent.parent

    def last_lines_of(self, number: int) -> Path:
        """Where the last lines of a trial that ended badly are kept."""
        return self.folder / "files" / f"{number:04d}" / "last_lines.txt"

    def said_devices(self) -> str:
        target, gpus = self.target, self.gpus
        have = f"{target.devices} x {target.model}" if target.hardware.kind == "gpu" else target.model
        have += ", on paper" if target.nodes[0].address == "on paper" else ""
        each = "" if gpus == 1 else f", on {gpus} {'GPUs' if target.hardware.kind == 'gpu' else 'processes'} each"
        alone = ", no two on one node" if self.whole_nodes and self.target.hardware.kind == "gpu" else ""
        return f"{have}; {self.said_gangs()}{each}{alone}"

    def said_gangs(self) -> str:
        return f"{_trials(self.gangs)} at once"

    def said_search(self) -> str:
        budget, size = self.config.budget, self.space.size
        legal = "" if self.foresight is None else " worth trying"
        points = "continuous" if math.isinf(size) else f"{size:,.0f} point{'s' if size > 1 else ''}{legal}"
        limits = [
            _trials(budget.trials) if budget.trials else "",
            f"{budget.time_s:g} s" if budget.time_s else "",
            f"{_trials(budget.patience)} without a better one" if budget.patience else "",
        ]
        what = ", ".join(self.space.dimensions) or "one point"
        by = f"by {self.config.search.sampler}, seed {self.config.seed}"
        return f"{what} ({points}) {by}, until {' or '.join(filter(None, limits))}"


def plan(said: Config, *, first_is_meant: bool = False) -> Plan:
    """Hold what was said against the cluster that is there: points to begin with that are outside of the space are
    passed over, unless they are meant. Raises SaidWrongly."""
    if said.tracking.uri:
        check_uri(said.tracking.uri)
    projected = resolution.read_nodes(said)
    nodes = cluster.look(said.cluster.address, said.cluster.insecure)
    wanted, ranks = said.hardware, said.gpus if isinstance(said.gpus, int) else 1
    absent = wanted.name in catalogue() and not any(is_a(wanted, node) for node in nodes)
    target = on_paper(wanted, ranks) if said.plan and absent else choose(wanted, nodes, ranks)
    if said.search.pruner != "none" and not resolution.workload_of(said).reports_steps:
        raise UserInputError(f"search.pruner={said.search.pruner}: {said.workload.name} tells nothing before it ends")
    gpus = said.gpus if isinstance(said.gpus, int) else _all(target)
    resolution.check_gpus(said, gpus)
    said = resolution.with_strategy(said, target.hardware.kind, target.architecture)
    whole_nodes = (said.exclusive or resolution.workload_of(said).exclusive) == "node"
    space, excluded = resolution.read_space(said, target.hardware.kind, target.architecture)
    resolution.check_program(said)
    if target.hardware.kind == "cpu":
        resolution.check_processor(said, space)
    host_gib = min(resolution.host_gib(said, space), target.least_memory_gib())  # what needs more says so itself
    gangs = target.gangs(gpus, said.cluster.workers, whole_nodes=whole_nodes, gib=host_gib)
    folder_of_all = Path(said.dir).expanduser().resolve()
    shared_by = 1 if target.hardware.kind == "gpu" else min(gpus, max(node.cpus for node in target.nodes))
    reached = ceilings.reached_tflops(ceilings.read(folder_of_all), target.model)
    reached = {dtype: rate / shared_by for dtype, rate in reached.items()}  # ranks on one processor share its rate
    machine = cost_model.build_machine(target, gpus, said.cluster.network_gb_s, reached)
    foreseen = cost_model.look(said, space, machine)
    if projected and not (foreseen and resolution.workload_of(said).can_scale):
        raise UserInputError(f"nodes: {said.workload.name} does not foresee how it would grow")
    if foreseen:
        space = replace(space, only=tuple(seen.point for seen in foreseen.legal))
    if said.search.sampler == "grid":
        next(space.points())
    identity = {
        "workload": said.workload.name,
        "method": resolution.workload_of(said).benchmark_version,
        "objective": f"{said.workload.direction} {said.workload.objective}",
        "space": space.described(),
        "device": target.model,
        "gpus": gpus,
        "sampler": said.search.sampler,
        "seed": said.seed,
    }
    if (settings := resolution.settings_of(said)) is not None:
        identity["command"] = masked(settings)
    if target.hardware.kind == "cpu":  # trials beside one another share its cores and disturb each other's timings
        identity["workers"] = gangs
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:6]
    kind = (
        [target.hardware.name, str(space.constants["dtype"])] if "dtype" in space.constants else [target.hardware.name]
    )
    name = said.name or "-".join([said.workload.name, *kind, said.search.sampler, digest])
    first = resolution.read_first(said, space, target.hardware.kind, meant=first_is_meant)
    if foreseen:
        first += [seen.point for seen in foreseen.legal[:PROMISING] if seen.point not in first]
    folder = folder_of_all / "sweeps" / name
    return Plan(
        config=said,
        target=target,
        space=space,
        excluded=excluded,
        first=first,
        gpus=gpus,
        gangs=gangs,
        whole_nodes=whole_nodes,
        host_gib=host_gib,
        identity=identity,
        name=name,
        folder=folder,
        reached_tflops=reached,
        foresight=foreseen,
        nodes=projected,
    )


def _trials(count: int) -> str:
    return f"{count} trial{'' if count == 1 else 's'}"


def _all(target: Target) -> int:
    if target.hardware.kind == "cpu":
        raise UserInputError(f"gpus=all: there are no GPUs ({target.model}); say how many processes")
    return target.devices


def show(planned: Plan) -> int:
    """Print what a sweep would try, and end: plan=true."""
    console = Console(width=shown_width())
    console.print(f"device   {planned.said_devices()}\nsearch   {planned.said_search()}", highlight=False)
    if planned.space.constants:
        console.print(f"fixed    {said_point(planned.space.constants)}", highlight=False)
    if planned.foresight is None:
        for point in planned.first:
            console.print(f"first    {said_point(point)}", highlight=False)
        by = planned.config.search.sampler
        console.print(f"then     by {by}: of this workload nothing more is known before it runs", soft_wrap=True)
        return 0
    if planned.target.hardware.kind == "cpu":
        console.print("figures  of a processor: their order means something, their height does not", highlight=False)
    width = console.width
    parts = cost_model.tell(planned.foresight, width)
    if planned.nodes:
        best = planned.foresight.legal[0].point
        projection = cost_model.project(planned.config, planned.space, planned.foresight, best, planned.nodes)
        parts += cost_model.tell_projection(projection, planned.config, width) if projection else []
    for part in parts:
        console.print(part, highlight=False)
    planned.folder.mkdir(parents=True, exist_ok=True)
    (planned.folder / "plan.csv").write_text(cost_model.csv(planned.foresight))
    console.print(f"all points, with the reasons: {planned.folder / 'plan.csv'}", highlight=False, soft_wrap=True)
    return 0
