"""Measurements in the processes of tests are neither repeated for seconds nor refused where others hold the cores.

They evict few data from caches, which would take most of the time of a small product.

Python imports `sitecustomize` when it starts; `tests.conftest.PYTHONPATH` has this folder.
"""

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LIMITS: dict[str, dict[str, float]] = {
    "workloads.instruments.host_waits": {"EXTRA_S": 0.0, "UNUSABLE": float("inf"), "MAX_OVER_FASTEST": float("inf")},
    "workloads.instruments.device": {"CPU_FLUSH_MIB": 8},
}
ORIGINAL: dict[str, dict[str, float]] = {}
gc.set_threshold(100_000, 10, 10)  # as of a sweep, also in its workers, which import torch


class LimitsFinder(PathFinder):
    """Finds the modules that hold the limits, and sets them when they have been imported."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname in LIMITS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_with_limits(module: ModuleType) -> None:
                execute(module)
                ORIGINAL[fullname] = {name: vars(module)[name] for name in LIMITS[fullname]}
                vars(module).update(LIMITS[fullname])

            spec.loader.exec_module = execute_with_limits
        return spec


sys.meta_path.insert(0, LimitsFinder)
