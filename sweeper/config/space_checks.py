"""Check a sweep's search space against the workload's parameters and the device."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sweeper.config import environment
from sweeper.config import space as spaces
from sweeper.config.device_values import apply_defaults
from sweeper.config.hardware import Target
from sweeper.config.resolution import ResolvedConfig
from sweeper.config.space import Choice, Dimension, Interval, Parameters, Range, Space, Value
from workloads.api import host
from workloads.api.contract import is_path
from workloads.api.errors import UserInputError
from workloads.api.secrets import is_secret
from workloads.api.validation import build, check_bounds, check_known, convert

SHOWN_PROBLEMS = 5
POINTS = 5  # tried by a warm start; the first points gain most because they differ in the parameters that matter


def check_space(resolved: ResolvedConfig, target: Target) -> tuple[Space, list[str], dict[str, str]]:
    """Return the space with the devices' variables, the excluded values, and where each variable was set."""
    space, excluded = read_space(resolved, target.hardware.kind, target.architecture)
    space, sources = apply_defaults(space, target)
    if target.is_gpu or not resolved.is_local:
        return space, excluded, sources
    # This machine needs enough memory for the smallest value of each parameter.
    memory_gib, parameters = host.memory_bytes() / 2**30, resolved.workload.Parameters
    hints = get_type_hints(parameters)
    for parameter in [field for field in fields(parameters) if "cpu_gib" in field.metadata]:
        needed_gib = parameter.metadata["cpu_gib"]
        least_gib, value = min((needed_gib(value), value) for value in _possible_values(space, parameter))
        if least_gib > memory_gib:
            fitting = [choice for choice in get_args(hints[parameter.name]) if needed_gib(choice) <= memory_gib]
            has = f"without a GPU this machine has {memory_gib:.1f} GiB. Fitting: {', '.join(fitting)}"
            raise UserInputError(f"space.{parameter.name}={value}: needs {least_gib:.1f} GiB, and {has}")
    return space, excluded, sources


def read_space(resolved: ResolvedConfig, kind: str, architecture: str | None) -> tuple[Space, list[str]]:
    """Return the space for a device of `kind` ("cpu" or "gpu"), and the values that the architecture does not support.

    Raises UserInputError for unknown parameters and illegal values, with a line for each, or for a parameter without
    any supported value.
    """
    whole_space = spaces.parse(resolved.config.space, kind)
    variables = _read_variables(resolved, whole_space)
    constants = environment.without_variables(whole_space.constants)
    space = Space(environment.without_variables(whole_space.dimensions), constants)
    parameters = resolved.workload.Parameters
    hints, known = get_type_hints(parameters), {field.name: field for field in fields(parameters)}
    dimensions, problems = dict[str, Dimension](), list[str]()
    for name in (*space.constants, *space.dimensions):
        dimension = space.dimensions.get(name, Choice((space.constants.get(name),)))
        try:
            _check_parameter(resolved, space, name, known)
            dimensions[name] = _convert_dimension(f"space.{name}", dimension, hints[name], known[name].metadata)
        except UserInputError as error:
            problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
        raise UserInputError("\n".join(problems[:SHOWN_PROBLEMS] + more))
    dimensions = {name: dimensions[name] for name in space.dimensions}
    any_point = {name: _extremes(dimension)[0] for name, dimension in dimensions.items()}
    whole = build(parameters, {**space.constants, **any_point}, "space.")
    constants = {name: getattr(whole, name) for name in space.constants}
    excluded = list[str]()
    for name in [name for name in known if "unsupported_reason" in known[name].metadata and architecture]:
        requested = dimensions.get(name, Choice((getattr(whole, name),)))
        assert isinstance(requested, Choice)
        unsupported_reason = known[name].metadata["unsupported_reason"]
        reasons = {value: unsupported_reason(value, architecture) for value in requested.values}
        supported = tuple(value for value, reason in reasons.items() if not reason)
        lines = [f"space.{name}={value} is {reason}" for value, reason in reasons.items() if reason]
        if not supported:
            raise UserInputError("; ".join(lines))
        if lines:
            excluded += lines
            del dimensions[name]
            if len(supported) > 1:
                dimensions[name] = Choice(supported)
            else:
                constants[name] = supported[0]
    # Variables come first: a grid changes the first parameter least often, and a new environment needs new workers.
    return Space(variables.dimensions | dimensions, variables.constants | constants), excluded


def _read_variables(resolved: ResolvedConfig, space: Space) -> Space:
    variables = Space(environment.only_variables(space.dimensions), environment.only_variables(space.constants))
    set_by_command = (resolved.settings or {}).get("environment", {})
    values: dict[str, Sequence[Value]] = {name: [value] for name, value in variables.constants.items()}
    values |= {name: _extremes(dimension) for name, dimension in variables.dimensions.items()}
    for name, possible in values.items():
        variable = name.removeprefix(environment.PREFIX)
        environment.check_name(variable)
        environment.check_values(variable, possible)
        if variable in set_by_command:
            raise UserInputError(f"space.{name}: command.environment.{variable} sets it too; remove one of them")
    return variables


def _check_parameter(resolved: ResolvedConfig, space: Space, name: str, known: Mapping[str, Field[Any]]) -> None:
    if is_secret(name):
        raise UserInputError(f"space.{name}: looks like a secret, and parameters are recorded; use the environment")
    what = "unknown parameter" if resolved.settings is None else f"the command has no {{{name}}}"
    check_known(name, known, f"space.{name}: {what}")
    if resolved.is_local:
        dimension = space.dimensions.get(name)
        paths = dimension.values if isinstance(dimension, Choice) else (space.constants.get(name),)
        missing = [path for path in paths if is_path(path, known[name]) and not Path(str(path)).exists()]
        if missing:
            raise UserInputError(f"space.{name}={missing[0]}: no such file")


def _convert_dimension(key: str, dimension: Dimension, hint: Any, bounds: Mapping[str, Any]) -> Dimension:
    for value in _extremes(dimension):
        check_bounds(convert(hint, value, key), bounds, key)
    if isinstance(dimension, Choice):
        return Choice(tuple(convert(hint, value, key) for value in dimension.values))
    if hint in (int, int | None):
        if isinstance(dimension, Interval):
            raise UserInputError(f"{key}={dimension}: an integer needs a range or a choice")
        low, high, step = (convert(int, x, key) for x in (dimension.low, dimension.high, dimension.step))
        return Range(low, high, step, dimension.log)
    return dimension


def _extremes(dimension: Dimension) -> Sequence[Value]:
    return dimension.values if isinstance(dimension, Choice) else (dimension.low, dimension.high)


def _possible_values(space: Space, parameter: Field[Any]) -> Sequence[Value]:
    if parameter.name in space.dimensions:
        return _extremes(space.dimensions[parameter.name])
    default: Any = parameter.default
    return [space.constants.get(parameter.name, default)]


def reserved_host_gib(resolved: ResolvedConfig, space: Space, ranks: int = 1) -> float:
    """Return the most GiB of host memory that each process of a trial may need, according to the parameters."""
    total_gib = 0.0
    for parameter in fields(resolved.workload.Parameters):
        if owner := parameter.metadata.get("host_memory"):  # "trial" if the trial's processes share the memory
            values = _possible_values(space, parameter)
            largest_gib = max(float(value) for value in values if isinstance(value, (int, float)))
            total_gib += largest_gib / (ranks if owner == "trial" else 1)
    return total_gib


def read_initial_points(resolved: ResolvedConfig, space: Space, kind: str, *, strict: bool) -> list[Parameters]:
    """Return the points to try first, reduced to the parameters that vary. Points outside the space are skipped.

    Raises UserInputError for an unknown parameter or a wrong type and, if `strict`, for a point outside the space.
    """
    key = "search.initial_points"
    points = spaces.select_kind(resolved.config.search.initial_points, kind, key) or []
    if isinstance(points, str):
        points = spaces.parse_text(key, points)
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise UserInputError(f"{key}: must be a list of mappings: {key}=[{{m: 4096, n: 4096, k: 4096}}]")
    hints = get_type_hints(resolved.workload.Parameters)
    points = [environment.flatten(point) for point in points]
    for name, value in [item for point in points for item in point.items()]:
        if environment.is_variable(name):  # a variable has no type; a value outside the space is found below
            continue
        check_known(name, hints, f"{key}: unknown parameter {name}")
        convert(hints[name], value, f"{key}.{name}")
    inside = [point for point in points if point in space]
    if strict and len(inside) < len(points):
        outside = next(point for point in points if point not in space)
        name, value = next((name, value) for name, value in outside.items() if {name: value} not in space)
        legal = space.described().get(name)
        raise UserInputError(f"{key}: {name}={value} is outside of the space; space.{name} is {legal}")
    varying = [{name: value for name, value in point.items() if name in space.dimensions} for point in inside]
    return [point for point in varying if point]


@dataclass(frozen=True)
class WarmStart:
    """Points of another sweep that this sweep tries first. The other sweep's metrics are not used."""

    sweep: str  # the other sweep's name in the configuration
    study: str  # the id of the other sweep's study
    points: tuple[Mapping[str, Value], ...]  # all parameters of the other sweep's better trials, best first

    def legal_points(self, space: Space) -> list[Parameters]:
        """Return the best points in this space, reduced to the parameters that vary in it.

        If only some combinations are allowed, any other point is replaced by the allowed point that shares the most
        values with it. Raises UserInputError if no point is in the space.
        """
        legal: list[Parameters] = []
        for point in self.points:
            varying = {name: point[name] for name in space.dimensions if name in point}
            nearest = _nearest(varying, space)
            if nearest and nearest not in legal:
                legal.append(nearest)
        if not legal:
            reason = f"none of its {len(self.points)} better points is in this space"
            raise UserInputError(f"search.warm_start={self.sweep}: {reason}")
        return legal[:POINTS]


def _nearest(point: Parameters, space: Space) -> Parameters | None:
    """Return the point if it is allowed. Otherwise return the allowed point that shares the most values with it (of
    several, the most promising), or None if fewer than half of the values agree."""
    if space.only is None:
        return point if point in space else None
    if not space.only or not point:
        return None
    agreements = [len(point.items() & allowed.items()) for allowed in space.only]
    most = max(agreements)
    if most == len(point):
        return point
    return dict(space.only[agreements.index(most)]) if 2 * most >= len(point) else None
