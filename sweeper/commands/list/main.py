"""List the sweeps in a results directory.

    python -m sweeper list
    python -m sweeper list follow NAME
    python -m sweeper list delete NAME --yes

Without a verb, the command lists all sweeps, the latest first. The columns are the state (running, interrupted, failed,
finished; how many trials failed, were lost or timed out), the best trial or the size of the Pareto front, the size on
disk, and the time since the last start.

`follow` shows the progress of another process's sweep until it ends. Ctrl-C detaches; the sweep continues.

`delete` removes an idle sweep from disk and MLflow if you confirm. MLflow keeps deleted runs until you run `mlflow gc`.
"""

import fcntl
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sweeper.cli.command import Subcommand, Tracking, Verbs, switch, word
from sweeper.common.format import count, format_number
from sweeper.common.trials import TrialRecord
from sweeper.config.schema import Budget
from sweeper.pages.progress import ProgressState, make_progress
from sweeper.pages.terminal import draw, open_console
from sweeper.results.description import SweepDescription
from sweeper.results.stored import JOURNAL, JournalTail, StoredSweep, best_command, find_sweep, find_sweeps
from sweeper.search.progress import SweepProgress
from sweeper.tracking import mlflow_store
from sweeper.tracking.mlflow_store import default_uri, sqlite_path
from workloads.api.errors import UserInputError
from workloads.api.metrics import get_metric

HEADING = ["sweep", "state", "best", "size", "age"]
MIN_COLUMNS = 2  # name and state are shown even in a narrow terminal
# Units of ages and sizes, the largest first. A value is shown in the largest unit that does not exceed the value.
AGES_S = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
SIZES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
POLL_S = 0.5  # polling interval of `follow`


@dataclass(frozen=True, kw_only=True)
class ListRequest:
    """The sweeps to list.

    Attributes:
        dir: results directory.
    """

    dir: str = "."


@dataclass(frozen=True, kw_only=True)
class FollowRequest(ListRequest):
    """The sweep to follow."""

    name: str = word("NAME")


@dataclass(frozen=True, kw_only=True)
class DeleteRequest(ListRequest):
    """The sweep to delete.

    Attributes:
        yes: delete without asking.
        tracking.uri: the sweep's MLflow store; needed if the recorded address has a masked password.
    """

    name: str = word("NAME")
    yes: bool = switch()
    tracking: Tracking = field(default_factory=Tracking)


def show_sweeps(request: ListRequest) -> int:
    """Print a table of the sweeps in a directory, and return the exit code."""
    directory = Path(request.dir)
    if not directory.is_dir():
        raise UserInputError(f"dir={request.dir}: no such directory")
    sweeps = find_sweeps(directory)
    if not sweeps:
        print(f"no sweep in {directory.resolve()}; `python -m sweeper` runs one")
        return 0
    console = open_console()
    console.print(draw(HEADING, [describe_row(sweep) for sweep in sweeps], MIN_COLUMNS, console.width))
    return 0


def delete_sweep(request: DeleteRequest) -> int:
    """Ask, then delete a sweep and return the exit code. Raises UserInputError if it runs or there is no terminal."""
    sweep = find_sweep(Path(request.dir), request.name)
    if sweep.is_running:
        raise UserInputError(f"{sweep.name}: process {sweep.driver} is running it; stop that first")
    if not request.yes:
        size = format_amount(sweep.size_bytes, SIZES)
        question = f"delete {sweep.name} ({count(len(sweep.records), 'trial')}, {size}) and its runs in MLflow?"
        if not sys.stdin.isatty():
            raise UserInputError(f"{question} There is no terminal to ask on: set --yes")
        if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing is deleted")
            return 0
    print("\n".join(delete(sweep, request.tracking.uri)))
    return 0


VERBS: Verbs = {
    "": (ListRequest, show_sweeps),
    "follow": (FollowRequest, lambda request: follow(find_sweep(Path(request.dir), request.name))),
    "delete": (DeleteRequest, delete_sweep),
}
COMMAND = Subcommand("list", __doc__, VERBS)
main = COMMAND.main


def describe_row(sweep: StoredSweep) -> list[str]:
    """Return the table cells of a sweep. For a damaged sweep, the column "best" shows the error."""
    size, started_s = "", sweep.changed_at_s
    try:
        size = format_amount(sweep.size_bytes, SIZES)
        state, best = str(sweep.state), f"front of {count(sweep.front_size, 'trial')}" if sweep.front_size else ""
        description = sweep.description
        started_s = description.started_at_s
        if description.end and description.end.failed:
            state += f", {description.end.failed} failed"
        if not best and (winner := sweep.winner):
            unit = get_metric(description.objective).unit or description.objective
            best = f"{format_number(winner.value)} {unit}, trial {winner.trial}"
    except UserInputError as error:
        state, best, started_s = "damaged", str(error), sweep.changed_at_s
    return [sweep.name, state, best, size, format_amount(time.time() - started_s, AGES_S)]


def format_amount(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Format a duration or a size with two digits, in the largest unit that does not exceed the value."""
    name, factor = next(((name, factor) for name, factor in units if value >= factor), units[-1])
    return f"{value / factor:.2g} {name}" if value < 10 * factor else f"{value / factor:.0f} {name}"


class Follower:
    """A reader of a running sweep's journal, in which trials appear as they end."""

    def __init__(self, sweep: StoredSweep, description: SweepDescription) -> None:
        self._tail = JournalTail(sweep.folder / JOURNAL)
        self._description = description
        self._records = self._tail.read()
        budget = Budget(**description.config["budget"])
        # Until the sweep ends, an attempt still counts after a retry has replaced it.
        searched = [record for record in self._records if not record.remeasurement]
        self._progress = SweepProgress(description.criteria, budget, searched)

    def poll(self) -> list[tuple[TrialRecord, bool]]:
        """Return the trials that ended since the last call. A flag marks each trial that is the best so far."""
        records = self._tail.read()
        self._records += records
        return [(record, not record.remeasurement and self._progress.add(record)) for record in records]

    def state(self) -> ProgressState:
        groups = [record.remeasurement.group for record in self._records if record.remeasurement]
        last = next((group for group in reversed(groups) if group), None)
        rounds = int(self._description.config["finals"]["rounds"])
        return ProgressState(
            counts=self._progress.counts,
            trials=self._description.budget_trials,
            running=self._tail.created - len(self._records),
            waiting=0,
            elapsed_s=time.time() - self._description.started_at_s,
            remaining_s=None,
            best=self._progress.best,
            finals=(groups.count(last), len(last) * rounds) if last else None,
            front=self._progress.front,
            varying=self._progress.varying,
            limit=self._progress.binding_limit(self._description.budget_trials),
            objectives=self._description.criteria.metrics,
        )


def follow(sweep: StoredSweep) -> int:
    """Show progress until the sweep ends or Ctrl-C detaches. Raises UserInputError if the sweep is not running."""
    if not sweep.is_running:
        raise UserInputError(f"{sweep.name}: it does not run now ({sweep.state})")
    display = make_progress("auto")
    display.note(f"follow   {sweep.name} of process {sweep.driver}; Ctrl-C detaches and leaves it running")
    try:
        follower = Follower(sweep, sweep.description)
        with display:
            display.update(follower.state())
            while _is_driven(sweep, sweep.description.host):
                for record, is_best in follower.poll():
                    display.update(follower.state(), record, is_best)
                display.update(follower.state())
                time.sleep(POLL_S)
            for record, is_best in follower.poll():
                display.update(follower.state(), record, is_best)
    except KeyboardInterrupt:
        display.note(f"detached; {sweep.name} continues")
        return 0
    ended = StoredSweep(sweep.folder)  # read again, because the state has changed
    display.note(f"{ended.name}: {ended.state}; {best_command(ended.folder)} prints its winner")
    return 0


def _is_driven(sweep: StoredSweep, host: str) -> bool:
    """Return whether the driver is alive. On another machine, it may seem alive for up to a minute after its end."""
    driver = sweep.driver
    if not driver.isdigit() or host != platform.node():
        return driver != ""
    try:
        os.kill(int(driver), 0)
    except PermissionError:  # the process belongs to another user
        return True
    except ProcessLookupError:
        return False
    return True


def delete(sweep: StoredSweep, uri: str | None = None) -> list[str]:
    """Delete a sweep's folder and its runs at `uri`, by default the recorded store. Return report lines.

    Raises UserInputError and deletes nothing if the sweep is running or the store cannot be reached.
    """
    with (sweep.folder / "lock").open("a") as lock:  # prevents a driver from starting the sweep
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserInputError(f"{sweep.name}: process {sweep.driver} is running it") from error
        lines = [_delete_runs(sweep, uri), f"{sweep.name} is deleted"]
        shutil.rmtree(sweep.folder)
    return lines


def _delete_runs(sweep: StoredSweep, uri: str | None) -> str:
    description = sweep.description
    is_default = not description.config["tracking"].get("uri")  # a moved project has its own store
    uri = uri or (default_uri(sweep.folder.parent.parent) if is_default else description.tracking_uri)
    if "***" in uri:
        raise UserInputError(f"{sweep.name}: the password of {uri} is not stored; set tracking.uri=URI")
    if (file := sqlite_path(uri)) and not file.exists():
        return f"{uri}: the store no longer exists"
    mlflow_store.check_uri(uri)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = list(mlflow_store.search_runs(client, experiments, {mlflow_store.STUDY: description.study}))
    for run in runs:
        client.delete_run(run.info.run_id)
    return f"{count(len(runs), 'run')} of {uri} are deleted; `mlflow gc` removes them permanently"
