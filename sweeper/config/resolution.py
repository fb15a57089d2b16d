"""Turn a composed Hydra configuration into one immutable object. No other module reads the configuration."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sweeper.config.schema import Config, Direction
from sweeper.config.space import parse_text
from sweeper.metrics.criteria import DIRECTIONS, MAX_OBJECTIVES, Criteria
from workloads.api import registry
from workloads.api.contract import Workload
from workloads.api.errors import UserInputError, first_line
from workloads.api.metrics import METRICS, Need
from workloads.api.recipes import is_architecture
from workloads.api.validation import build, convert
from workloads.suggestions import hint

RUN_SCRIPT = re.compile(r"(?:\{python\}|(?:\S*/)?(?:python[\d.]*|sh|bash)) ([\w./-]+\.(?:py|sh))(?= |$)")
# `conf` is inside the package if it is installed, and next to the package in the repository.
PACKAGE = Path(__file__).resolve().parent.parent
CONF = next((path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if path.is_dir()), PACKAGE / "conf")


@dataclass(frozen=True)
class ResolvedConfig:
    config: Config
    workload: Workload  # includes the workload's settings
    criteria: Criteria  # objectives and limits, which rank the trials
    projection_nodes: list[int]  # numbers of nodes for projecting the best point; may be empty

    @cached_property
    def settings(self) -> dict[str, Any] | None:
        """The command's settings as plain values, or None if the workload is not a command."""
        return self.worker_settings if self.workload.runs_command else None

    @cached_property
    def worker_settings(self) -> dict[str, Any] | None:
        """The settings from which a worker builds the workload, or None if the workload has no settings."""
        return None if self.workload.settings is None else asdict(self.workload.settings)

    @property
    def is_local(self) -> bool:
        """Whether trials run on this machine, not on a cluster with nodes that may have different files."""
        return (self.config.cluster.address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def list_program_files(settings: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a command that are files, as written."""
    run, files = settings["run"], []
    for word in run.split() if isinstance(run, str) else run:
        with suppress(OSError):  # an argument may be a whole program, too long for a file name
            if word and Path(settings["directory"], word).is_file():
                files.append(word)
    return files


def resolve(composed: DictConfig, workload: Workload | None = None) -> ResolvedConfig:
    """Check a composed configuration and load the workload. Raises UserInputError if no device can run it."""
    try:
        if OmegaConf.select(composed, "workload.name") is None:
            raise UserInputError(f"workload.name: required. Available: {', '.join(registry.names())}")
        if missing := sorted(OmegaConf.missing_keys(composed)):  # ??? in YAML
            raise UserInputError(f"{missing[0]}: required; set {missing[0]}=…")
        values: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserInputError(f"{error.full_key or 'configuration'}: {first_line(error)}") from error
    values = {str(key): value for key, value in values.items()}
    config = build(Config, _add_finals(_split_objectives(values)))
    _check_rules(config)
    criteria = _read_criteria(config)
    workload = _load_workload(config) if workload is None else workload
    pruner, name = config.search.pruner, config.workload.name
    if pruner != "none" and not workload.reports_steps:
        remedy = "give it a parameter report, or use none" if name == "function" else "use none"
        raise UserInputError(f"search.pruner={pruner}: {name} reports no steps while it runs; {remedy}")
    nodes = config.projection.nodes
    if isinstance(nodes, str):
        nodes = parse_text("projection.nodes", nodes)
        nodes = nodes.list if isinstance(nodes, ChoiceSweep) else nodes
    nodes = [] if nodes is None else nodes if isinstance(nodes, list) else [nodes]
    if not all(isinstance(count, int) and count > 0 for count in nodes):
        listed = ",".join(map(str, nodes))
        raise UserInputError(f"projection.nodes={listed}: must be numbers of nodes: projection.nodes=1,2,4,8")
    return ResolvedConfig(config, workload, criteria, nodes)


def _add_finals(entries: dict[str, Any]) -> dict[str, Any]:
    finals, section = entries.get("finals"), entries.get("workload")
    if not isinstance(finals, Mapping) or not isinstance(section, Mapping):
        return entries
    name = section.get("name")
    workload = registry.load(name) if name in registry.names() else Workload  # an unknown name is rejected later
    top = workload.finalists or (Workload.finalists if entries.get("objective") else 0)
    defaults = {"top": top, "rounds": workload.finals_rounds}
    chosen = {key: defaults.get(key) if value is None else value for key, value in finals.items()}
    return {**entries, "finals": chosen}


def _check_rules(config: Config) -> None:
    tracking, budget = config.tracking, config.budget
    texts = {"dir": config.dir, "cluster.address": config.cluster.address, "tracking.uri": tracking.uri}
    for key, text in {**texts, "tracking.experiment": tracking.experiment}.items():
        if text == "":  # as with tracking.uri=$UNSET
            raise UserInputError(f"{key}=: must not be empty")
    if config.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name):
        allowed = "letters, digits, '.', '_' and '-', starting with a letter or digit"
        raise UserInputError(f"name={config.name}: allowed are {allowed}")
    name = config.workload.name
    if name not in registry.names():
        raise UserInputError(f"workload.name={name}: {registry.unknown_reason(name)}")
    architecture = config.hardware.architecture
    if architecture is not None and not is_architecture(architecture):
        raise UserInputError(f"hardware.architecture={architecture}: must have the form of sm90, gfx942 or cpu")
    if all(limit is None for limit in (budget.trials, budget.time_s, budget.patience, budget.gpu_hours, budget.cost)):
        limits = "trials, time_s, patience, gpu_hours and cost"
        raise UserInputError(f"budget: {limits} are all null; the sweep would never end")
    if budget.cost is not None and not config.price_per_hour:
        remedy = "set price_per_hour=, or use budget.gpu_hours"
        raise UserInputError(f"budget.cost={budget.cost:g}: the price of a GPU is unknown; {remedy}")


def _load_workload(config: Config) -> Workload:
    workload = registry.load(config.workload.name)
    if workload.Settings is None:
        if config.command is not None:
            raise UserInputError(f"command: {config.workload.name} runs no command; use workload=command")
    elif not workload.runs_command:
        call = "sweeper.run(workload=my_function, space={…})"
        raise UserInputError(f"workload.name={workload.name}: is run from Python: {call}")
    else:
        settings = dict(config.command or {})
        directory = convert(str, settings.get("directory", "."), "command.directory")
        settings["directory"] = str(Path(directory).expanduser().resolve())
        workload = workload.with_settings(build(workload.Settings, settings, "command."))
    if isinstance(config.gpus, int):
        check_world_size(workload, config, config.gpus)
    return workload


def check_world_size(workload: Workload, config: Config, gpus: int) -> None:
    """Raise UserInputError if a trial of the workload cannot run on `gpus` GPUs: too few or too many."""
    name, fewest, limit = config.workload.name, workload.min_world_size, workload.max_world_size
    trial = f"gpus={config.gpus}: a trial of {name}"
    if gpus < fewest:
        raise UserInputError(f"{trial} needs at least {fewest}; set gpus={fewest} or more")
    if limit is not None and gpus > limit:
        raise UserInputError(f"{trial} spans at most {limit}")


def check_program(resolved: ResolvedConfig) -> None:
    """Raise UserInputError if plan=run has no program to run, or a local command's program or directory is missing."""
    settings = resolved.settings
    if settings is None and resolved.config.plan == "run":
        raise UserInputError(f"plan=run: {resolved.config.workload.name} runs no program; use plan=true")
    if settings is None or resolved.config.plan is True or not resolved.is_local:
        return
    directory, run = Path(settings["directory"]), settings["run"]
    if not directory.is_dir():
        raise UserInputError(f"command.directory={directory}: no such directory")
    script = RUN_SCRIPT.match(run if isinstance(run, str) else " ".join(run))
    if script and not (path := directory / script[1]).exists():
        raise UserInputError(f"command.run: {path}: no such file")
    if isinstance(run, str) or "{" in run[0] or "PATH" in settings["environment"]:
        return  # the shell finds the program, or the program's name depends on parameters
    if not (shutil.which(run[0]) or ("/" in run[0] and (directory / run[0]).exists())):
        raise UserInputError(f"command.run: {run[0]}: no such program")


def _split_objectives(entries: dict[str, Any]) -> dict[str, Any]:
    """Put the leading objective in `workload`, and a list of several objectives in `objective`. The user may set
    `objective` or `workload.objective`, to one metric or to a list."""
    section = entries.get("workload")
    if not isinstance(section, Mapping):
        return entries
    key = "workload.objective" if entries.get("objective") is None else "objective"
    value = section.get("objective") if key == "workload.objective" else entries["objective"]
    own = _read_own_metrics(entries.get("metrics"))
    if key == "workload.objective" and not isinstance(value, list):
        known, direction = DIRECTIONS.get(str(value)), {"direction": own[value]} if value in own else {}
        if {known, section.get("direction")} == {"maximize", "minimize"}:  # perhaps of the preset's objective
            stated = f"workload.direction={section['direction']} with workload.objective={value}"
            raise UserInputError(f"{stated}: the direction of {value} is {known}. Write objective={value}")
        return {**entries, "workload": {**section, **direction}, "objective": None}
    names: list[Any] = value if isinstance(value, list) else [value]
    text = f"{key}=[{','.join(map(str, names))}]"
    if not names or len(names) > MAX_OBJECTIVES:
        raise UserInputError(f"{text}: must name one to {MAX_OBJECTIVES} metrics")
    if not all(isinstance(name, str) for name in names):
        raise UserInputError(f"{text}: must be names of metrics")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserInputError(f"{text}: names {repeated[0]} twice")
    directions = [_direction_of(key, name, own) for name in names]
    workload = {**section, "objective": names[0], "direction": directions[0]}
    return {**entries, "workload": workload, "objective": names if len(names) > 1 else None}


def _read_own_metrics(values: Any) -> dict[str, str]:
    """Return the directions of the user's metrics. Raises UserInputError if any is invalid or contradicts ours."""
    own = values if isinstance(values, Mapping) else {}  # the schema rejects a string
    for name, direction in own.items():
        if name in DIRECTIONS and direction != DIRECTIONS[name]:
            own_is = f"not a metric of your own; its direction is {DIRECTIONS[name]}"
            raise UserInputError(f"metrics.{name}={direction}: {own_is}")
    return {str(name): convert(Direction, direction, f"metrics.{name}") for name, direction in own.items()}


def _direction_of(key: str, name: str, own: dict[str, str]) -> str:
    directions = DIRECTIONS | own
    if name in METRICS and METRICS[name].unranked:
        raise UserInputError(f"{key}: {name} {METRICS[name].unranked}")
    if name in directions:
        return directions[name]
    what = f"{name} has no direction" if name in METRICS else f"unknown metric {name}"
    close = "" if name in METRICS else hint(name, directions)
    of_gpus = [known for known in DIRECTIONS if METRICS[known].needs in (Need.GPU, Need.ENERGY)]
    anywhere = ", ".join(known for known in directions if known not in of_gpus)
    listed = close or f" Available: {anywhere}; on GPUs also {', '.join(of_gpus)}."
    raise UserInputError(f"{key}: {what}; declare your own by metrics.{name}=minimize or maximize.{listed}")


def _read_criteria(config: Config) -> Criteria:
    section, search = config.workload, config.search
    objectives = {section.objective: section.direction}
    own = _read_own_metrics(config.metrics)
    objectives |= {name: (DIRECTIONS | own)[name] for name in config.objective or () if name != section.objective}
    limits = {}
    for name, bound in config.limits.items():
        direction = _direction_of(f"limits.{name}", str(name), own)
        if bound is None:
            continue
        limits[str(name)] = [convert(float, bound, f"limits.{name}"), direction]
    criteria = Criteria.of(objectives, limits)
    for limit in criteria.limits:
        if problem := limit.describe_problem():
            raise UserInputError(f"limits.{limit.metric}={limit.bound:g}: {problem}")
    names = f"objective=[{','.join(criteria.metrics)}]"
    if criteria.has_front and search.pruner != "none":
        raise UserInputError(f"search.pruner={search.pruner}: compares one objective; use none with {names}")
    if search.sampler == "cmaes" and (criteria.has_front or limits):
        what = f"takes one objective; with {names}" if criteria.has_front else "does not learn from limits;"
        raise UserInputError(f"search=cmaes: {what} use tpe, gp or nsga2")
    return criteria
