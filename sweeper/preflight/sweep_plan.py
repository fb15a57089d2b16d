"""Plan a sweep: check the configuration against the cluster before anything is started."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeper.config import space_checks
from sweeper.config.device_values import fill_space
from sweeper.config.environment import without_variables
from sweeper.config.hardware import Node, Target
from sweeper.config.resolution import ResolvedConfig, check_program
from sweeper.config.schema import Config
from sweeper.config.space import Interval, Parameters, Space
from sweeper.config.space_checks import WarmStart
from sweeper.metrics import derivation
from sweeper.metrics.criteria import DIRECTIONS, Criteria
from sweeper.preflight import ceilings, corrections, cost_model
from sweeper.preflight.calibration import CalibrationFile, calibrate_device, device_key, find_calibration
from sweeper.preflight.clusters import build_machine, choose_topology
from sweeper.preflight.cost_model import CostEstimates
from sweeper.preflight.devices import describe_problems, select_devices
from workloads.api import registry
from workloads.api.contract import BandEnds, Machine, ProgramFailed
from workloads.api.errors import UserInputError
from workloads.api.metrics import COST, METRICS, Need, find_missing, find_source, get_metric
from workloads.api.secrets import masked
from workloads.suggestions import hint

PROMISING_POINTS = 5  # the number of estimated points to try first
# The workload parameters that, with the estimated rate, determine how long a trial's steps take.
PARAMETERS_OF_STEPS = ("global_batch", "sequence_length", "warmup", "steps")
SAMPLED_POINTS = 500  # approximate sample size for the mean duration of a trial's steps


@dataclass(frozen=True)
class Resources:
    target: Target
    gpus: int  # ranks per trial
    gangs: int  # concurrent trials
    whole_nodes: bool  # no two trials share a node
    host_gib: float  # host memory to reserve for each process of a trial


@dataclass(frozen=True)
class SweepPlan:
    resolved: ResolvedConfig
    resources: Resources
    space: Space
    gpu_problems: list[str]  # why the nodes' GPUs cannot be used, one line per problem
    excluded: list[str]  # values that the devices do not support, one line per value
    initial_points: list[Parameters]  # points to try first
    identity: dict[str, Any]  # the settings that must stay the same if a sweep is to be resumed
    name: str
    folder: Path
    achieved_tflops: dict[str, float]  # measured matmul ceilings per rank, by dtype
    machine: Machine  # the known properties of a trial's devices
    calibration: CalibrationFile | None  # rates for estimates; None means tables and ceilings
    estimates: CostEstimates | None  # None for a workload without a cost model
    variable_sources: dict[str, str] = field(default_factory=dict)  # where each variable shared by all trials was set
    busy: str = ""  # which cores other processes use, and the effect on the sweep

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def criteria(self) -> Criteria:
        return self.resolved.criteria

    @property
    def target(self) -> Target:
        return self.resources.target

    @property
    def budget_trials(self) -> int | None:
        """The number of trials in the budget, capped at the number of points, or None if there is no limit."""
        budget = self.config.budget.trials
        return budget if budget is None else int(min(budget, self.space.size))

    @property
    def directory(self) -> Path:
        """The results directory (the key `dir`), which contains the folder with all sweeps."""
        return self.folder.parent.parent

    def first_point(self) -> Parameters:
        """Return the most promising point. Without estimates, return the first initial point or the first values."""
        if self.estimates:
            return self.estimates.valid[0].point
        first_values: Parameters = {
            name: dimension.low if isinstance(dimension, Interval) else next(iter(dimension.points()))
            for name, dimension in self.space.dimensions.items()
        }
        return {**first_values, **self.initial_points[0]} if self.initial_points else first_values

    def preview(self) -> str:
        """Return the workload's preview of the first point, or "" if there is none or the point is invalid."""
        parameters = self._first_parameters()
        return "" if parameters is None else self.resolved.workload.preview(parameters, self.machine)

    def try_out(self) -> str:
        """Run the first point's program on this machine until its first steps, and return what was read from them.

        Raises UserInputError if the trial needs several devices or a device that is absent, or if its values are
        invalid. Raises ProgramFailed, with what was read so far, if the program ends before its first steps, or if an
        objective or limit was not read.
        """
        if self.resources.gpus > 1 or self.target.is_planned:
            raise UserInputError("plan=run: only a trial on one device of this machine is run; use plan=true")
        if (parameters := self._first_parameters()) is None:
            raise UserInputError("plan=run: the values of the first point contradict each other")
        text, measured = self.resolved.workload.try_out(parameters)
        hardware, config = self.target.hardware, self.config
        metrics = derivation.derive([measured], hardware.dense_peak_tflops, None, hardware.bandwidth_tb_s)
        metrics |= derivation.cost_metrics(metrics, 1, derivation.Prices(config.price_per_hour, config.price_per_kwh))
        # The first steps are too short for the energy counter.
        lasting = {name: 0.0 for name in METRICS if "energy" in find_source(name)}
        if missing := derivation.describe_missing(self.criteria, [measured], lasting | metrics):
            raise ProgramFailed(f"{text}\n{missing}")
        return text

    def find_band(self) -> tuple[BandEnds, str]:
        """Return the error band of the first point's estimate, and the basis of the band."""
        return self.resolved.workload.find_band(self._first_parameters(), self.machine)

    def _first_parameters(self) -> Any:
        values = without_variables({**self.space.constants, **self.first_point()})
        try:
            return self.resolved.workload.Parameters(**values)
        except ValueError:  # only the trial at this point will fail
            return None


def plan_sweep(
    resolved: ResolvedConfig,
    nodes: Sequence[Node],
    *,
    strict_initial_points: bool = False,
    warm_start: WarmStart | None = None,
) -> SweepPlan:
    """Check the configuration against the cluster's nodes and return the plan. Raises UserInputError."""
    target, gpus = select_devices(resolved, nodes)
    resolved = fill_space(resolved, target, gpus)
    space, excluded, variable_sources = space_checks.check_space(resolved, target)
    check_program(resolved)
    resources = _plan_resources(resolved, space, target, gpus)
    config, directory = resolved.config, Path(resolved.config.dir).expanduser().resolve()
    # Ranks on one CPU share its rate.
    sharing = 1 if target.is_gpu else min(gpus, max(node.cpus for node in target.nodes))
    achieved = ceilings.achieved_tflops(ceilings.read(directory), target.model)
    achieved_tflops = {dtype: tflops / sharing for dtype, tflops in achieved.items()}
    _check_measurable(resolved, target, gpus, bool(achieved))
    rates_of = device_key(target.hardware)
    calibration = find_calibration(config.calibration, directory, rates_of, is_gpu=target.is_gpu)
    gpus_per_node = max(1, *(node.gpus for node in target.nodes))
    topology = choose_topology(config.topology, target.hardware, gpus_per_node, calibration)
    machine = build_machine(target, gpus, topology, achieved_tflops)
    if calibration:
        device = calibrate_device(machine.cluster.device, calibration.rates)
        machine = replace(machine, cluster=replace(machine.cluster, device=device))
    correction = None
    if resolved.workload.has_estimates:
        place = corrections.place_of(target, resolved, space, machine, calibration)
        correction = corrections.find(corrections.read(directory), place)
    estimates = cost_model.estimate_space(resolved, space, machine, correction)
    _check_projection(resolved, estimates, target, gpus)
    if estimates:
        space = replace(space, only=tuple(candidate.point for candidate in estimates.valid))
    if config.search.sampler == "grid":
        next(space.points())  # raises if the space has no grid
    kind = target.hardware.kind
    initial_points = space_checks.read_initial_points(resolved, space, kind, strict=strict_initial_points)
    identity = _build_identity(resolved, space, resources)
    if warm_start:
        initial_points = [*warm_start.legal_points(space), *initial_points]
        identity["warm_start"] = warm_start.study
    promising = [candidate.point for candidate in estimates.valid[:PROMISING_POINTS]] if estimates else []
    folder = name_folder(config, space, target, identity)
    return SweepPlan(
        resolved=resolved,
        resources=resources,
        space=space,
        gpu_problems=describe_problems(nodes) if target.is_gpu else [],
        excluded=excluded,
        initial_points=initial_points + [point for point in promising if point not in initial_points],
        identity=identity,
        name=folder.name,
        folder=folder,
        achieved_tflops=achieved_tflops,
        machine=machine,
        calibration=calibration,
        estimates=estimates,
        variable_sources=variable_sources,
    )


def name_folder(config: Config, space: Space, target: Target, identity: dict[str, Any]) -> Path:
    """Return the folder of the sweep with this identity. The name comes from the user or the identity."""
    sweeps = Path(config.dir).expanduser().resolve() / "sweeps"
    if config.name is not None:
        return sweeps / config.name
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:6]
    dtype = [str(space.constants["dtype"])] if "dtype" in space.constants else []
    parts = [target.hardware.name, *dtype, config.search.sampler, digest]
    earlier = sweeps / "-".join([config.workload.name, *parts])  # the name in earlier versions, if there is a preset
    return earlier if earlier.exists() else sweeps / "-".join([config.workload.title, *parts])


def check_retry(plan: SweepPlan) -> None:
    """Raise UserInputError if the sweep to retry does not exist."""
    if plan.config.retry and not (plan.folder / "study.journal").exists():
        names = (journal.parent.name for journal in plan.directory.glob("sweeps/*/study.journal"))
        missing = f"retry={plan.config.retry}: there is no sweep {plan.name} in {plan.config.dir}"
        raise UserInputError(f"{missing}.{hint(plan.name, names, 'name=')}")


def _plan_resources(resolved: ResolvedConfig, space: Space, target: Target, gpus: int) -> Resources:
    whole_nodes = (resolved.config.exclusive or resolved.workload.exclusive) == "node"
    # If a process needs more memory than a node has, the process itself will report the problem.
    host_gib = min(space_checks.reserved_host_gib(resolved, space, gpus), target.least_memory_gib())
    requested = resolved.config.cluster.max_concurrent_trials
    gangs = target.count_gangs(gpus, requested, whole_nodes=whole_nodes, host_gib=host_gib)
    return Resources(target, gpus, gangs, whole_nodes, host_gib)


def _check_measurable(resolved: ResolvedConfig, target: Target, gpus: int, has_ceiling: bool) -> None:
    """Raise UserInputError if the metric of an objective or limit cannot be measured on these devices. For a
    third-party workload, which may measure metrics that ours do not, check only the hardware entry, the number of ranks
    and the prices."""
    criteria = resolved.criteria
    keys = dict.fromkeys(criteria.metrics, "objective")
    keys |= {limit.metric: f"limits.{limit.metric}" for limit in criteria.limits if limit.metric not in keys}
    for metric, key in keys.items():
        if reason := next(_find_reasons(metric, resolved, target, gpus, has_ceiling), ""):
            text = f"{key}={metric}" if key == "objective" else key
            raise UserInputError(f"{text}: is not measured here: {reason}")


def _find_reasons(metric: str, resolved: ResolvedConfig, target: Target, gpus: int, has_ceiling: bool) -> Iterator[str]:
    config, hardware, name = resolved.config, target.hardware, target.hardware.name
    reads_cpu = registry.find_entry_point(config.workload.name) is None and not target.is_gpu  # our own workload
    reports_own = resolved.workload.Settings is not None  # a command's log, or a function, may report any raw metric
    base = metric.removesuffix("_per_gpu")
    match get_metric(base).needs:
        case Need.PRICE if config.price_per_hour is None and config.price_per_kwh is None:
            yield "there is no price; set price_per_hour= or price_per_kwh="
        case Need.PRICE if config.price_per_kwh is not None and reads_cpu:
            yield "no driver reports the energy of a CPU, to which price_per_kwh= applies; use price_per_hour= alone"
        case Need.ENERGY if reads_cpu:
            yield "no driver reports the energy of a CPU; choose a GPU by hardware="
        case Need.GPU if reads_cpu and not reports_own:
            yield "it is read from a GPU, and this sweep runs on a CPU; choose a GPU by hardware="
        case Need.PEAK if not hardware.dense_peak_tflops:
            yield f"the dense peak of {name} is not known; use tflops, or set hardware.dense_peak_tflops="
        case Need.BANDWIDTH if not hardware.bandwidth_tb_s:
            yield f"the bandwidth of {name} is not known; use gb_per_s, or set hardware.bandwidth_tb_s="
        case Need.CEILING if not has_ceiling:
            yield f"no matmul rate of {target.model} was measured; run workload=matmul first"
    measures, ours = resolved.workload.measures, [row for row in DIRECTIONS if row not in config.metrics]
    if measures and metric in ours and (missing := find_missing(metric, measures)):
        of_work = [row for row in ours if not find_missing(row, measures)]
        measured = [row for row in of_work if not any(_find_reasons(row, resolved, target, gpus, has_ceiling))]
        yield f"a trial of {config.workload.name} has no {missing[0]}. Available: {', '.join(measured)}"
    is_of_several = get_metric(metric).needs is Need.RANKS or (metric != base and find_source(base))
    if gpus == 1 and is_of_several:
        yield "it compares the ranks of a trial, which has one; set gpus="


def _check_projection(resolved: ResolvedConfig, estimates: CostEstimates | None, target: Target, gpus: int) -> None:
    nodes, per_node = resolved.projection_nodes, target.devices_per_node(gpus)
    if nodes and not (estimates and resolved.workload.can_scale):
        raise UserInputError(f"projection.nodes: {resolved.config.workload.name} cannot project to more nodes")
    step = cost_model.nodes_step(gpus, per_node)
    if unfilled := [count for count in nodes if count % step]:
        allowed = f"multiples of {step} nodes of {per_node}, such as projection.nodes={step},{2 * step}"
        raise UserInputError(f"projection.nodes={unfilled[0]}: copies of a trial of {gpus} GPUs fill {allowed}")


def _build_identity(resolved: ResolvedConfig, space: Space, resources: Resources) -> dict[str, Any]:
    config = resolved.config
    identity: dict[str, Any] = {
        "workload": config.workload.name,
        "benchmark_version": resolved.workload.benchmark_version,
        "objective": ", ".join(f"{goal.direction} {goal.metric}" for goal in resolved.criteria.objectives),
        "space": space.described(),
        "device": resources.target.model,
        "gpus": resources.gpus,
        "sampler": config.search.sampler,
        "seed": config.seed,
    }
    if any(COST in name for name in resolved.criteria.metrics):  # the objective depends on the prices
        identity["prices"] = [config.price_per_hour, config.price_per_kwh]
    if resolved.settings is not None:
        identity["command"] = masked(resolved.settings)
    if not resources.target.is_gpu:  # concurrent trials share cores and disturb each other's timings
        identity["concurrent_trials"] = resources.gangs
    return identity


def estimate_steps_s(plan: SweepPlan) -> float | None:
    """Estimate how long (s) the search's steps take with all gangs running, or return None without any estimates."""
    limit = plan.config.budget.trials
    if plan.estimates is None or limit is None:
        return None
    valid, seconds = plan.estimates.valid, list[float]()
    for candidate in valid[:: 1 + len(valid) // SAMPLED_POINTS]:
        values = without_variables({**plan.space.constants, **candidate.point})
        parameters = plan.resolved.workload.Parameters(**values)
        rate = candidate.estimate.metrics.get("tokens_per_s")
        if trial_s := candidate.estimate.metrics.get("trial_s"):
            seconds.append(trial_s)
        elif rate and all(hasattr(parameters, name) for name in PARAMETERS_OF_STEPS):
            batch, length, warmup, steps = (getattr(parameters, name) for name in PARAMETERS_OF_STEPS)
            seconds.append((warmup + steps) * batch * length / rate)
    trials = min(limit, len(valid))
    return sum(seconds) / len(seconds) * trials / max(1, plan.resources.gangs) if seconds else None
