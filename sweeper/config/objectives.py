"""The objectives and limits of a configuration: their forms on the command line, and the criteria that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sweeper.config.schema import Config
from sweeper.metrics.criteria import DIRECTIONS, MAX_OBJECTIVES, Criteria
from workloads.api.errors import UserInputError, nearest
from workloads.api.metrics import METRICS


def split_objectives(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the leading objective in `workload`, and several also in `objective`.

    The key `objective` is short for `workload.objective`. Both take one metric or a list.

    Raises:
        UserInputError: a list is empty, too long or repeats a metric, or a metric has no direction.
    """
    section = entries.get("workload")
    if not isinstance(section, Mapping):
        return dict(entries)
    key = "workload.objective" if entries.get("objective") is None else "objective"
    value = section.get("objective") if key == "workload.objective" else entries["objective"]
    if key == "workload.objective" and not isinstance(value, list):
        return {**entries, "objective": None}
    names = _check_names(key, value if isinstance(value, list) else [value])
    directions = [_direction_of(key, name) for name in names]
    workload = {**section, "objective": names[0], "direction": directions[0]}
    return {**entries, "workload": workload, "objective": names if len(names) > 1 else None}


def _check_names(key: str, names: list[Any]) -> list[str]:
    text = f"{key}=[{','.join(map(str, names))}]"
    if not names or len(names) > MAX_OBJECTIVES:
        raise UserInputError(f"{text}: must name one to {MAX_OBJECTIVES} metrics")
    if not all(isinstance(name, str) for name in names):
        raise UserInputError(f"{text}: must be names of metrics")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserInputError(f"{text}: names {repeated[0]} twice")
    return names


def _direction_of(key: str, name: str) -> str:
    """Return how a metric is better.

    Raises:
        UserInputError: it is unknown, or neither more nor less of it is better.
    """
    if name in DIRECTIONS:
        return DIRECTIONS[name]
    if name in METRICS:
        raise UserInputError(f"{key}: {name} has no direction. Available: {', '.join(DIRECTIONS)}.")
    own = "" if key.startswith("limits.") else "; for one of your own set workload.objective= and workload.direction="
    close = nearest(name, DIRECTIONS)
    hint = f"Did you mean {close}?" if close else f"Available: {', '.join(DIRECTIONS)}."
    raise UserInputError(f"{key}: unknown metric {name}{own}. {hint}")


def read_criteria(config: Config) -> Criteria:
    """Return what ranks the trials.

    Raises:
        UserInputError: a limit's metric has no direction, or the sampler or pruner takes one objective only.
    """
    section = config.workload
    objectives = {section.objective: section.direction}
    objectives |= {name: DIRECTIONS[name] for name in config.objective or () if name != section.objective}
    limits = {}
    for name, bound in config.limits.items():
        _direction_of(f"limits.{name}", str(name))
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not math.isfinite(bound):
            raise UserInputError(f"limits.{name}={bound}: must be a number or null")
        limits[str(name)] = float(bound)
    criteria = Criteria.of(objectives, limits)
    _check_search(config, criteria)
    return criteria


def _check_search(config: Config, criteria: Criteria) -> None:
    names = f"objective=[{','.join(criteria.metrics)}]"
    if criteria.has_front and config.search.pruner != "none":
        raise UserInputError(f"search.pruner={config.search.pruner}: compares one objective; use none with {names}")
    if config.search.sampler == "cmaes" and (criteria.has_front or criteria.limits):
        what = f"takes one objective; with {names}" if criteria.has_front else "does not learn from limits;"
        raise UserInputError(f"search=cmaes: {what} use tpe, gp or nsga2")
