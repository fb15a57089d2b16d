"""Faults of a cluster's nodes and network, a sweep under them, and what has to hold after it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from tests.conftest import environment, wait_for
from tests.support.virtual_cluster import Cluster, NodeWorkspace
from tests.support.virtual_mlflow import start_mlflow, uri_of
from tests.support.virtual_network import child_of

WORKERS = ("first", "second")
DRIVER, STORE = "driver", "store"
SLOW_KBIT_S = 256
# Wall clocks of a program an hour ahead, its other clocks left as they are. libfaketime 0.9.10 cannot do that to Python
# 3.11, whose `time.sleep` then fails with EINVAL.
HOUR_AHEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, t);
  if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += 3600;
  return code;
}
time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *t, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


class World:
    """A cluster that faults act on.

    Args:
        is_whole: the driver and MLflow's server have nodes of their own; otherwise the driver runs on the head and
            writes its results to a file, which takes half the time.
    """

    def __init__(self, folder: Path, is_whole: bool = True) -> None:
        self.driver = DRIVER if is_whole else "head"
        self.cluster = Cluster(folder, WORKERS, *([DRIVER], [STORE]) if is_whole else ())
        self.network, self.uri = self.cluster.network, ""
        self.store: str | None = None
        if is_whole:
            self.server = start_mlflow(self.network.nodes[STORE], folder)
            self.uri, self.store = uri_of(self.network.nodes[STORE]), f"sqlite:///{folder}/server.db"

    def close(self) -> None:
        self.cluster.close()


@contextmanager
def cut_link(node: str, world: World) -> Iterator[None]:
    world.network.disconnect(node)
    yield
    world.network.connect(node)


@contextmanager
def block(source: str, target: str, world: World) -> Iterator[None]:
    world.network.block(source, target)
    yield
    world.network.unblock(source, target)


@contextmanager
def slow_link(node: str, world: World) -> Iterator[None]:
    world.network.limit_rate(node, SLOW_KBIT_S)
    yield
    world.network.lift_rate(node)


@contextmanager
def kill_node(node: str, world: World) -> Iterator[None]:
    world.network.nodes[node].kill()
    yield
    world.cluster.restore(node)


@contextmanager
def lose_node(node: str, world: World) -> Iterator[None]:
    world.network.nodes[node].kill()
    yield


@contextmanager
def stop_workers(node: str, world: World) -> Iterator[None]:
    """Stop the processes that run trials; the node's Ray goes on answering."""
    pids = world.network.nodes[node].pids_of("ray::Worker")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def fill_tmp(node: str, world: World) -> Iterator[None]:
    world.network.nodes[node].run("dd", "if=/dev/zero", "of=/tmp/filling", "bs=1M")
    yield
    world.network.nodes[node].run("rm", "/tmp/filling")


@contextmanager
def shift_clock(node: str, world: World) -> Iterator[None]:
    """Let a node come back with a wall clock that is an hour ahead. Needs a compiler."""
    library = world.cluster.folder / "hour_ahead.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=HOUR_AHEAD, text=True, check=True)
    world.network.nodes[node].kill()
    world.network.add(node)
    world.cluster.start_worker(node, LD_PRELOAD=str(library))
    yield
    world.network.nodes[node].kill()
    world.cluster.restore(node)


@contextmanager
def restart_store(world: World) -> Iterator[None]:
    os.kill(child_of(world.server.pid), signal.SIGKILL)
    world.server.wait()
    yield
    world.server = start_mlflow(world.network.nodes[STORE], world.cluster.folder)


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what is done to the cluster while it lasts, and for how long."""

    apply: Callable[[World], AbstractContextManager[None]]
    duration_s: float


FAULTS = {
    **{f"link of a worker down, {s} s": Fault(partial(cut_link, WORKERS[0]), s) for s in (5, 30, 120)},
    **{f"link of the driver down, {s} s": Fault(partial(cut_link, DRIVER), s) for s in (5, 30, 120)},
    **{f"link of the head down, {s} s": Fault(partial(cut_link, "head"), s) for s in (5, 30, 120)},
    "from a worker to the head nothing arrives, 30 s": Fault(partial(block, WORKERS[0], "head"), 30),
    "from the driver to a worker nothing arrives, 30 s": Fault(partial(block, DRIVER, WORKERS[0]), 30),
    f"a worker receives {SLOW_KBIT_S} kbit/s, 60 s": Fault(partial(slow_link, WORKERS[0]), 60),
    "a node killed, back after 10 s": Fault(partial(kill_node, WORKERS[0]), 10),
    "a node answers and runs nothing, 60 s": Fault(partial(stop_workers, WORKERS[0]), 60),
    "a node comes back with its clock an hour ahead, for 20 s": Fault(partial(shift_clock, WORKERS[0]), 20),
    "/tmp of a node full, 30 s": Fault(partial(fill_tmp, WORKERS[0]), 30),
    "the store restarted after 20 s": Fault(restart_store, 20),
}


@dataclass
class Outcome:
    """What a sweep under faults left.

    Attributes:
        faults: how often a fault was applied.
        starts: how often the command was started; more than once where the driver ended without having finished.
        trials: trials with an outcome; one that was cancelled is tried again under another number, and not counted.
        timed_out: how many of them took longer than their limit, as their answer did not arrive.
        lost: trials of the budget without an outcome.
        doubled: trials with more than one outcome.
        repeated: ranks of trials that ran to their end more than once, since their result did not arrive.
        longest_stall_s: the longest time between the ends of two consecutive trials, as the driver learned of them.
        duration_s: of the whole sweep.
        left_over: processes of trials that outlived the sweep.
        running: runs that the store still takes to be running.
        misdated: runs whose times are not those of the sweep by the driver's clock.
    """

    faults: int
    starts: int
    trials: int
    timed_out: int
    lost: int
    doubled: int
    repeated: int
    longest_stall_s: float
    duration_s: float
    left_over: int
    running: int
    misdated: int


class FaultySweep:
    """A sweep of the probe under faults that begin at random times.

    Args:
        trials: the budget; each trial runs on two devices of one node.
        sleep_s: the duration of a trial.
    """

    def __init__(self, world: World, folder: Path, trials: int, sleep_s: float = 1.0) -> None:
        self.world, self.trials = world, trials
        self.workspace = NodeWorkspace(folder, world.cluster, world.driver)
        sizes = ["gpus=2", f"budget.trials={trials}", f"space.sleep_s={sleep_s}", f"space.ledger={folder}/ledger"]
        limits = ["trial.timeout_s=40", "trial.retries=20"]
        store = [f"tracking.uri={world.uri}"] if world.uri else []
        self.overrides = ["workload=probe", "search=random", f"name={folder.name}", *sizes, *limits, *store]

    def run(self, faults: list[Fault], rng: random.Random, pause_s: tuple[float, float], limit_s: float) -> Outcome:
        """Run the sweep to its end, with one fault after another until there are none left."""
        self._started_s = started_s = time.monotonic()
        applied, starts = 0, 1
        process = self._start(starts)
        waiting = list(faults)
        next_s = started_s + rng.uniform(*pause_s)
        while True:
            assert time.monotonic() - started_s < limit_s, f"the sweep did not end within {limit_s:g} s"
            if process.poll() is not None:
                if self._has_finished(process.returncode, starts):
                    break
                starts += 1
                assert starts <= 2 + applied, self._log(starts - 1).read_text()[-3000:]
                self._repair()
                process = self._start(starts)
            if waiting and self._has_begun() and time.monotonic() > next_s:
                self._apply(waiting.pop(0))
                applied += 1
                next_s = time.monotonic() + rng.uniform(*pause_s)
            time.sleep(0.2)
        return self._outcome(applied, starts, time.monotonic() - started_s)

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
        with fault.apply(self.world):
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
        runs = [
            run
            for run in self.workspace.runs("trial", store)
            if run.data.tags["mlflow.parentRunId"] == parent.info.run_id
            and run.data.tags["outcome"] != "cancelled"
            and "remeasured_trial" not in run.data.tags  # nodes that are compared with one another
        ]
        per_trial = Counter(run.data.tags["sweeper.trial"] for run in runs)
        lines = Counter((self.workspace.path / "ledger").read_text().splitlines())
        ends_s = self._list_ends_s()
        began_ms = 1e3 * (time.time() - (time.monotonic() - self._started_s))
        return Outcome(
            faults,
            starts,
            len(per_trial),
            sum(run.data.tags["outcome"] == "timed_out" for run in runs),
            self.trials - len(per_trial),
            sum(count > 1 for count in per_trial.values()),
            lines.total() - len(lines),
            max((later - earlier for earlier, later in pairwise(ends_s)), default=0.0),
            duration_s,
            self._left_over(),
            sum(run.info.status == "RUNNING" for run in [parent, *runs]),
            sum(not began_ms <= run.info.start_time <= run.info.end_time <= 1e3 * time.time() for run in runs),
        )

    def _list_ends_s(self) -> list[float]:
        """Return when the driver stored each trial's end, by its own clock; a node's may be wrong."""
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        (sweep,) = self.workspace.sweeps
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copy(sweep / "study.journal", folder)
            storage = JournalStorage(JournalFileBackend(copy))
            (study,) = storage.get_all_studies()
            trials = storage.get_all_trials(study._study_id)
        return sorted(trial.datetime_complete.timestamp() for trial in trials if trial.datetime_complete)

    def _left_over(self) -> int:
        return sum(len(node.pids_of("ray::Worker")) for node in self.world.cluster.nodes.values())
