"""Stand-ins for AMD hardware, which nobody here has."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import PYTHONPATH

FOLDER = str(Path(__file__).parent)


def stand_in_environment(scenario: str = "mi300x") -> dict[str, str]:
    """Return the variables with which a process imports the stand-in `amdsmi` (see there for the scenarios).

    Every process that Ray starts needs them, and no variable may hide its GPUs.
    """
    return {"PYTHONPATH": os.pathsep.join([FOLDER, PYTHONPATH]), "AMDSMI_STAND_IN": scenario}


def use_stand_in(monkeypatch: pytest.MonkeyPatch, scenario: str = "mi300x") -> None:
    """Make `import amdsmi` the stand-in in this scenario, in this process and until the test ends."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("AMDSMI_STAND_IN", scenario)
    forget_module(monkeypatch, "amdsmi")
    importlib.invalidate_caches()


def forget_module(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the next import load a module anew; what the test imports under this name is gone when the test ends."""
    monkeypatch.setitem(sys.modules, name, None)  # so that the end of the test restores the state of now
    del sys.modules[name]
