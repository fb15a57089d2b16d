"""Optuna's storages: the journal of a sweep, and access to a study's trials by their numbers.

Optuna has no public way to reach a running trial of a study by its number. Every use of its private attributes is in
this module: `Study._storage`, `Study._study_id`, the storage's methods, and the key of a constraint. Tested with Optuna
5.0.0; pyproject.toml allows >=5.0,<6. tests/sweeper/search/test_storage.py fails if one of them disappears.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

STUDY_NAME = "sweep"
# A trial is feasible to Optuna when all of its constraints are zero or less.
INFEASIBLE = {"feasible": 1.0}


def set_user_attr(study: optuna.Study, number: int, key: str, value: Any) -> None:
    """Set a user attribute of a trial, which may be running."""
    study._storage.set_trial_user_attr(_trial_id(study, number), key, value)


def mark_infeasible(study: optuna.Study, number: int) -> None:
    """Set the constraint `INFEASIBLE` of a running trial.

    The public `Trial.set_constraint` needs a `Trial`, whose constructor calls the sampler's `before_trial`.
    """
    for name, value in INFEASIBLE.items():
        study._storage.set_trial_system_attr(_trial_id(study, number), f"constraints:{name}", value)


def intermediate_values(study: optuna.Study, number: int) -> dict[int, float]:
    """Return the objective at each step that a trial has reported."""
    return dict(study._storage.get_trial(_trial_id(study, number)).intermediate_values)


def running_trial(study: optuna.Study, number: int) -> optuna.trial.Trial:
    """Return the object by which a running trial reports steps and asks the pruner."""
    return optuna.trial.Trial(study, _trial_id(study, number))


def _trial_id(study: optuna.Study, number: int) -> int:
    return int(study._storage.get_trial_id_from_study_id_trial_number(study._study_id, number))


# ── the journal ──


class _NoLock:
    """No lock: the sweep's own lock admits one driver, and is released by the system even when the driver is killed."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def open_journal(path: Path, direction: str) -> optuna.Study:
    """Open the study in a journal file, or create it.

    An incomplete last line, which a kill or a full disk leaves, is cut off.
    """
    if path.exists():
        _drop_torn_line(path)
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=_NoLock()))
    if storage.get_all_studies():
        return optuna.load_study(study_name=STUDY_NAME, storage=storage)
    return optuna.create_study(study_name=STUDY_NAME, storage=storage, direction=direction)


def _drop_torn_line(path: Path) -> None:
    """Truncate the file after its last newline, reading backwards in blocks of 64 KiB."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
