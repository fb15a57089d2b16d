"""The study on disk: an Optuna journal, one file per sweep, with a single writer.

The file has Optuna's own format, so `optuna-dashboard FILE` and Optuna's `JournalFileBackend` can read it.
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
RECORD = "record"  # the attribute with the complete record of an ended trial
# Optuna's codes for lines that change trials (`JournalOperation` in optuna/storages/journal/_storage.py, 5.0). Every
# version must read earlier versions' journals. `test_a_journal_is_read_as_optuna_reads_it` fails if the codes differ.
CREATE_TRIAL, SET_STATE, SET_ATTR = 4, 6, 8
STATES = {state.value: state for state in TrialState}

read_distribution = lru_cache(json_to_distribution)  # usually the same for all trials of a sweep


@dataclass(slots=True)
class StoredTrial:
    """A trial of the journal, with the attribute names of Optuna's `FrozenTrial`. `value` is the first objective's."""

    number: int
    state: TrialState
    params: Mapping[str, Any]
    value: float | None
    user_attrs: Mapping[str, Any]


def fold(lines: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, StoredTrial]]:
    """Fold the lines of a journal, in order, into one entry per trial, without Optuna's replay of every line.

    Optuna applies each line to a copy of its trial, parses the distributions of every trial again, and keeps all
    attributes. For 100,000 trials that, and records as text, took 30% of the time and memory of opening a study. Optuna
    needs only the study's lines and one line per trial, for an ended trial just with its state. These are returned,
    with the ended trials by number.
    """
    entries: list[dict[str, Any]] = []
    trials: list[dict[str, Any]] = []  # the entries of trials, by number
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
        elif number in ended:  # Optuna ignores lines after the end of a trial
            continue
        elif code == SET_ATTR:
            trials[number].setdefault("user_attrs", {}).update(line["user_attr"])
            continue
        else:
            trials[number] |= {"state": line["state"], "value": None, "values": line["values"]}
        entry = trials[number]
        state = STATES[entry.get("state", TrialState.RUNNING.value)]
        if state.is_finished():
            # Remove the fields that only readers of ended trials need from the entry.
            distributions = entry.pop("distributions", {})
            params = {
                name: read_distribution(distributions[name]).to_external_repr(value)
                for name, value in entry.pop("params", {}).items()
            }
            values = entry.get("values") or [entry.get("value")]
            ended[number] = StoredTrial(number, state, params, values[0], entry.pop("user_attrs", {}))
            entry["datetime_start"] = None  # parsing two dates takes as long as the rest of the entry
            entry.pop("datetime_complete", None)
    return entries, ended


class JournalFile(BaseJournalBackend):
    """The lines of a journal. The sweep's lock admits only one driver, so the file changes only here.

    Each line goes to the operating system at once, so it survives the end of the process. `sync` makes the lines
    survive a crash of the machine too. It waits for a disk or network file system once per round of the sweep's loop,
    not three times per trial. `ended` has the trials, by number, that had ended when the file was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and repair an incomplete last line that a kill or a full disk left.

        The line is removed, unless only its line break is missing.

        Raises UserInputError if an earlier line is damaged.
        """
        self._path, self._file = path, path.open("ab")
        self._is_dirty = False
        self._count = 0  # of the entries that Optuna has read
        with path.open("rb+") as file:
            size = end = file.seek(0, os.SEEK_END)
            newline = -1
            while newline < 0 < end:  # backwards in blocks
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
            # Lines that are parsed together share equal keys.
            blocks = iter(lambda: list(islice(file, LINES_AT_ONCE)), [])
            try:
                self._unread, self.ended = fold(
                    line for block in blocks for line in json.loads(b"[%b]" % b",".join(block))
                )
            except (ValueError, TypeError, KeyError) as error:
                raise UserInputError(
                    f"{path}: is damaged: not all of its lines are entries of a journal. Restore the file, "
                    "or give this sweep another name=; nothing was started"
                ) from error

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the entries starting at this number. Optuna's numbers count the folded entries."""
        assert log_number_from == self._count, "one study reads a journal, from its start to its end"
        unread, self._unread = self._unread, []
        self._count += len(unread)
        yield from unread

    def append_logs(self, logs: Sequence[dict[str, Any]]) -> None:
        """Append entries. Raises OSError if the disk is full."""
        # A workload may leave a NumPy number in its metrics.
        lines = [json.dumps(log, separators=(",", ":"), default=float) + "\n" for log in logs]
        self._file.write("".join(lines).encode())
        self._file.flush()
        for log in logs:  # Optuna's copy of a trial does not need the record of several kB
            self._unread.append(log | {"user_attr": {RECORD: None}} if RECORD in log.get("user_attr", {}) else log)
        self._is_dirty = True

    def sync(self) -> None:
        """Wait until the entries so far are on disk. Raises OSError if the file was moved or deleted."""
        if self._is_dirty:
            os.fsync(self._file.fileno())
            self._is_dirty = False
            if not self._path.exists():
                raise FileNotFoundError(errno.ENOENT, "moved or deleted while the sweep ran", str(self._path))


class Journal:
    """Optuna's study in a journal file. Trials are accessed by number, and `directions` is used for a new study.

    A new study is named after its sweep and has the names of its objectives, which Optuna's dashboard shows.
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
        self.add_trial, self.sync = self.study.add_trial, self._file.sync

    @property
    def trials(self) -> list[StoredTrial]:
        """All trials by number. They must not be changed."""
        return [
            self._file.ended.get(trial.number)
            or StoredTrial(trial.number, trial.state, trial.params, (trial.values or [None])[0], trial.user_attrs)
            for trial in self.study.get_trials(deepcopy=False)
        ]

    def forget_ended(self) -> None:
        """Free the data needed only to load a study. After that, ended trials in `trials` have no parameters."""
        self._file.ended = {}

    def set_attr(self, number: int, key: str, value: Any) -> None:
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        self._storage.set_trial_user_attr(trial_id, key, value)

    def tell(self, number: int, values: Sequence[float] | None, state: TrialState) -> None:
        self.study.tell(number, values, state=state)


def check_identity(study: optuna.Study, identity: dict[str, Any]) -> str:
    """Store the settings that a resumed sweep must share in a new study, or compare them, and return the study's id.

    Raises UserInputError if the study has another identity.
    """
    attrs = study.user_attrs
    if "id" not in attrs:
        study.set_user_attr("identity", identity)
        study.set_user_attr("id", study_id := uuid.uuid4().hex)
        return study_id
    stored = attrs["identity"]
    if stored != identity:
        raise UserInputError(
            f"this sweep already exists with different settings: {'; '.join(describe_differences(stored, identity))}. "
            "Choose another name="
        )
    return str(attrs["id"])


def describe_differences(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return a phrase for each key with a changed value. The keys of nested mappings are joined with dots."""
    phrases = []
    for key in {**stored, **current}:
        old, new = stored.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            phrases += [f"{key}.{phrase}" for phrase in describe_differences(old, new)]
        elif old != new:
            phrases.append(f"{key} was {old}, now {new}")
    return phrases
