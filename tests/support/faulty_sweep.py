"""A sweep under faults of its cluster, and what has to hold after it."""

import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

from tests.conftest import environment, wait_for
from tests.support.cluster_faults import Fault, World
from tests.support.virtual_cluster import GPUS, NodeWorkspace


@dataclass
class Outcome:
    """What a sweep under faults left."""

    faults: int  # how often a fault was applied
    starts: int  # how often the command was started; more than once where the driver ended without having finished
    trials: int  # trials with an outcome; one that was cancelled is tried again under another number, and not counted
    timed_out: int  # how many of them took longer than their limit, as their answer did not arrive
    lost: int  # trials that the search proposed and that have no outcome in the store
    doubled: int  # trials with more than one outcome
    repeated: int  # ranks of trials that ran to their end more than once, since their result did not arrive
    longest_stall_s: float  # the longest time between the ends of two consecutive trials, as the driver learned of them
    duration_s: float  # of the whole sweep
    left_over: int  # processes of trials that outlived the sweep
    running: int  # runs that the store still takes to be running
    misdated: int  # runs whose times are not those of the sweep by the driver's clock


class FaultySweep:
    """A sweep of the probe under faults that begin at random times.

    Args:
        trials: the budget; each trial runs on two devices of one node.
        sleep_s: the duration of a trial.
        minutes: the search ends after so long, if its trials have not ended before; no fault begins later.
        overrides: of its configuration.

    Attributes:
        applied: a line for each fault so far.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        trials: int,
        sleep_s: float = 1.0,
        minutes: float | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.world, self.applied = world, list[str]()
        self.faults_until_s = math.inf if minutes is None else 60 * minutes
        self.workspace = NodeWorkspace(folder, world.cluster, world.driver)
        sizes = [f"gpus={GPUS}", f"budget.trials={trials}", f"space.sleep_s={sleep_s}", f"space.ledger={folder}/ledger"]
        sizes += [] if minutes is None else [f"budget.time_s={60 * minutes:g}"]
        limits = ["trial.timeout_s=40", "trial.retries=20"]
        store = [f"tracking.uri={world.uri}"] if world.uri else []
        self.overrides = ["workload=probe", "search=random", f"name={folder.name}", *sizes, *limits, *store]
        self.overrides += overrides

    def run(self, faults: Iterable[Fault], rng: random.Random, pause_s: tuple[float, float], limit_s: float) -> Outcome:
        """Run the sweep to its end, with one fault after another until there are none left."""
        self._started_s = started_s = time.monotonic()
        starts = 1
        process = self._start(starts)
        waiting = iter(faults)
        next_s = started_s + rng.uniform(*pause_s)
        while True:
            now_s = time.monotonic()
            assert now_s - started_s < limit_s, f"the sweep did not end within {limit_s:g} s"
            if process.poll() is not None:
                if self._has_finished(process.returncode, starts):
                    break
                starts += 1
                assert starts <= 2 + len(self.applied), self._log(starts - 1).read_text()[-3000:]
                self._repair()
                process = self._start(starts)
            if self._has_begun() and next_s < now_s < started_s + self.faults_until_s:
                if fault := next(waiting, None):
                    if self.applied:
                        self._repair()
                    what = f"{fault.apply.__name__} {fault.node} for {fault.duration_s:g} s"
                    self.applied.append(f"after {now_s - started_s:.0f} s: {what}")
                    self._apply(fault)
                next_s = time.monotonic() + rng.uniform(*pause_s)
            elif now_s > started_s + self.faults_until_s:
                self._repair()
            time.sleep(0.2)
        return self._outcome(len(self.applied), starts, time.monotonic() - started_s)

    def _log(self, start: int) -> Path:
        return self.workspace.path / f"driver{start}.log"

    def _start(self, start: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sweeper", *self.workspace.arguments(*self.overrides)]
        with self._log(start).open("w") as log:
            return self.world.network.nodes[self.world.driver].start(
                *command,
                folder=self.workspace.path,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(**self.world.cluster.variables),
            )

    def _has_finished(self, code: int, start: int) -> bool:
        """Return whether the command ended because nothing was left to run; 1 says so too if trials have failed."""
        return code == 0 or (code == 1 and "\nextend " in self._log(start).read_text())

    def _has_begun(self) -> bool:
        return (self.workspace.path / "ledger").exists()

    def _apply(self, fault: Fault) -> None:
        with fault.apply(fault.node, self.world):
            time.sleep(fault.duration_s)

    def _repair(self) -> None:
        """Start Ray again where a fault has ended it."""
        for name in self.world.cluster.rays:
            self.world.cluster.revive(name)

    def _outcome(self, faults: int, starts: int, duration_s: float) -> Outcome:
        with suppress(AssertionError):
            wait_for(lambda: not self._left_over(), timeout_s=60)
        store = self.world.store
        (parent,) = (
            run for run in self.workspace.runs("sweep", store) if run.info.run_name == self.workspace.path.name
        )
        ended = [
            run
            for run in self.workspace.runs("trial", store)
            if run.data.tags["mlflow.parentRunId"] == parent.info.run_id and run.data.tags["outcome"] != "cancelled"
        ]
        runs = [run for run in ended if "remeasured_trial" not in run.data.tags]
        comparisons = len(ended) - len(runs)  # of nodes, at equal work, each of which the ledger has once more
        per_trial = Counter(run.data.tags["sweeper.trial"] for run in runs)
        lines = Counter((self.workspace.path / "ledger").read_text().splitlines())
        proposed = self._list_proposed()
        began_ms = 1e3 * (time.time() - (time.monotonic() - self._started_s))
        ends_s = sorted(trial.datetime_complete.timestamp() for trial in proposed if trial.datetime_complete)
        return Outcome(
            faults,
            starts,
            len(per_trial),
            sum(run.data.tags["outcome"] == "timed_out" for run in runs),
            len({str(trial.number) for trial in proposed} - per_trial.keys()),
            sum(count > 1 for count in per_trial.values()),
            lines.total() - len(lines) - GPUS * comparisons,
            max((later - earlier for earlier, later in pairwise(ends_s)), default=0.0),
            duration_s,
            self._left_over(),
            sum(run.info.status == "RUNNING" for run in [parent, *runs]),
            sum(not began_ms <= run.info.start_time <= run.info.end_time <= 1e3 * time.time() for run in runs),
        )

    def _list_proposed(self) -> list[FrozenTrial]:
        """Return the trials of the search in the study, but the cancelled ones: they are proposed again.

        Times are of the driver's clock; a node's may be wrong.
        """
        (sweep,) = self.workspace.sweeps
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copy(sweep / "study.journal", folder)
            storage = JournalStorage(JournalFileBackend(copy))
            (study,) = storage.get_all_studies()
            trials = storage.get_all_trials(study._study_id)
        searched = [trial for trial in trials if "remeasurement" not in trial.user_attrs]
        return [trial for trial in searched if trial.user_attrs.get("record", {}).get("status") != "cancelled"]

    def _left_over(self) -> int:
        return sum(len(node.pids_of("ray::Worker")) for node in self.world.cluster.nodes.values())
