"""The tools that are compared: the command that starts each, the files that its user writes, and its results."""

import csv
import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.figures import Point

PROGRAMS = Path(__file__).parent / "programs"
MODULES = "benchmarks.peers.programs"


@dataclass(frozen=True)
class Tool:
    """A tool with the settings that one row of the tables has."""

    name: str
    python: str  # which environment runs it: `sweeper`, `tune` or `hydra`
    command: tuple[str, ...]  # its words; `python` is that of the environment
    files: tuple[str, ...]  # the files that a user writes, in addition to the trial
    read: Callable[[Path], list[Point]]  # the points that its results have in a folder, the best one first
    # environment variables that differ from the tool's defaults
    variables: Mapping[str, str] = field(default_factory=dict)
    stops_early: bool = False  # it ends poor trials
    # further words of a start after a kill, given the number of missing results
    resume: Callable[[int], tuple[str, ...]] = lambda missing: ()

    @property
    def paths(self) -> list[Path]:
        return [PROGRAMS / name for name in self.files]


def read_sweeper(folder: Path) -> list[Point]:
    """Return the complete trials of the only sweep in a folder, from the table that it writes."""
    (path,) = folder.glob("sweeps/*/trials.csv")
    rows = [row for row in csv.DictReader(path.open()) if row["outcome"] == "complete"]
    objective = next(name for name in rows[0] if name.split()[0] in ("value", "score"))
    return _ranked((float(row[objective]), row["param.a"], row["param.b"]) for row in rows)


def read_tune(folder: Path) -> list[Point]:
    """Return the trials in the data frame of Tune's result grid, with those that were stopped early."""
    rows = csv.DictReader((folder / "results.csv").open())
    return _ranked((float(row["score"]), row["config/a"], row["config/b"]) for row in rows if row["score"])


def read_hydra(folder: Path) -> list[Point]:
    """Return the complete trials of Optuna's study; a choice is stored as its place among the choices."""
    query = """select trials.trial_id, value, param_name, param_value, distribution_json from trials
        join trial_values on trial_values.trial_id = trials.trial_id
        join trial_params on trial_params.trial_id = trials.trial_id where state = 'COMPLETE'"""
    values: dict[int, float] = {}
    points: dict[int, dict[str, str]] = {}
    for number, value, name, place, distribution in sqlite3.connect(folder / "optuna.db").execute(query):
        values[number] = value
        points.setdefault(number, {})[name] = json.loads(distribution)["attributes"]["choices"][int(place)]
    return _ranked((values[number], point["a"], point["b"]) for number, point in points.items())


def _ranked(rows: Iterable[tuple[float, str, str]]) -> list[Point]:
    return [(int(a), int(b)) for _, a, b in sorted(rows, reverse=True)]


def _lower_trials(missing: int) -> tuple[str, ...]:
    return (f"hydra.sweeper.n_trials={missing}",)


_HYDRA = ("python", "-m", f"{MODULES}.hydra_app", "--multirun")
_HYDRA_FILES = ("hydra_app.py", "hydra_config.yaml")
SWEEPER = Tool(
    "sweeper", "sweeper", ("python", "-m", f"{MODULES}.sweeper_function"), ("sweeper_function.py",), read_sweeper
)
TUNE = Tool("Ray Tune", "tune", ("python", "-m", f"{MODULES}.tune_grid"), ("tune_grid.py",), read_tune)
HYDRA = Tool("hydra-optuna-sweeper, Ray launcher", "hydra", _HYDRA, _HYDRA_FILES, read_hydra)

HYDRA_PROCESSES = Tool(
    "hydra-optuna-sweeper, 4 processes",
    "hydra",
    ("bash", str(PROGRAMS / "hydra_processes.sh")),
    ("hydra_app.py", "hydra_processes.yaml", "hydra_processes.sh"),
    read_hydra,
)
SWEEPER_MEDIAN = Tool(
    "sweeper, command, median rule",
    "sweeper",
    ("python", "-m", "sweeper", "--config-dir", str(PROGRAMS), "workload=steps", "search=grid"),
    ("workload/steps.yaml", "sweeper_steps.py"),
    read_sweeper,
    stops_early=True,
)
SWEEPER_COMMAND = Tool(
    "sweeper, command", "sweeper", (*SWEEPER_MEDIAN.command, "search.pruner=none"), SWEEPER_MEDIAN.files, read_sweeper
)
SWEEPER_ASHA = Tool(
    "sweeper, ASHA",
    "sweeper",
    ("python", "-m", f"{MODULES}.sweeper_asha"),
    ("sweeper_asha.py",),
    read_sweeper,
    stops_early=True,
)
TUNE_ASHA = Tool(
    "Ray Tune, ASHA", "tune", ("python", "-m", f"{MODULES}.tune_asha"), ("tune_asha.py",), read_tune, stops_early=True
)
TUNE_EVERY_SECOND = Tool(
    "Ray Tune, state saved each second",
    "tune",
    TUNE.command,
    TUNE.files,
    read_tune,
    variables={"TUNE_GLOBAL_CHECKPOINT_S": "1"},
)
HYDRA_LOWERED = Tool(
    "hydra-optuna-sweeper, n_trials lowered by hand", "hydra", _HYDRA, _HYDRA_FILES, read_hydra, resume=_lower_trials
)

WHOLE = (SWEEPER, TUNE, HYDRA, HYDRA_PROCESSES, SWEEPER_COMMAND, SWEEPER_MEDIAN, SWEEPER_ASHA, TUNE_ASHA)
KILLED = (SWEEPER, TUNE, TUNE_EVERY_SECOND, HYDRA, HYDRA_LOWERED)
