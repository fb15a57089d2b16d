"""Apply a workload's cost model to a space to decide which points to try, in which order, and which to exclude."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

from sweeper.config.environment import only_variables, without_variables
from sweeper.config.resolution import ResolvedConfig
from sweeper.config.space import Interval, Parameters, Space, Value, point_key
from sweeper.preflight.clusters import on_nodes
from sweeper.preflight.corrections import Correction, corrected
from workloads.api.contract import Candidate, Machine, Workload
from workloads.api.errors import UserInputError

MAX_CANDIDATES = 300_000  # a group of points that one rule excludes counts once


class NoValidPoint(UserInputError):
    """A space without a valid point. The message has no key yet, because several may be at fault."""


@dataclass(frozen=True)
class CostEstimates:
    """The valid and the excluded points of a space, most promising first."""

    objective: str
    machine: Machine
    valid: list[Candidate]
    excluded: list[Candidate]
    correction: Correction | None = None  # from earlier sweeps; already applied to the estimates

    @cached_property
    def _metrics_by_point(self) -> dict[str, Mapping[str, float]]:
        return {point_key(candidate.point): candidate.estimate.metrics for candidate in self.valid}

    def metrics_of(self, point: Mapping[str, Value]) -> Mapping[str, float]:
        return self._metrics_by_point.get(point_key(point), {})

    def predict(self, point: Mapping[str, Value]) -> dict[str, float]:
        """Return the metric `predicted_…`: a point's estimated objective, as planned before the sweep."""
        metrics = self.metrics_of(point)
        return {f"predicted_{self.objective}": metrics[self.objective]} if self.objective in metrics else {}


def estimate_space(
    resolved: ResolvedConfig, space: Space, machine: Machine, correction: Correction | None = None
) -> CostEstimates | None:
    """Estimate every point, or return None without a cost model. Raises UserInputError if no point is valid."""
    workload, criteria = resolved.workload, resolved.criteria
    is_planned = workload.estimates_plans and resolved.config.plan
    if not (workload.has_estimates or (is_planned and math.isfinite(machine.cluster.device.memory_gb_s))):
        return None
    candidates = list(islice(_list_candidates(workload, space, machine), MAX_CANDIDATES + 1))
    if len(candidates) > MAX_CANDIDATES:
        most = f"more than {MAX_CANDIDATES:,} of its {space.size:,.0f} points"
        raise UserInputError(f"space: {most} have to be estimated; fix some")
    estimated = {name for candidate in candidates for name in candidate.estimate.metrics}
    # With several objectives, the first objective that has estimates orders the points.
    goal = next((goal for goal in criteria.objectives if goal.metric in estimated), criteria.objectives[0])

    def rank(candidate: Candidate) -> tuple[bool, float]:
        metrics = candidate.estimate.metrics
        loss = goal.loss(metrics[goal.metric]) if goal.metric in metrics else math.inf
        return exceeds_memory(candidate, machine), loss

    valid, excluded = list[Candidate](), list[Candidate]()
    for candidate in sorted(candidates, key=rank):
        (excluded if candidate.estimate.unsupported_reason else valid).append(candidate)
    if not valid:
        raise NoValidPoint(_explain_none_valid(excluded))
    if goal.metric not in valid[0].estimate.metrics:
        reason = f"{workload.name} cannot estimate it. Available: {', '.join(valid[0].estimate.metrics)}"
        raise UserInputError(f"workload.objective={goal.metric}: {reason}")
    if correction:
        for number, candidate in enumerate(valid):
            metrics = corrected(candidate.estimate.metrics, correction.factor)
            valid[number] = replace(candidate, estimate=replace(candidate.estimate, metrics=metrics))
    return CostEstimates(goal.metric, machine, valid, excluded, correction)


def exceeds_memory(candidate: Candidate, machine: Machine) -> bool:
    """Return whether a point fits only if the memory estimate is too high. These points are tried last."""
    return candidate.estimate.metrics.get("memory_gib", 0.0) > (machine.memory_gib or math.inf)


def _list_candidates(workload: Workload, space: Space, machine: Machine) -> Iterator[Candidate]:
    dimensions = dict[str, Sequence[Value]]()
    for name, dimension in space.dimensions.items():
        if isinstance(dimension, Interval):
            raise UserInputError(f"space.{name}: every point is estimated before; use a range or a choice")
        if len(dimension) > MAX_CANDIDATES:
            values = f"{len(dimension):,} values"
            raise UserInputError(f"space.{name}: has {values}, at most {MAX_CANDIDATES:,} are estimated")
        dimensions[name] = tuple(dimension.points())
    variables = only_variables(dimensions)
    settings = [dict(zip(variables, values, strict=True)) for values in product(*variables.values())]
    parameters, constants = without_variables(dimensions), without_variables(space.constants)
    for candidate in workload.list_candidates(parameters, constants, machine):
        for setting in settings:
            point = candidate.point | setting
            yield replace(candidate, point={name: point[name] for name in dimensions if name in point})


def _explain_none_valid(excluded: Sequence[Candidate]) -> str:
    """Explain why no point is valid: by how much the closest point exceeds memory, else the last rule."""
    estimates = [candidate.estimate for candidate in excluded]
    if too_large := [estimate for estimate in estimates if "memory_gib" in estimate.metrics]:
        closest = min(too_large, key=lambda estimate: estimate.metrics["memory_gib"])
        return f"no point fits; the smallest ({closest.description}) {closest.unsupported_reason}"
    example = min(excluded, key=lambda candidate: candidate.count).estimate
    return f"no point is valid: {example.description and f'{example.description}: '}{example.unsupported_reason}"


def count_by_rule(excluded: Iterable[Candidate]) -> Counter[str]:
    counts = Counter[str]()
    for candidate in excluded:
        counts[candidate.estimate.rule] += candidate.count
    return counts


@dataclass(frozen=True)
class Projection:
    by_devices: dict[int, float]  # the objective, by number of devices in ascending order
    batches: dict[int, int]  # sequences per step, by number of devices; grows with the devices
    gpus_per_node: int
    assumptions: str  # one sentence

    def anchored(self, value: float) -> Projection:
        """Return the projection scaled to start from a value measured on the smallest number of devices."""
        factor = value / next(iter(self.by_devices.values()))
        by_devices = {devices: factor * estimate for devices, estimate in self.by_devices.items()}
        return replace(self, by_devices=by_devices, assumptions=f"from the measured {value:,.4g}: {self.assumptions}")


def nodes_step(world_size: int, gpus_per_node: int) -> int:
    """Return the fewest nodes that copies of a trial fill exactly. A projection uses a multiple of this number."""
    return math.lcm(world_size, gpus_per_node) // gpus_per_node


def project(
    resolved: ResolvedConfig,
    space: Space,
    estimates: CostEstimates,
    point: Parameters,
    nodes: Sequence[int],
    gpus_per_node: int,
) -> Projection | None:
    """Estimate the objective for copies of a point on each number of nodes, or return None if they cannot be scaled."""
    workload, machine = resolved.workload, estimates.machine
    if not workload.can_scale:
        return None
    parameters = workload.Parameters(**without_variables({**space.constants, **point}))
    by_devices, batches, description = dict[int, float](), dict[int, int](), ""
    for devices in sorted({machine.world_size, *(count * gpus_per_node for count in nodes)}):
        scaled = on_nodes(machine, devices, gpus_per_node)
        copies = workload.scale(parameters, devices // machine.world_size)
        estimate = workload.estimate(copies, scaled)
        description = description or estimate.description
        metrics = corrected(estimate.metrics, estimates.correction.factor if estimates.correction else 1.0)
        if estimates.objective in metrics:
            by_devices[devices], batches[devices] = metrics[estimates.objective], copies.global_batch
    topology = machine.cluster.topology
    links = f"{topology.link_gb_s:g} GB/s"
    if topology.wiring == "pairs" and topology.gpus_per_domain > 1:
        peers = topology.gpus_per_domain - 1
        links = f"{topology.link_gb_s / peers:g} GB/s to each of {peers} other devices"
    unit = "each device" if machine.world_size == 1 else f"every {machine.world_size} devices"
    assumptions = (
        f"{description} on {unit}, nodes of {gpus_per_node}; replicas average gradients over {topology.network_gb_s:g} "
        f"GB/s a device, {links} within a node; the batch grows with the replicas; no failures, no stragglers, no "
        "other traffic on the network"
    )
    return Projection(by_devices, batches, gpus_per_node, assumptions)
