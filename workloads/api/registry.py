"""Find workloads by name. A configuration can run only these workloads.

Every `Workload` subclass with a `name` in a package of `workloads/` is discovered. Other distributions register their
workloads as entry points in the group `sweeper.workloads`.
"""

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import workloads
from workloads.api.contract import Workload
from workloads.suggestions import suggest

GROUP = "sweeper.workloads"


def names() -> list[str]:
    """Return the names of all workloads, sorted. Raises ValueError if two packages define the same name."""
    return sorted({**_built_in(), **_registered()})


@cache
def load(name: str) -> Workload:
    """Return the workload with that name. Raises KeyError if there is none, and ValueError like `names`."""
    registered = _registered()
    if name in registered:
        workload: Workload = registered[name].load()()
        return workload
    return _built_in()[name]()


def unknown_reason(name: str) -> str:
    suggestion = suggest(name, names())
    installed = f" Install the package that registers it in {GROUP}: pip install -e ."
    return f"unknown workload. {suggestion}{'' if 'Did you mean' in suggestion else installed}"


def find_entry_point(name: str) -> EntryPoint | None:
    """Return the entry point of another distribution's workload; None for this project's workloads."""
    return _registered().get(name)


@cache
def _built_in() -> dict[str, type[Workload]]:
    classes: dict[str, type[Workload]] = {}
    for package in sorted(module.name for module in pkgutil.iter_modules(workloads.__path__) if module.ispkg):
        for value in vars(import_module(f"workloads.{package}")).values():
            if not (isinstance(value, type) and issubclass(value, Workload) and value.name):
                continue
            # A package may import another package's class, so the same class found again is not a second definition.
            if classes.setdefault(value.name, value) is not value:
                raise _duplicate(value.name, _path(classes[value.name]), _path(value))
    return classes


@cache
def _registered() -> dict[str, EntryPoint]:
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in _built_in():
            raise _duplicate(point.name, _path(_built_in()[point.name]), point.value)
        if points.setdefault(point.name, point).value != point.value:
            raise _duplicate(point.name, points[point.name].value, point.value)
    return points


def _path(workload: type[Workload]) -> str:
    return f"{workload.__module__}:{workload.__qualname__}"


def _duplicate(name: str, first: str, second: str) -> ValueError:
    return ValueError(f"workload name {name!r} is defined twice, by {first} and by {second}: rename one of them")
