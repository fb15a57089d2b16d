"""The contract between `sweeper/` and `workloads/`: frozen dataclasses of plain values, and the base class `Workload`.

A workload is a class with a `Parameters` dataclass and a `run` method. Workloads run without Ray, from the command line
(`python -m workloads matmul m=1024 n=1024 k=1024`), under torchrun, or in a test.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from itertools import product
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from workloads.api.metrics import find_source
from workloads.hardware.cluster import UNKNOWN_CLUSTER, Cluster

Scalar = str | int | float | bool | None
STATISTICS = ("median", "mean", "fastest")
# The shortest accepted step time. Reading a host's clock twice takes about this long, and GPU events have a resolution
# of half a microsecond.
MIN_STEP_TIME_S = 1e-7


class Infeasible(Exception):
    """These parameters cannot work on this device. The sampler is told and never proposes them again."""


class OutOfMemory(Infeasible):
    """The device or the host ran out of memory. The process is not reused, because its allocator is fragmented."""


class Pruned(Exception):
    """The pruner ended the trial because other trials were better at the same step."""


class TrialTimeout(Exception):
    """The trial stopped itself at its timeout in order to report its last output."""


class HostBusy(Exception):
    """Other processes occupied the cores for too long to measure anything."""


class ParameterMismatch(Exception):
    """The executed parameters differ from the requested parameters: another configuration was measured."""


class ProgramFailed(Exception):
    """A program that the workload ran failed, or its output contains no measurement."""


def is_file_name(name: str) -> bool:
    """Return whether a name is a plain file name that cannot point outside its folder."""
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def is_path(value: object, parameter: Field[Any]) -> bool:
    """Return whether a parameter's value is a file path, according to the parameter's `file` metadata."""
    suffix = parameter.metadata.get("file", False)
    return isinstance(value, str) and (value.endswith(suffix) if isinstance(suffix, str) else suffix)


@dataclass(frozen=True)
class ProgramOutput:
    """The program output kept for a trial without a measurement. `files` has the same meaning as in `Measurement`."""

    last_lines: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


def attach_output(error: BaseException, output: ProgramOutput) -> None:
    error.__dict__["program_output"] = output


def output_of(error: BaseException) -> ProgramOutput:
    """Return the output attached to an exception, or an empty output if there is none."""
    output = error.__dict__.get("program_output")
    return output if isinstance(output, ProgramOutput) else ProgramOutput()


class StepReporter(Protocol):
    """Reports the steps of a running trial to the driver. Every rank of a gang has a reporter."""

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Report a finished step. Return True if the pruner ends the trial; the workload may then raise Pruned."""

    def finish(self) -> None:
        """Notify the other ranks that this rank has measured enough and is ending."""

    def is_finished(self) -> bool:
        """Return whether any rank has called `finish`."""


@dataclass(frozen=True)
class Rank:
    """The position of this process in its gang. A single process is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"  # torch's name for the device type: "cpu", or "cuda" for both CUDA and ROCm
    # The greatest common divisor of the nodes' rank counts: this many consecutive ranks always share a node.
    ranks_per_node: int = 1
    rendezvous: str = ""  # host:port on which rank 0 listens, the same for every trial of a gang
    sequence_number: int = 0  # differs between the trials of a gang, which share one rendezvous
    local_rank: int = 0  # the rank within its node
    node_rank: int = 0  # the node's index
    nodes: int = 1
    node_devices: str = ""  # the gang's devices on this node, as in CUDA_VISIBLE_DEVICES; empty on a CPU
    reporter: StepReporter | None = None  # for workloads with `reports_steps`; None without a driver
    timeout_s: float = math.inf  # then workloads with `reports_steps` raise TrialTimeout; the driver ends others
    clock_mhz: float = 0.0  # SM clock that cold-cache measurements wait for in the finals; 0 for none
    # Environment variables that are trial parameters. This process was started with these variables.
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The properties of a trial's devices that are known before the trial runs. None means unknown."""

    kind: str  # "cpu" or "gpu"
    architecture: str  # as in `workloads.api.recipes`: `sm90`, `gfx942`, `cpu bf16`
    world_size: int
    ranks_per_node: int
    memory_gib: float | None = None  # memory of one device that a trial can use
    cluster: Cluster = UNKNOWN_CLUSTER  # the trial's devices and links, for the planner's estimates


class BandEnds(NamedTuple):
    """How far an error band reaches below and above an estimate, as fractions of the estimate."""

    below: float
    above: float

    @property
    def half_width(self) -> float:
        return (self.below + self.above) / 2

    def __str__(self) -> str:
        return f"{self.below:.0%} below to {self.above:.0%} above"


@dataclass(frozen=True)
class Estimate:
    """The cost model's estimate of one point of the space."""

    unsupported_reason: str = ""  # why the point is not tried; empty if it is tried
    rule: str = ""  # the rule that excludes the point; many points may break the same rule
    # Estimated metrics under the names of the measured metrics, and `memory_gib` per device.
    metrics: Mapping[str, float] = field(default_factory=dict)
    description: str = ""  # the point in a few words


@dataclass(frozen=True)
class Energy:
    """The energy that a device drew during consecutive steps, including the time between them."""

    joules: float = 0.0  # drawn by this rank's device, or by all devices of the gang in a measurement `of_gang`
    seconds: float = 0.0  # from the start of the first step to the end of the last step
    steps: float = 0.0  # the number of steps, which need not be the timed steps
    source: Literal["counter", "power", ""] = ""  # the energy counter, or the mean of the sampled power times seconds
    missing: str = ""  # why energy is 0 above although the device reports power; empty if energy is known

    def __post_init__(self) -> None:
        if not self.missing and not all(0 < value < math.inf for value in (self.joules, self.seconds, self.steps)):
            raise ValueError(f"{self}: every value must be positive and finite, or `missing` says why there is none")


@dataclass(frozen=True)
class Candidate:
    """A point of a space with its estimate, or several points that one rule excludes."""

    point: dict[str, Scalar]  # values of the varying parameters; for several points, the values that break the rule
    estimate: Estimate
    count: int = 1  # the number of points


@dataclass(frozen=True)
class Measurement:
    """The raw measurement of one rank. Raises ValueError if the values yield no metric."""

    executed: Mapping[str, Scalar]  # parameters read back from the run; must equal the requested parameters
    step_times_s: tuple[float, ...]  # one time per timed step, warm-up excluded
    step_resolution_s: float = 0.0  # resolution of step times read from a log; 0 if measured
    sustained_step_times_s: tuple[float, ...] = ()  # one time per window of a back-to-back run, if requested
    independent: bool = False  # each rank measured its own device, and no rank waited for another
    of_gang: bool = False  # describes the whole gang; if several ranks have steps, the first rank counts
    is_rate: bool = False  # only a rate is known: each "step" represents a fixed number of tokens or samples
    unranked: str = ""  # why the trial's speed is not ranked, such as emulated arithmetic; empty if ranked
    baseline_step_times_s: tuple[float, ...] = ()  # one time per step of the baseline, interleaved with the steps
    bytes_per_step: float = 0.0  # bytes that one step must move through device memory
    statistic: str = "median"  # the step statistic that rates are computed from: one of `STATISTICS`
    flops_per_step: float = 0.0  # FLOPs that the model or GEMM needs on this rank, without recomputation and emulation
    hardware_flops_per_step: float = 0.0  # FLOPs that the device executes, recomputation included; 0 if the same
    tokens_per_step: int = 0  # tokens that this rank trains on in one step
    # The data type of the matrix units, which selects the peak for the MFU. If the units ran in several types, which
    # have no common peak, this is the recipe's name.
    matrix_dtype: str = ""
    energy: Energy | None = None  # None on a CPU, or if no driver reads the device
    # Further raw metrics; each name ends in its unit. Names in `workloads.api.metrics` are not allowed.
    metrics: Mapping[str, float] = field(default_factory=dict)
    machine_info: Mapping[str, Scalar] = field(default_factory=dict)  # device and software, as read by the process
    files: Mapping[str, bytes] = field(default_factory=dict)  # further results, keyed by file name without a folder

    def __post_init__(self) -> None:
        if self.statistic not in STATISTICS:
            raise ValueError(f"statistic={self.statistic!r}: allowed are {', '.join(STATISTICS)}")
        for name in ("step_times_s", "sustained_step_times_s", "baseline_step_times_s"):
            times_s = getattr(self, name)
            if wrong := [time_s for time_s in times_s if not 0 < time_s < math.inf]:
                raise ValueError(f"{name} has {wrong[0]!r}: every step time must be positive and finite")
            if times_s and (shortest_s := min(times_s)) < MIN_STEP_TIME_S:
                raise ValueError(f"{name} has {shortest_s!r}: no timer resolves less than {MIN_STEP_TIME_S:g} s")
        for name in ("tokens_per_step", "flops_per_step", "hardware_flops_per_step", "bytes_per_step"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: it must be finite and not negative")
        # The two values may be summed in different orders.
        if 0 < self.hardware_flops_per_step < self.flops_per_step * (1 - 1e-9):
            raise ValueError(
                f"hardware_flops_per_step={self.hardware_flops_per_step:g} is less than flops_per_step="
                f"{self.flops_per_step:g}: the device executes at least what the model needs"
            )
        for name, value in self.metrics.items():
            if not isinstance(value, Real):
                raise ValueError(f"metrics[{name!r}] is {value!r}, which is not a number")
            if source := find_source(name):
                raise ValueError(f"metrics[{name!r}]: {name} is derived from {source}; report these")
        for name in self.files:
            if not is_file_name(name):
                raise ValueError(f"files[{name!r}]: must be the name of a file, without a folder")


class Workload:
    """One kind of trial. Subclass it, set `name`, `Parameters` and `benchmark_version`, and define `run` or `measure`.

    The module that defines a workload must not import torch, because the driver imports the module; `run` may import
    torch. By default, `run` calls `measure(parameters, rank)` in the submodule `module`.

    Attributes:
        name: the value of `workload.name` in the configuration.
        Parameters: a frozen dataclass of every parameter. A field's type gives its allowed values (`Literal` for
            choices); a field without a default is required. `field(metadata=…)` adds constraints: `min`, `max`
            (numbers), `file` (True: the path of an existing file; `.json`: a path only if it ends in .json),
            `host_memory` (True: GiB of node memory that Ray reserves for the process), `cpu_gib` (a function that
            returns the minimum GiB that a value needs without a GPU), `unsupported_reason` (a function of a value and
            an architecture that returns why the device does not support the value, or an empty string).
        Settings: a dataclass of the workload's own configuration section; None if the workload has no section.
        settings: the settings of this instance; see `with_settings`.
        work: names of the parameters that define what is computed. Results that differ in one of these parameters are
            never ranked, divided or plotted together, not even within one search.
        ways: names of the parameters that define how the work is computed or measured. Results that differ in these
            parameters may be ranked together. Any other parameter is part of the work if a sweep holds the parameter
            constant, and counts as "searched" if the sweep searches it.
        measures: the parts of a measurement beyond `step_times_s`, and the metrics that have a row in metrics.toml but
            no source, of a complete trial, separated by spaces. An objective that needs others is refused; empty if
            they are not known beforehand.
        benchmark_version: name and version of the measurement method. Results of different versions are not compared.
        module: the submodule that measures the workload and may import torch.
        min_world_size: the smallest number of ranks in a trial.
        max_world_size: the largest number of ranks in a trial; None for no limit.
        is_matmul_ceiling: whether the best rate is stored as the device's achieved matmul ceiling.
        exclusive: "node" if another trial on the same node would disturb the measurement.
        reports_steps: whether trials report steps (`Rank.reporter`), can be pruned, and stop themselves at the timeout.
        has_estimates: whether `estimate` is implemented; only supported points are tried, the most promising first.
        estimates_plans: whether estimates are only for plans, because trials plan with measured rates.
        runs_command: whether the settings are a command's settings, in the configuration section `command`.
        finalists: the number of best trials that the finals of one objective remeasure, unless `finals.top` is set; 0
            if a trial takes minutes, or if each point is a result in itself.
        finals_rounds: how often the finals measure each trial, unless `finals.rounds` is set.
        can_scale: whether `scale` is implemented; plans and reports then project the best point to more devices.
    """

    name: ClassVar[str] = ""
    Parameters: type[Any]
    Settings: ClassVar[type[Any] | None] = None
    settings: Any = None
    work: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    measures: ClassVar[str] = ""
    benchmark_version: ClassVar[str]
    module: ClassVar[str] = "run"
    min_world_size: ClassVar[int] = 1
    max_world_size: ClassVar[int | None] = 1
    is_matmul_ceiling: ClassVar[bool] = False
    exclusive: ClassVar[Literal["gpu", "node"]] = "gpu"
    reports_steps: ClassVar[bool] = False
    has_estimates: ClassVar[bool] = False
    estimates_plans: ClassVar[bool] = False
    can_scale: ClassVar[bool] = False
    runs_command: ClassVar[bool] = False
    finalists: ClassVar[int] = 3
    finals_rounds: ClassVar[int] = 5

    def run(self, parameters: Any, rank: Rank) -> Measurement:
        """Run one trial with `measure` from `module`. May raise Infeasible; any other exception fails the trial."""
        measurement: Measurement = import_module(f"{type(self).__module__}.{self.module}").measure(parameters, rank)
        return measurement

    def recorded_parameters(self, parameters: Any) -> Mapping[str, Scalar]:
        """Return the values to record with every result of these parameters, defaults included.

        `work` and `ways` contain the names of these values. Override this method to omit parameters that have no
        effect, given the others, or to add settings that define what is computed.
        """
        return {item.name: getattr(parameters, item.name) for item in fields(parameters)}

    def with_settings(self, settings: Any) -> Workload:
        """Return the workload with these settings, an instance of `Settings`."""
        raise NotImplementedError

    def estimate(self, parameters: Any, machine: Machine) -> Estimate:
        raise NotImplementedError

    def find_band(self, parameters: Any, machine: Machine) -> tuple[BandEnds, str]:
        """Return the error band of estimated rates, and the band's basis."""
        raise NotImplementedError

    def list_candidates(
        self, dimensions: Mapping[str, Sequence[Scalar]], constants: Mapping[str, Scalar], machine: Machine
    ) -> Iterator[Candidate]:
        """Yield every point of a space with its estimate. Override this method if one rule excludes many points."""
        for values in product(*dimensions.values()):
            point = dict(zip(dimensions, values, strict=True))
            yield Candidate(point, self.estimate(self.Parameters(**constants, **point), machine))

    def try_out(self, parameters: Any) -> tuple[str, Measurement]:
        """Run a program for its first steps. Return a description and the measurement. Raises ProgramFailed."""
        raise NotImplementedError

    def preview(self, parameters: Any, machine: Machine) -> str:
        """Return the lines that plan=true shows for one point in addition to its estimate."""
        return ""

    def program_files(self, parameters: Any, rank: Rank, folder: str) -> Mapping[str, str]:
        """Return files, keyed by name, that run these parameters without this project. They will be in `folder`."""
        return {}

    def scale(self, parameters: Any, factor: int) -> Any:
        """Return the parameters for `factor` times the devices, with the batch scaled by the same factor."""
        raise NotImplementedError
