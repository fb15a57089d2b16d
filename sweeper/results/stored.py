"""Read sweeps from the folders in a results directory, even while drivers are writing to them."""

import fcntl
import json
import math
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from sweeper.common.trials import TrialRecord
from sweeper.config.schema import Config
from sweeper.config.space_checks import POINTS, WarmStart
from sweeper.metrics.criteria import Criteria
from sweeper.metrics.intervals import Interval
from sweeper.results.description import FILE, SweepDescription, read_description
from sweeper.search.front import Front, measure_front
from workloads.api.errors import UserInputError, describe_os_error
from workloads.api.notices import notify
from workloads.api.validation import check_known

JOURNAL = "study.journal"
RECORD = "record"  # the same as in `search.journal`, which takes a second to import
State = Literal["running", "interrupted", "failed", "finished"]


@dataclass(frozen=True)
class Winner:
    """A sweep's best trial so far: its leading objective with an interval (or NaN), and other objectives by metric."""

    trial: int
    value: float
    low: float = math.nan
    high: float = math.nan
    rounds: int = 0
    others: Mapping[str, float] = field(default_factory=dict)


class JournalTail:
    """Reads a whole journal on the first call, and only new lines on later calls, without ever writing to it."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self.created = 0  # the number of trials created so far

    def read(self) -> list[TrialRecord]:
        """Return the trials that ended since the last call. Raises UserInputError if a line is damaged."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self._position += end
        records = []
        for line in text[:end].splitlines():
            try:
                entry = json.loads(line)
                self.created += "distributions" in entry  # written to the journal for each new trial
                fields = entry.get("user_attr", {}).get(RECORD)
            except (ValueError, TypeError, AttributeError) as error:
                raise UserInputError(f"{self._path}: is damaged: {line[:40]!r} is not a journal entry") from error
            if fields:
                records.append(TrialRecord.from_fields(fields))
        return records


def best_command(folder: Path, *options: str) -> str:
    """Return the command that prints the winner of the sweep in this folder."""
    directory = folder.parent.parent
    is_here = directory.resolve() == Path.cwd()
    words = [folder.name, *([] if is_here else [f"dir={shlex.quote(str(directory))}"]), *options]
    return f"python -m sweeper best {' '.join(words)}"


@dataclass(frozen=True)
class StoredSweep:
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def description(self) -> SweepDescription:
        return read_description(self.folder)

    @property
    def is_running(self) -> bool:
        """Whether a driver, or a recording process that outlived the driver, holds the sweep's lock."""
        try:
            with (self.folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    @property
    def state(self) -> State:
        if self.is_running:
            return "running"
        end = self.description.end
        if end is None or not (end.is_over or end.reason):
            return "interrupted"
        return "finished" if end.is_over else "failed"

    @property
    def driver(self) -> str:
        """The id of the process that holds the lock, or an empty string."""
        return (self.folder / "lock").read_text().strip() if self.is_running else ""

    @cached_property
    def records(self) -> dict[int, TrialRecord]:
        return {record.number: record for record in JournalTail(self.folder / JOURNAL).read()}

    @property
    def current_records(self) -> list[TrialRecord]:
        """The records, excluding those of trials that a retry has replaced."""
        superseded = {record.superseded for record in self.records.values()}
        return [record for record in self.records.values() if record.number not in superseded]

    @property
    def ranked(self) -> list[TrialRecord]:
        return self.description.criteria.rank(r for r in self.current_records if not r.remeasurement)

    @property
    def changed_at_s(self) -> float:
        """The time of the sweep's last write, in seconds since 1970."""
        changes_s = [0.0]
        for name in (JOURNAL, FILE, "lock"):
            with suppress(OSError):
                changes_s.append((self.folder / name).stat().st_mtime)
        return max(changes_s)

    @property
    def size_bytes(self) -> int:
        """The size of the sweep's files on disk, excluding the MLflow store, which sweeps share."""
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if path.is_file())

    @property
    def winner(self) -> Winner | None:
        """The winner, or the best trial so far if the sweep has not shut down gracefully."""
        end, criteria = self.description.end, self.description.criteria
        if self.front is not None:
            return front_value(self.front, self.front.leader, criteria) if self.front.leader else None
        if end is None:
            best = next(iter(self.ranked), None)
            return measured_value(best, criteria) if best else None
        if end.winner is None or end.value is None:
            return None
        low, high = (math.nan if bound is None else bound for bound in (end.low, end.high))
        return Winner(end.winner, end.value, low, high, end.rounds)

    @cached_property
    def front(self) -> Front | None:
        """The front of several objectives so far, or None if there is only one objective or no ranked trial."""
        description = self.description
        if not description.criteria.has_front:
            return None
        top = int(description.config["finals"]["top"])
        return measure_front(self.ranked, self.current_records, description.criteria, top)

    @property
    def front_size(self) -> int:
        """The number of trials on the front, or 0 with one objective. If the sweep has ended, no trials are read."""
        end = self.description.end
        if end is not None and end.front is not None:
            return len(end.front)
        return len(self.front.numbers) if self.front else 0

    def read_trial(self, number: int) -> TrialRecord:
        """Return a trial's record. Raises UserInputError if no trial with this number has ended."""
        if number not in self.records:
            last = f"0 to {max(self.records)}" if self.records else "none"
            raise UserInputError(f"trial={number}: {self.name} has no such trial. Available: {last}")
        return self.records[number]


def measured_value(record: TrialRecord, criteria: Criteria) -> Winner:
    """Return a single trial's objectives, with the interval of the leading objective."""
    first, *others = criteria.metrics
    values = {name: record.metrics[name] for name in others}
    return Winner(record.number, *Interval.read(record.metrics, first).bounds, others=values)


def front_value(front: Front, record: TrialRecord, criteria: Criteria) -> Winner:
    """Return the objectives of a trial on the front. For a remeasured point, return means over the rounds."""
    for point in front.certified:
        if point.trial.number == record.number:
            first, *others = point.values.items()
            values = {name: value.value for name, value in others}
            return Winner(record.number, *first[1].bounds, point.rounds, values)
    return measured_value(record, criteria)


def find_sweeps(directory: Path) -> list[StoredSweep]:
    """Return the sweeps in a results directory, most recently changed first, and name unreadable ones."""
    root = directory / "sweeps"  # the name of the folder for Hydra's own sweeps begins with a dot
    try:
        folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    except PermissionError as error:
        raise UserInputError(f"dir={directory}: {describe_os_error(error)}") from error
    readable = [path for path in folders if os.access(path, os.R_OK | os.X_OK)]
    readable = [p for p in readable if all(os.access(p / f, os.R_OK) or not (p / f).exists() for f in (FILE, JOURNAL))]
    if private := sorted(path.name for path in folders if path not in readable):
        notify(f"sweeper: not readable, of other users: {', '.join(private)}")
    sweeps = [StoredSweep(path) for path in readable if (path / FILE).exists()]
    return sorted(sweeps, key=lambda sweep: sweep.changed_at_s, reverse=True)


def find_sweep(directory: Path, name: str | None = None, *, option: str = "") -> StoredSweep:
    """Return the named or the latest sweep. Raises UserInputError with a message that begins with `option`."""
    sweeps = find_sweeps(directory)
    if not sweeps:
        raise UserInputError(f"dir={directory}: there is no sweep; `python -m sweeper` runs one")
    if name is None:
        return sweeps[0]
    by_name = {sweep.name: sweep for sweep in sweeps}
    check_known(name, by_name, f"{option}{name}: unknown sweep")
    return by_name[name]


def read_warm_start(config: Config) -> WarmStart | None:
    """Return the better half of another sweep's trials (at least POINTS), or None if search.warm_start is not set.

    Raises UserInputError if the other sweep does not exist or has no complete trial.
    """
    name = config.search.warm_start
    if name is None:
        return None
    key = "search.warm_start="
    folder = Path(name if "/" in name else config.dir).expanduser().resolve()
    sweep = StoredSweep(folder) if "/" in name else find_sweep(folder, name, option=key)
    if not (sweep.folder / FILE).exists():
        raise UserInputError(f"{key}{name}: this is not a sweep folder (it has no {FILE})")
    ranked = sweep.ranked
    if not ranked:
        raise UserInputError(f"{key}{name}: no trial of it is complete")
    better = ranked[: max(POINTS, len(ranked) // 2)]
    return WarmStart(name, sweep.description.study, tuple(record.all_params for record in better))
