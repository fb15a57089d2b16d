"""Measure how fast GPU clusters are, and find the fastest configuration."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sweeper.notebook.result import SweepError, SweepResult
    from sweeper.notebook.run import load_results, plan_layouts, run
    from workloads.api.contract import Infeasible, Rank
    from workloads.api.errors import UserInputError

__version__ = "0.3.0"
__all__ = ["Infeasible", "Rank", "SweepError", "SweepResult", "UserInputError", "load_results", "plan_layouts", "run"]

# The public names and their modules. Each is imported on first use because every worker imports this package.
_LAZY = {
    "UserInputError": "workloads.api.errors",
    "SweepError": "sweeper.notebook.result",
    "SweepResult": "sweeper.notebook.result",
    "load_results": "sweeper.notebook.run",
    "plan_layouts": "sweeper.notebook.run",
    "run": "sweeper.notebook.run",
    "Infeasible": "workloads.api.contract",
    "Rank": "workloads.api.contract",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sweeper' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _pin_workloads() -> None:
    """Import the `workloads` package that is next to this package. Otherwise `python -m sweeper` and its Ray workers
    would prefer any `workloads` folder in the working directory."""
    folder = Path(__file__).resolve().parent.parent / "workloads"
    if not folder.is_dir():
        return  # Ray has copied `workloads` to a folder that precedes the working directory in the search path
    loaded = sys.modules.get("workloads")
    if loaded is not None and Path(loaded.__file__ or "").resolve().parent == folder:
        return
    for name in [name for name in sys.modules if name == "workloads" or name.startswith("workloads.")]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location("workloads", folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)


_pin_workloads()
