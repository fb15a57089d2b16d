"""Measurements in the processes of tests are neither repeated for seconds nor refused where others hold the cores.

Python imports `sitecustomize` when it starts; `tests.conftest.PYTHONPATH` has this folder.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MODULE = "workloads.instruments.host_waits"
LIMITS = {"EXTRA_S": 0.0, "UNUSABLE": float("inf"), "MAX_OVER_FASTEST": float("inf")}

# Collections while MLflow, torch and Ray are imported find nothing, and take a fifth of the time.
gc.set_threshold(100_000, 50, 50)


class LimitsFinder(PathFinder):
    """Finds the module that holds the limits, and sets them when it has been imported."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname == MODULE else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_with_limits(module: ModuleType) -> None:
                execute(module)
                vars(module).update(LIMITS)

            spec.loader.exec_module = execute_with_limits
        return spec


if __name__ == "sitecustomize":  # not where a test imports it by its package
    sys.meta_path.insert(0, LimitsFinder)
