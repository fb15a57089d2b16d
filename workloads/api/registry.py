"""Workloads by name. A configuration can run these and nothing else.

The project's own are discovered: every `Workload` subclass with a `name` that a package of `workloads/` defines. Other
packages register theirs as an entry point in the group `sweeper.workloads`.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

import workloads
from workloads.api.contract import Workload

GROUP = "sweeper.workloads"


@cache
def _built_in() -> dict[str, type[Workload]]:
    packages = [module.name for module in pkgutil.iter_modules(workloads.__path__) if module.ispkg]
    classes = [value for package in packages for value in vars(import_module(f"workloads.{package}")).values()]
    found = [value for value in classes if isinstance(value, type) and issubclass(value, Workload) and value.name]
    return {workload.name: workload for workload in found}


def names() -> list[str]:
    """Return the names of all workloads, sorted."""
    return sorted({*_built_in(), *(point.name for point in entry_points(group=GROUP))})


@cache
def load(name: str) -> Workload:
    """Return the workload of that name. Raises KeyError if there is none."""
    if name in _built_in():
        return _built_in()[name]()
    for point in entry_points(group=GROUP):
        if point.name == name:
            workload: Workload = point.load()()
            return workload
    raise KeyError(name)
