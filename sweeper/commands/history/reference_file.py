"""Read and write the reference results: a JSON file, kept in a repository, of runs grouped by work and hardware."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal

from sweeper.cli.command import writing
from sweeper.common.files import write_whole
from sweeper.metrics.criteria import Objective
from sweeper.metrics.intervals import Interval
from workloads.api.errors import UserInputError
from workloads.api.validation import build

SCHEMA = 1
SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True)
class Identity:
    """The properties that runs must share to be compared."""

    metric: str
    unit: str
    direction: Literal["maximize", "minimize"]
    work: dict[str, str]
    device: str
    devices: int = field(metadata={"min": 1})
    # A run's value is the mean of the finals' rounds, or the best single trial of a search, which is biased upward.
    basis: Literal["finals", "single trial"]

    @property
    def details(self) -> dict[str, str]:
        """All properties as a flat mapping of names to text."""
        devices = {"device": self.device, "number of devices": str(self.devices)}
        metric = {"metric": self.metric, "unit": self.unit, "direction": self.direction, "basis": self.basis}
        return {**self.work, **devices, **metric}

    @property
    def objective(self) -> Objective:
        return Objective(self.metric, self.direction)

    @property
    def hardware(self) -> str:
        """The device's name and count."""
        return f"{self.devices} x {self.device}" if self.devices > 1 else self.device


@dataclass(frozen=True)
class RecordedRun:
    sweep: str
    date: str  # when the run started, in UTC
    value: float = field(metadata={"min": 1e-300})
    # low, high: the bounds of the value's 95% interval; None if the value has no interval
    low: float | None = None
    high: float | None = None
    point: dict[str, str] = field(default_factory=dict)  # the fastest parameters
    versions: dict[str, str] = field(default_factory=dict)  # software versions, including `driver` for the GPU driver
    commit: str = ""
    starts_level: bool = False  # whether later runs are compared only with this run and the runs after it

    def __post_init__(self) -> None:
        try:
            datetime.fromisoformat(self.date)
        except ValueError as error:
            raise ValueError(f"date={self.date}: must be a date such as 2026-01-31T12:00:00Z") from error
        low, high = (self.value if bound is None else bound for bound in (self.low, self.high))
        if low > high:
            raise ValueError(f"low={low:g}: must not be above high={high:g}")

    @property
    def interval(self) -> Interval:
        low, high = (math.nan if bound is None else bound for bound in (self.low, self.high))
        return Interval(self.value, low, high)

    def is_same(self, other: RecordedRun) -> bool:
        """Return whether both runs are the same sweep, by name and start time, because a name can be reused."""
        return (self.sweep, self.date) == (other.sweep, other.date)

    def list_changes(self, before: RecordedRun) -> list[str]:
        """Return the versions that changed since an earlier run, such as `torch 2.11 to 2.12`."""
        names = {**before.versions, **self.versions}
        versions = {name: (before.versions.get(name, "none"), self.versions.get(name, "none")) for name in names}
        return [f"{name} {old} to {new}" for name, (old, new) in versions.items() if old != new]


@dataclass(frozen=True)
class Series:
    """The runs of the same work on the same hardware, in the order in which they were appended."""

    identity: Identity
    runs: tuple[RecordedRun, ...]

    @property
    def level(self) -> tuple[RecordedRun, ...]:
        """The runs that later runs are compared with: all runs since the start of the latest level."""
        starts = [place for place, run in enumerate(self.runs) if run.starts_level]
        return self.runs[starts[-1] if starts else 0 :]

    @property
    def changes(self) -> list[list[str]]:
        """The changes before each run: version changes, and the start of a new level."""
        versions = [[], *(after.list_changes(before) for before, after in pairwise(self.runs))]
        levels = [["a new level"] if run.starts_level else [] for run in self.runs]
        return [[*changed, *level] for changed, level in zip(versions, levels, strict=True)]


@dataclass(frozen=True)
class History:
    """All series of a file."""

    series: tuple[Series, ...] = ()

    def find(self, identity: Identity) -> Series | None:
        return next((series for series in self.series if series.identity == identity), None)

    def append(self, identity: Identity, run: RecordedRun) -> History:
        known = self.find(identity)
        if known is None:
            return History((*self.series, Series(identity, (run,))))
        longer = replace(known, runs=(*known.runs, run))
        return History(tuple(longer if series is known else series for series in self.series))


def read(path: Path) -> History:
    """Read the file. Raises UserInputError if the file is missing or is not a history that this version can read."""
    prefix = f"file={path}: "
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        hint = "`python -m sweeper history append` creates it from the last sweep"
        raise UserInputError(f"{prefix}no such file. {hint}") from error
    except ValueError as error:  # invalid JSON or invalid UTF-8
        raise UserInputError(f"{prefix}not valid JSON: {error}") from error
    schema = content.get("schema") if isinstance(content, Mapping) else None
    if not isinstance(schema, int) or not isinstance(content.get("series"), list):
        raise UserInputError(f'{prefix}not a history: it must have "schema" and a list of "series"')
    if schema != SCHEMA:
        raise UserInputError(f"{prefix}schema {schema}: this version of sweeper reads {SCHEMA}")
    series = []
    for n, values in enumerate(content["series"], 1):
        place, runs = f"{prefix}series {n}", []
        if not isinstance(values, Mapping) or not isinstance(values.get("runs"), list):
            raise UserInputError(f'{place}: must be an object with a list of "runs"')
        identity = build(Identity, {name: value for name, value in values.items() if name != "runs"}, f"{place}: ")
        for number, run in enumerate(values["runs"], 1):
            if not isinstance(run, Mapping):
                raise UserInputError(f"{place}, run {number}: must be an object")
            runs.append(build(RecordedRun, run, f"{place}, run {number}: "))
        series.append(Series(identity, tuple(runs)))
    return History(tuple(series))


def write(path: Path, history: History) -> None:
    """Write the file atomically, so that an interrupted command leaves the earlier version intact."""
    content = [
        {  # omit empty values
            **asdict(series.identity),
            "runs": [{key: v for key, v in asdict(run).items() if v or key == "value"} for run in series.runs],
        }
        for series in history.series
    ]
    text = json.dumps({"schema": SCHEMA, "series": content}, indent=1)
    with writing("file", path):
        write_whole(path, f"{text}\n")


def round_value(value: float) -> float:
    """Round a value to the number of significant digits that the file stores."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
