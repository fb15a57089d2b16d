"""The schema of what may be said. Hydra composes it, this module is the only one that reads it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from hydra.core.override_parser.types import ChoiceSweep
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sweeper.common.errors import UserInputError, build, check_bounds, convert, nearest
from sweeper.common.secrets import is_secret
from sweeper.config import space as spaces
from workloads.api import host, registry
from workloads.api.contract import Workload

CONF = Path(__file__).resolve().parent.parent / "conf"


@dataclass(frozen=True)
class WorkloadChoice:
    name: str
    objective: str
    direction: Literal["maximize", "minimize"] = "maximize"


@dataclass(frozen=True)
class Hardware:
    """A kind of device. Peaks are dense TFLOP/s by data type, of one device; what is not published is not there.

    link_gb_s: of one device to the others of its node (NVLink, Infinity Fabric), each way
    """

    name: str
    kind: Literal["cpu", "gpu"] = "gpu"
    architecture: str | None = None
    accelerators: list[str] = field(default_factory=list)
    device_names: list[str] = field(default_factory=list)
    dense_peak_tflops: dict[str, float] = field(default_factory=dict)
    memory_gb: float | None = None
    bandwidth_tb_s: float | None = None
    link_gb_s: float | None = None
    power_w: float | None = None
    source: str | None = None


@dataclass(frozen=True)
class Search:
    sampler: Literal["tpe", "gp", "cmaes", "qmc", "random", "grid"]
    pruner: Literal["none", "median"] = "none"


@dataclass(frozen=True)
class Budget:
    trials: int | None = field(default=None, metadata={"min": 1})
    time_s: float | None = field(default=None, metadata={"min": 0.001})
    patience: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True)
class Finals:
    top: int = field(metadata={"min": 0})
    rounds: int = field(metadata={"min": 2})


@dataclass(frozen=True)
class TrialLimits:
    timeout_s: float = field(metadata={"min": 0.001})
    retries: int = field(metadata={"min": 0})
    grace_s: float = field(metadata={"min": 0})


@dataclass(frozen=True)
class ClusterChoice:
    address: str | None = None
    insecure: bool = False
    network_gb_s: float = field(default=50.0, metadata={"min": 0.001})
    workers: int | None = field(default=None, metadata={"min": 1})
    set_aside_below: float | None = field(default=0.9, metadata={"min": 0, "max": 1})


@dataclass(frozen=True)
class Tracking:
    experiment: str
    uri: str | None = None


@dataclass(frozen=True)
class StrategyRow:
    """A fixed layout, for one vendor's GPUs and one model."""

    vendor: str
    model: str
    space: dict[str, Any]


@dataclass(frozen=True)
class Config:
    workload: WorkloadChoice
    space: dict[str, Any]
    hardware: Hardware
    search: Search
    budget: Budget
    finals: Finals
    trial: TrialLimits
    cluster: ClusterChoice
    tracking: Tracking
    dir: str
    first: Any = None
    command: dict[str, Any] | None = None
    strategy: list[dict[str, Any]] | None = None
    name: str | None = None
    exclusive: Literal["gpu", "node"] | None = None
    gpus: int | Literal["all"] = field(default=1, metadata={"min": 1})
    seed: int = field(default=0, metadata={"min": 0, "max": 2**32 - 1})
    progress: Literal["auto", "always", "never", "json"] = "auto"
    plan: bool = False
    nodes: Any = None
    price_per_hour: float | None = field(default=None, metadata={"min": 0})


def read(composed: DictConfig) -> Config:
    """The checked configuration. Raises SaidWrongly for whatever can be seen to be wrong without a device."""
    try:
        plain = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserInputError(f"{error.full_key or 'the configuration'}: {first_line(error)}") from error
    assert isinstance(plain, dict)
    config = build(Config, {str(key): value for key, value in plain.items()})
    if config.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name):
        raise UserInputError(f"name={config.name}: letters, digits, '.', '_' and '-', starting with a letter or digit")
    if config.workload.name not in registry.names():
        raise UserInputError(f"workload.name={config.workload.name}: {nearest(config.workload.name, registry.names())}")
    check_gpus(config, config.gpus if isinstance(config.gpus, int) else 1)
    if config.budget.trials is None and config.budget.time_s is None and config.budget.patience is None:
        raise UserInputError("budget: trials, time_s and patience are all null; the sweep would never end")
    return config


def workload_of(config: Config) -> Workload:
    """The workload, with the settings that its section of the configuration has, if it has one."""
    found = registry.load(config.workload.name)
    if found.Settings is None:
        if config.command is not None:
            raise UserInputError(f"command: {config.workload.name} runs no command; workload=command does")
        return found
    given = dict(config.command or {})
    given["directory"] = str(Path(given.get("directory", ".")).expanduser().resolve())
    return found.with_settings(build(found.Settings, given, "command."))


def settings_of(config: Config) -> dict[str, Any] | None:
    """The same settings as plain values."""
    settings = workload_of(config).settings
    return None if settings is None else asdict(settings)


def is_on_this_machine(config: Config) -> bool:
    """Whether trials run here, and not on a cluster, whose nodes may have other files."""
    return (config.cluster.address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def check_program(config: Config) -> None:
    """Raises SaidWrongly for a command that this machine does not have, where it is to run here."""
    settings = settings_of(config)
    if settings is None or config.plan or not is_on_this_machine(config):
        return
    directory, run = Path(settings["directory"]), settings["run"]
    if not directory.is_dir():
        raise UserInputError(f"command.directory={directory}: there is no such directory")
    if isinstance(run, str) or "{" in run[0] or "PATH" in settings["environment"]:
        return  # for a shell, or known once its values are
    if not (shutil.which(run[0]) or ("/" in run[0] and (directory / run[0]).exists())):
        raise UserInputError(f"command.run: {run[0]}: there is no such program")


def check_gpus(config: Config, gpus: int) -> None:
    """Raises SaidWrongly for more GPUs than a trial of this workload spans."""
    most = workload_of(config).max_world_size
    if most is not None and gpus > most:
        raise UserInputError(f"gpus={config.gpus}: a trial of {config.workload.name} spans {most} at most")


def read_space(config: Config, kind: str, architecture: str | None) -> tuple[spaces.Space, list[str]]:
    """The space for a device of `kind`, every value that it can give one that its parameter may have.

    With it, what was left out of a choice because a device of this architecture cannot do it, and why.
    """
    space = spaces.parse(config.space, kind)
    workload = workload_of(config)
    hints = get_type_hints(workload.Parameters)
    known = {f.name: f for f in fields(workload.Parameters)}
    for name in (*space.constants, *space.dimensions):
        if is_secret(name):
            raise UserInputError(
                f"space.{name}: looks like a secret, and parameters are kept; say it in the environment"
            )
        if name not in known:
            if config.command is None:
                raise UserInputError(f"space.{name}: there is no such parameter; {nearest(name, known)}")
            raise UserInputError(f"space.{name}: the command has no {{{name}}}; {nearest(name, known)}")
        if known[name].metadata.get("file") and is_on_this_machine(config):
            varied = space.dimensions.get(name)
            paths = varied.values if isinstance(varied, spaces.Choice) else (space.constants.get(name),)
            if missing := [value for value in paths if isinstance(value, str) and not Path(value).exists()]:
                raise UserInputError(f"space.{name}={missing[0]}: there is no such file")
    dimensions = {
        name: _of_kind(f"space.{name}", dimension, hints[name], known[name].metadata)
        for name, dimension in space.dimensions.items()
    }
    somewhere = {name: next(iter(_extremes(dimension))) for name, dimension in dimensions.items()}
    whole = build(workload.Parameters, {**space.constants, **somewhere}, "space.")
    constants = {name: getattr(whole, name) for name in space.constants}
    excluded = list[str]()
    for name in [name for name in known if "unsupported_reason" in known[name].metadata and architecture]:
        asked = dimensions.get(name, spaces.Choice((getattr(whole, name),)))
        assert isinstance(asked, spaces.Choice)
        why = {value: known[name].metadata["unsupported_reason"](value, architecture) for value in asked.values}
        words = [f"space.{name}={value} is {reason}" for value, reason in why.items() if reason]
        can = tuple(value for value, reason in why.items() if not reason)
        if not can:
            raise UserInputError("; ".join(words))
        excluded += words
        if words:
            del dimensions[name]
            if len(can) > 1:
                dimensions[name] = spaces.Choice(can)
            else:
                constants[name] = can[0]
    return spaces.Space(dimensions, constants), excluded


def check_processor(config: Config, space: spaces.Space) -> None:
    """Raises SaidWrongly where this machine, without a GPU, is too small for all values of a parameter."""
    if not is_on_this_machine(config):
        return
    memory_gib, parameters = host.memory_bytes() / 2**30, workload_of(config).Parameters
    hints = get_type_hints(parameters)
    for each in [each for each in fields(parameters) if "cpu_gib" in each.metadata]:
        dimension = space.dimensions.get(each.name)
        values = _extremes(dimension) if dimension else [space.constants.get(each.name, each.default)]
        least, value = min((each.metadata["cpu_gib"](value), value) for value in values)
        if least > memory_gib:
            fitting = [name for name in get_args(hints[each.name]) if each.metadata["cpu_gib"](name) <= memory_gib]
            raise UserInputError(
                f"space.{each.name}={value}: takes {least:.1f} GiB, and without a GPU there are {memory_gib:.1f} here; "
                f"it may be {', '.join(fitting)}"
            )


def host_gib(config: Config, space: spaces.Space) -> float:
    """The most of its node's memory that a process of a trial may take, by what its parameters say."""
    found = 0.0
    for each in fields(workload_of(config).Parameters):
        if each.metadata.get("host_memory"):
            dimension = space.dimensions.get(each.name)
            values = _extremes(dimension) if dimension else [space.constants.get(each.name, each.default)]
            found += max(float(value) for value in values if isinstance(value, (int, float)))
    return found


def _of_kind(full: str, dimension: spaces.Dimension, hint: Any, bounds: Mapping[str, Any]) -> spaces.Dimension:
    """The dimension with each value as its parameter takes it. Raises SaidWrongly where it cannot."""
    for value in _extremes(dimension):
        check_bounds(convert(hint, value, full), bounds, full)
    if isinstance(dimension, spaces.Choice):
        return spaces.Choice(tuple(convert(hint, value, full) for value in dimension.values))
    if hint in (int, int | None):
        if isinstance(dimension, spaces.Interval):
            raise UserInputError(f"{full}={dimension}: a whole number needs a range or a choice")
        low, high, step = (convert(int, x, full) for x in (dimension.low, dimension.high, dimension.step))
        return spaces.Range(low, high, step, dimension.log)
    return dimension


def _extremes(dimension: spaces.Dimension) -> Sequence[spaces.Value]:
    return dimension.values if isinstance(dimension, spaces.Choice) else (dimension.low, dimension.high)


def read_first(config: Config, space: spaces.Space, kind: str, *, meant: bool) -> list[spaces.Parameters]:
    """The points to try first, those that the space leaves out passed over, or where they are meant refused."""
    listed = spaces.for_kind(config.first, kind, "first") or []
    if isinstance(listed, str):
        listed = spaces.parse_text("first", listed)
    if not isinstance(listed, list) or not all(isinstance(point, dict) for point in listed):
        raise UserInputError(
            "first: a list of points, each a mapping of parameters: first=[{m: 4096, n: 4096, k: 4096}]"
        )
    hints = get_type_hints(workload_of(config).Parameters)
    for point in listed:
        for name, value in point.items():
            if name not in hints:
                raise UserInputError(f"first: {name} is no parameter; {nearest(name, hints)}")
            convert(hints[name], value, f"first.{name}")
    inside = [point for point in listed if point in space]
    if meant and len(inside) < len(listed):
        outside = next(point for point in listed if point not in space)
        name, value = next((n, v) for n, v in outside.items() if {n: v} not in space)
        raise UserInputError(
            f"first: {name}={value} is not in the space; space.{name} is {space.described().get(name)}"
        )
    varying = [{name: value for name, value in point.items() if name in space.dimensions} for point in inside]
    return [point for point in varying if point]


def with_strategy(config: Config, kind: str, architecture: str | None) -> Config:
    """With the layout that a named strategy has for this vendor's GPUs and this model, and nothing else of its kind.

    Raises SaidWrongly where it has none.
    """
    if config.strategy is None:
        return config
    vendor = "amd" if (architecture or "").startswith("gfx") else "nvidia"  # on a processor: as good as any
    model = spaces.parse(config.space, kind).constants.get("model") or (config.command or {}).get("model")
    listed = [StrategyRow(**row) for row in config.strategy]
    row = next((row for row in listed if (row.vendor, row.model) == (vendor, model)), None)
    if row is None:
        known = ", ".join(sorted({row.model for row in listed if row.vendor == vendor}))
        here = f"on {vendor}" if kind == "gpu" else "anywhere"
        raise UserInputError(f"strategy: has nothing for model {model} {here}; it has {known}")
    fixed = {"replicate": 1, "context": 1, "stages": 1, "schedule": "1f1b", **row.space}
    has = {f.name for f in fields(workload_of(config).Parameters)}
    return replace(config, space={**config.space, **{name: v for name, v in fixed.items() if name in has}})


def read_nodes(config: Config) -> list[int]:
    """How many nodes a plan is projected to; none where that was not asked."""
    listed = config.nodes
    if isinstance(listed, str):
        listed = spaces.parse_text("nodes", listed)
        listed = listed.list if isinstance(listed, ChoiceSweep) else listed
    listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if not all(isinstance(count, int) and count > 0 for count in listed):
        raise UserInputError(f"nodes={config.nodes}: numbers of nodes, such as nodes=1,2,4,8")
    return listed


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
