"""Stand-ins for AMD hardware, which nobody here has."""

from __future__ import annotations

from pathlib import Path

FOLDER = str(Path(__file__).parent)


def stand_in_environment(scenario: str = "mi300x") -> dict[str, str]:
    """Return the variables with which a process imports the stand-in `amdsmi` (see there for the scenarios).

    It must be first on the path of every process that Ray starts, and no variable may hide its GPUs.
    """
    return {"PYTHONPATH": FOLDER, "AMDSMI_STAND_IN": scenario}
