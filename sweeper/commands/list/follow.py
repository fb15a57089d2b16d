"""Show the progress of a sweep that another process runs, from its journal."""

from __future__ import annotations

import os
import platform
import time

from sweeper.common.trials import TrialRecord
from sweeper.config.schema import Budget
from sweeper.pages.progress import ProgressState, make_progress
from sweeper.results.description import SweepDescription
from sweeper.results.stored import JOURNAL, JournalTail, StoredSweep
from sweeper.search.progress import SweepProgress
from workloads.api.errors import UserInputError

POLL_S = 0.5


class Follower:
    """The trials of a sweep, read from its journal as they end."""

    def __init__(self, sweep: StoredSweep, description: SweepDescription) -> None:
        self._tail = JournalTail(sweep.folder / JOURNAL)
        self._description = description
        self._records = self._tail.read()
        budget = Budget(**description.config["budget"])
        # An attempt that a retry replaces is counted until the sweep ends.
        searched = [record for record in self._records if not record.remeasurement]
        self._progress = SweepProgress(description.criteria, budget, searched)

    def poll(self) -> list[tuple[TrialRecord, bool]]:
        """Return the trials that have ended since the last call, and whether each is the best so far."""
        records = self._tail.read()
        self._records += records
        return [(record, not record.remeasurement and self._progress.add(record)) for record in records]

    def state(self) -> ProgressState:
        groups = [record.remeasurement.group for record in self._records if record.remeasurement]
        last = next((group for group in reversed(groups) if group), None)
        return ProgressState(
            counts=self._progress.counts,
            trials=self._description.budget_trials,
            running=self._tail.created - len(self._records),
            waiting=0,
            elapsed_s=time.time() - self._description.started_at_s,
            remaining_s=None,
            best=self._progress.best,
            finals=(groups.count(last), len(last) * int(self._description.config["finals"]["rounds"]))
            if last
            else None,
            front=self._progress.front,
            objectives=self._description.criteria.metrics,
        )


def follow(sweep: StoredSweep) -> int:
    """Show the progress until the sweep ends or Ctrl-C detaches. Returns the exit code.

    Raises:
        UserInputError: the sweep does not run.
    """
    description = sweep.description
    if description is None or not sweep.is_running:
        raise UserInputError(f"{sweep.name}: it does not run now ({sweep.state})")
    display = make_progress("auto")
    display.note(f"follow   {sweep.name} of process {sweep.driver}; Ctrl-C detaches and leaves it running")
    try:
        follower = Follower(sweep, description)
        with display:
            display.update(follower.state())
            while _is_driven(sweep, description.host):
                for record, is_best in follower.poll():
                    display.update(follower.state(), record, is_best)
                display.update(follower.state())
                time.sleep(POLL_S)
            for record, is_best in follower.poll():
                display.update(follower.state(), record, is_best)
    except KeyboardInterrupt:
        display.note(f"detached; {sweep.name} continues")
        return 0
    ended = StoredSweep(sweep.folder)  # its state has changed
    display.note(f"{ended.name}: {ended.state}; python -m sweeper best {ended.name} prints its winner")
    return 0


def _is_driven(sweep: StoredSweep, host: str) -> bool:
    """Return whether the driver is there: the recording process may hold the lock for a minute longer.

    Of a driver on another machine the lock alone is known.
    """
    driver = sweep.driver
    if not driver.isdigit() or host != platform.node():
        return driver != ""
    try:
        os.kill(int(driver), 0)
    except PermissionError:  # another user's
        return True
    except ProcessLookupError:
        return False
    return True
