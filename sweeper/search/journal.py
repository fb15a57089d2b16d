"""Store each study on disk in an Optuna journal, with one file per sweep and a single writer.

The file is in Optuna's own format, so `optuna-dashboard FILE` and Optuna's `JournalFileBackend` can read it.
"""

import errno
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import json_to_distribution
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import TrialState

from workloads.api.errors import UserInputError

BLOCK_BYTES = 65536
LINES_AT_ONCE = 1000
RECORD = "record"  # the attribute that holds the complete record of an ended trial
# Optuna's codes for lines that change trials (`JournalOperation` in optuna/storages/journal/_storage.py, 5.0). Every
# version must read earlier versions' journals. `test_a_journal_is_read_as_optuna_reads_it` fails if the codes differ.
CREATE_TRIAL, SET_STATE, SET_ATTR = 4, 6, 8
STATES = {state.value: state for state in TrialState}

read_distribution = lru_cache(json_to_distribution)  # usually all trials of a sweep have the same distributions


@dataclass(slots=True)
class StoredTrial:
    """A trial in the journal, with the attributes of Optuna's `FrozenTrial`. `value` is the first objective."""

    number: int
    state: TrialState
    params: Mapping[str, Any]
    value: float | None
    user_attrs: Mapping[str, Any]


def fold(lines: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, StoredTrial]]:
    """Fold a journal's lines into one entry per trial, in order, so that Optuna does not replay every line.

    Optuna applies each line to a copy of the trial, parses the distributions of every trial again, and keeps all
    attributes. For 100,000 trials, this work and the records in text form took 30% of the time and memory of opening a
    study. Optuna only needs the study's lines and one line per trial, which for an ended trial contains just the state.
    Return these lines, and the ended trials by number.
    """
    entries: list[dict[str, Any]] = []
    trials: list[dict[str, Any]] = []  # trials' entries, by number
    ended: dict[int, StoredTrial] = {}
    for line in lines:
        code: int = line["op_code"]
        number: Any = line.get("trial_id")
        if code == CREATE_TRIAL:
            number = len(trials)
            trials.append(line)
            entries.append(line)
        elif code not in (SET_ATTR, SET_STATE):
            entries.append(line)
            continue
        elif number in ended:  # Optuna ignores lines about a trial that has ended
            continue
        elif code == SET_ATTR:
            trials[number].setdefault("user_attrs", {}).update(line["user_attr"])
            continue
        else:
            trials[number] |= {"state": line["state"], "value": None, "values": line["values"]}
        entry = trials[number]
        state = STATES[entry.get("state", TrialState.RUNNING.value)]
        if state.is_finished():
            # Remove fields from the entry that only readers of ended trials need.
            distributions = entry.pop("distributions", {})
            params = {
                name: read_distribution(distributions[name]).to_external_repr(value)
                for name, value in entry.pop("params", {}).items()
            }
            values = entry.get("values") or [entry.get("value")]
            ended[number] = StoredTrial(number, state, params, values[0], entry.pop("user_attrs", {}))
            entry["datetime_start"] = None  # parsing two dates would take as long as parsing the rest
            entry.pop("datetime_complete", None)
    return entries, ended


class JournalFile(BaseJournalBackend):
    """The lines of a journal. Nothing else changes the file, because the sweep's lock admits only one driver.

    Each line is passed to the operating system at once, so it survives the end of the process. After `sync`, lines also
    survive a crash of the machine. `sync` waits for a disk or network file system once per round of the sweep's loop
    instead of three times per trial. `ended` maps numbers to the trials that had ended when the file was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and repair an incomplete last line left by a kill or a full disk.

        The last line is removed unless only its line break is missing.

        Raises UserInputError if an earlier line is damaged.
        """
        self._path, self._file = path, path.open("ab")
        self._is_dirty = False
        self._count = 0  # the number of entries that Optuna has read
        with path.open("rb+") as file:
            size = end = file.seek(0, os.SEEK_END)
            newline = -1
            while newline < 0 < end:  # search backward, block by block
                start = max(0, end - BLOCK_BYTES)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                end = start + newline + 1
            if end < size:
                file.seek(end)
                try:
                    json.loads(file.read())
                    file.write(b"\n")
                except ValueError:
                    file.truncate(end)
            file.seek(0)
            # Parsed together, lines share memory for equal keys.
            blocks = iter(lambda: list(islice(file, LINES_AT_ONCE)), [])
            try:
                lines = (line for block in blocks for line in json.loads(b"[%b]" % b",".join(block)))
                self._unread, self.ended = fold(lines)
            except (ValueError, TypeError, KeyError) as error:
                raise UserInputError(
                    f"{path}: is damaged: not all of its lines are entries of a journal. Restore the file, "
                    "or give this sweep another name=; nothing was started"
                ) from error

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the entries from this number on. Optuna counts folded entries."""
        assert log_number_from == self._count, "one study reads a journal, from its start to its end"
        unread, self._unread = self._unread, []
        self._count += len(unread)
        yield from unread

    def append_logs(self, logs: Sequence[dict[str, Any]]) -> None:
        """Append entries. Raises OSError if the disk is full."""
        # A workload's metrics may contain NumPy numbers.
        lines = [json.dumps(log, separators=(",", ":"), default=float) + "\n" for log in logs]
        self._file.write("".join(lines).encode())
        self._file.flush()
        for log in logs:  # Optuna's copy of a trial does not need the record, which takes several kB
            self._unread.append(log | {"user_attr": {RECORD: None}} if RECORD in log.get("user_attr", {}) else log)
        self._is_dirty = True

    def sync(self) -> None:
        """Wait until all entries so far are on disk. Raises OSError if the file was moved or deleted."""
        if self._is_dirty:
            os.fsync(self._file.fileno())
            self._is_dirty = False
            if not self._path.exists():
                raise FileNotFoundError(errno.ENOENT, "moved or deleted while the sweep ran", str(self._path))


class Journal:
    """An Optuna study in a journal file, with trials accessed by number. `directions` matter only for a new study.

    A new study is named after the sweep and stores the objectives' names, which Optuna's dashboard shows.
    """

    def __init__(self, path: Path, *directions: str, metrics: Sequence[str] = ()) -> None:
        self._file = JournalFile(path)
        self._storage = JournalStorage(self._file)
        if stored := self._storage.get_all_studies():
            self.study = optuna.load_study(study_name=stored[0].study_name, storage=self._storage)
        else:
            name = path.resolve().parent.name
            self.study = optuna.create_study(study_name=name, storage=self._storage, directions=directions)
            if metrics:
                self.study.set_metric_names(list(metrics))
        self._study_id = self._storage.get_study_id_from_name(self.study.study_name)
        self.add_trial, self.tell, self.sync = self.study.add_trial, self.study.tell, self._file.sync

    @property
    def trials(self) -> list[StoredTrial]:
        """All trials, by number. Callers must not change them."""
        return [
            self._file.ended.get(trial.number)
            or StoredTrial(trial.number, trial.state, trial.params, (trial.values or [None])[0], trial.user_attrs)
            for trial in self.study.get_trials(deepcopy=False)
        ]

    def forget_ended(self) -> None:
        """Free data that is needed only to load a study. Ended trials in `trials` then have no parameters."""
        self._file.ended = {}

    def set_attr(self, number: int, key: str, value: Any) -> None:
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        self._storage.set_trial_user_attr(trial_id, key, value)


def check_identity(study: optuna.Study, identity: dict[str, Any]) -> str:
    """Store the identity in a new study, or compare it with the stored identity, and return the study's id.

    The identity contains the settings that a resumed sweep must share. Raises UserInputError if it differs.
    """
    attrs = study.user_attrs
    if "id" not in attrs:
        study.set_user_attr("identity", identity)
        study.set_user_attr("id", study_id := uuid.uuid4().hex)
        return study_id
    stored = attrs["identity"]
    if stored != identity:
        differences = "; ".join(describe_differences(stored, identity))
        raise UserInputError(f"this sweep already exists with different settings: {differences}. Choose another name=")
    return str(attrs["id"])


def describe_differences(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return a phrase for each key with a changed value. Keys of nested mappings are joined by dots."""
    phrases = []
    for key in {**stored, **current}:
        old, new = stored.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            phrases += [f"{key}.{phrase}" for phrase in describe_differences(old, new)]
        elif old != new:
            phrases.append(f"{key} was {old}, now {new}")
    return phrases
