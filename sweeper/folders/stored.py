"""The sweeps of a results directory, read from their folders while their drivers may be writing to them."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sweeper.common.errors import UserInputError, suggest
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.folders.description import SweepDescription, read_description

JOURNAL = "study.journal"
RECORD = "record"  # as in `search.journal`, which takes a second to import
State = Literal["running", "interrupted", "finished"]


@dataclass(frozen=True)
class Winner:
    """The best trial of a sweep so far, and its objective; NaN where there is no interval."""

    trial: int
    value: float
    low: float = math.nan
    high: float = math.nan
    rounds: int = 0


class JournalTail:
    """Reads a journal from its start, and later what was appended since. It never writes.

    Attributes:
        created: trials that were created so far.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.created = 0

    def read(self) -> list[TrialRecord]:
        """Return the records of the trials that have ended since the last call. An incomplete last line is left."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self._position += end
        records = []
        for line in text[:end].splitlines():
            entry = json.loads(line)
            self.created += "distributions" in entry  # what the journal writes of a new trial
            if fields := entry.get("user_attr", {}).get(RECORD):
                # Sweeps that an earlier version began have the record's JSON as a text.
                records.append(TrialRecord.from_fields(json.loads(fields) if isinstance(fields, str) else fields))
        return records


@dataclass(frozen=True)
class StoredSweep:
    """A sweep on disk."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def description(self) -> SweepDescription | None:
        """What the sweep measures; None where version 0.1, or a development version of 0.2, ran it."""
        return read_description(self.folder)

    @property
    def is_running(self) -> bool:
        """Return whether a driver, or the recording process that it has left, holds the sweep's lock."""
        try:
            with (self.folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def state(self) -> State:
        if self.is_running:
            return "running"
        end = self.description.end if self.description else None
        return "finished" if end is not None and end.is_over else "interrupted"

    @property
    def driver(self) -> str:
        """The process id that holds the lock; empty if none does."""
        return (self.folder / "lock").read_text().strip() if self.is_running else ""

    @cached_property
    def records(self) -> dict[int, TrialRecord]:
        """The records of all trials that have ended, by number."""
        return {record.number: record for record in JournalTail(self.folder / JOURNAL).read()}

    @property
    def changed_at_s(self) -> float:
        """When the sweep last recorded something, in seconds since 1970."""
        return max((_modified_s(self.folder / name) for name in (JOURNAL, "sweep.json", "lock")), default=0.0)

    @property
    def size_bytes(self) -> int:
        """The bytes of its files on disk. MLflow's store, which sweeps share, is not among them."""
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if path.is_file())

    @property
    def winner(self) -> Winner | None:
        """The winner; of a sweep that has not ended in order, the best trial of its search so far."""
        if self.description is None:
            return None
        end = self.description.end
        if end is None:
            ranked = rank_searched(self.records, self.description)
            return measured_value(ranked[0], self.description.objective) if ranked else None
        if end.winner is None or end.value is None:
            return None
        bounds = [math.nan if bound is None else bound for bound in (end.low, end.high)]
        return Winner(end.winner, end.value, bounds[0], bounds[1], end.rounds)

    def read_trial(self, number: int) -> TrialRecord:
        """Return the record of a trial.

        Raises:
            UserInputError: no such trial has ended.
        """
        if number not in self.records:
            last = f"0 to {max(self.records)}" if self.records else "none"
            raise UserInputError(f"--trial {number}: {self.name} has no such trial. Available: {last}")
        return self.records[number]


def rank_searched(records: Mapping[int, TrialRecord], description: SweepDescription) -> list[TrialRecord]:
    """Return the complete trials of the search, the best first; without those that a retry has replaced."""
    kept = records.values()
    replaced = {r.retry.trial for r in kept if r.retry and r.status is not TrialStatus.CANCELLED}
    searched = [record for record in kept if not record.remeasurement and record.number not in replaced]
    return description.criteria.rank(searched)


def measured_value(record: TrialRecord, objective: str) -> Winner:
    """Return the objective of a single trial with its interval."""
    low, high = (record.metrics.get(f"{objective}_ci_{bound}", math.nan) for bound in ("low", "high"))
    return Winner(record.number, record.metrics[objective], low, high)


def find_sweeps(directory: Path) -> list[StoredSweep]:
    """Return the sweeps of a results directory, the last one first."""
    sweeps = [StoredSweep(path) for path in _folders(directory)]
    return sorted(sweeps, key=lambda sweep: sweep.changed_at_s, reverse=True)


def find_sweep(directory: Path, name: str | None = None, *, option: str = "") -> StoredSweep:
    """Return the sweep of this name, or the last one. `option` stands before the name in messages.

    Raises:
        UserInputError: there is no such sweep.
    """
    sweeps = find_sweeps(directory)
    if not sweeps:
        raise UserInputError(f"--dir {directory}: there is no sweep; `python -m sweeper` runs one")
    if name is None:
        return sweeps[0]
    for sweep in sweeps:
        if sweep.name == name:
            return sweep
    raise UserInputError(f"{option}{name}: there is no such sweep. {suggest(name, _names(sweeps))}")


def _names(sweeps: Sequence[StoredSweep]) -> list[str]:
    return [sweep.name for sweep in sweeps]


def _folders(directory: Path) -> Iterator[Path]:
    """Yield the folders of sweeps; Hydra keeps its own below one that begins with a dot."""
    root: Any = directory / "sweeps"
    if root.is_dir():
        yield from (path for path in root.iterdir() if path.is_dir() and (path / "lock").exists())


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
