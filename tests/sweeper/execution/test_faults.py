"""Fault injection: random faults for minutes. The results must equal those of a sweep without faults."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sweeper.config.schema import Search
from sweeper.config.space import Interval, Space
from sweeper.search.study import Study
from tests.conftest import STORAGE_VARIABLE, Server, Workspace, find_processes, wait_for
from tests.support.ray_cluster import Cluster, RemoteNode, count_completions, sweep_arguments
from tests.support.studies import SCORE, ask_trial, finished
from workloads.api.contract import Rank
from workloads.api.trial import run_trial

# Messages with which a driver may end, with code 1, or fail to start, with 1 or 2.
EXPECTED_ERRORS = (
    "No space left on device",
    "does not respond; finished trials are kept",
    "nothing responds there",
    "no longer responds; nothing was started",
    "no Ray cluster responds",
)


class FaultInjector:
    """A sweep with random faults, on a cluster and a node behind a link, with an MLflow server and a small disk.

    Attributes:
        injected: how often each fault was injected.
        driver_ended: how often the driver ended and was started again.
    """

    def __init__(
        self, workspace: Workspace, cluster: Cluster, server: Server, disk: Path, trials: int, seed: int
    ) -> None:
        self.workspace, self.cluster, self.server, self.disk, self.trials = workspace, cluster, server, disk, trials
        self.node_count = len(cluster.nodes)  # without the remote one
        self.remote_node = RemoteNode(cluster)
        self.injected = Counter[str]()
        self.driver_ended = 0
        self._rng = random.Random(seed)
        self._repairs: dict[str, tuple[float, Callable[[], None]]] = {}  # by fault: when it is due, and how
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        overrides = ["space.sleep_s=1.0", "trial.retries=1000", "trial.timeout_s=10", "name=faults"]
        overrides += [f"dir={self.disk}", f"tracking.uri={self.server.uri}"]
        arguments = sweep_arguments(self.workspace, self.cluster, self.trials, *overrides)
        return self.workspace.start(*arguments, RAY_AUTH_MODE="disabled", SWEEPER_TEST=self.workspace.path.name)

    # ── faults ──

    def faults(self) -> list[Callable[[], None]]:
        """Return all faults but the loss of the head, which takes a minute to be noticed."""
        faults = [self.kill_worker, self.stop_worker, self.lose_node, self.join, self.kill_driver]
        return [*faults, self.cut_off, self.stop_server, self.suspend_server, self.fill_disk, self.restart_head]

    def inject(self) -> None:
        """Inject a random fault, unless it is present already."""
        fault = self._rng.choice(self.faults())
        if fault.__name__ not in self._repairs:
            self.injected[fault.__name__] += 1
            fault()

    def kill_worker(self, signum: int = signal.SIGKILL) -> None:
        if pids := self.cluster.worker_pids():
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(pids), signum)

    def stop_worker(self) -> None:
        self.kill_worker(signal.SIGSTOP)

    def lose_node(self) -> None:
        self.cluster.lose(self.cluster.nodes.pop(self._rng.randrange(len(self.cluster.nodes))))
        self.cluster.nodes.append(self.cluster.add())

    def join(self) -> None:
        if len(self.cluster.nodes) < 4:
            self.cluster.nodes.append(self.cluster.add())

    def kill_driver(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.restart_driver()

    def cut_off(self) -> None:
        self.remote_node.cut_off()
        self._repair_later("cut_off", self._rng.choice([2.0, 20.0]), self.remote_node.reconnect)

    def stop_server(self) -> None:
        self.server.kill()
        self._repair_later("stop_server", self._rng.uniform(2, 60), self.server.start)

    def suspend_server(self) -> None:
        """Let the server accept connections and answer none."""
        self._signal_server(signal.SIGSTOP)
        self._repair_later("suspend_server", self._rng.uniform(2, 20), lambda: self._signal_server(signal.SIGCONT))

    def _signal_server(self, signum: int) -> None:
        with suppress(ProcessLookupError):  # it may be stopped
            os.killpg(self.server.process.pid, signum)

    def fill_disk(self) -> None:
        filler = self.disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        self._repair_later("fill_disk", self._rng.uniform(2, 10), lambda: filler.unlink())

    def restart_head(self) -> None:
        """Let the head be away for a while. The driver and the nodes wait for it."""
        self.cluster.restart_head(self._rng.uniform(1, 4))

    def lose_head(self) -> None:
        """Lose the head and then all nodes, and start them again at the same address."""
        self.injected["lose_head"] += 1
        self.repair(everything=True)
        port = self.cluster.port
        self.cluster.lose_head()
        _, err = self.process.communicate(timeout=120)
        assert self.is_expected(err), err
        self.cluster.lose_all()
        self.remote_node.close()
        storage = Path(os.environ[STORAGE_VARIABLE])
        shutil.rmtree(storage)  # else the head would look for the nodes that it had
        storage.mkdir()
        self.cluster = Cluster(self.node_count, port)
        self.remote_node = RemoteNode(self.cluster)
        self.restart_driver()

    # ── repairs ──

    def _repair_later(self, fault: str, delay_s: float, repair: Callable[[], None]) -> None:
        self._repairs[fault] = (time.monotonic() + delay_s, repair)

    def repair(self, *, everything: bool = False) -> None:
        """Make the repairs that are due, and replace nodes that did not survive."""
        for fault, (due_s, repair) in list(self._repairs.items()):
            if everything or time.monotonic() > due_s:
                del self._repairs[fault]
                repair()
        if self.remote_node.process.poll() is not None:
            self.remote_node.start()
        if self.cluster.count_alive() < 1 + self.node_count:  # with the head
            self.cluster.nodes.append(self.cluster.add())

    def restart_driver(self) -> None:
        """Start the driver again, after all repairs."""
        self.driver_ended += 1
        self.repair(everything=True)
        self.process = self._start()

    def keep_running(self) -> bool:
        """Restart a driver that ended with an expected error. Returns False once the sweep is complete."""
        if self.process.poll() is None:
            return True
        if self.process.returncode == 0:
            return False
        _, err = self.process.communicate()
        assert self.is_expected(err), err
        self.restart_driver()
        return True

    def is_expected(self, err: str) -> bool:
        return self.process.returncode in (1, 2) and any(message in err for message in EXPECTED_ERRORS)

    def run(self, seconds: float) -> None:
        """Inject a fault every few seconds, and lose the head after half of the time."""
        started_s = time.monotonic()
        head_lost = False
        while time.monotonic() < started_s + seconds and self.keep_running():
            self._wait(self._rng.uniform(2, 12))
            if not head_lost and time.monotonic() > started_s + seconds / 2:
                head_lost = True
                self.lose_head()
            self.inject()
        self.repair(everything=True)

    def run_each_once(self, names: Sequence[str]) -> None:
        """Inject each of these faults once, or of all faults without names, in random order."""
        faults = [fault for fault in self.faults() if fault.__name__ in names or not names]
        for fault in self._rng.sample(faults, len(faults)):
            self._wait_for_trials(2)
            self.injected[fault.__name__] += 1
            fault()
        self._wait(2)
        self.repair(everything=True)

    def _wait_for_trials(self, count: int) -> None:
        """Wait until `count` more trials have ended, so that a fault meets a running sweep on any machine."""
        enough = count_completions(self.workspace).total() + 2 * count  # of both ranks
        until_s = time.monotonic() + 180
        while count_completions(self.workspace).total() < enough:
            assert self.keep_running(), "the sweep ended before all faults were injected"
            assert time.monotonic() < until_s, "no trial ends"
            self._wait(0.5)

    def _wait(self, seconds: float) -> None:
        """Wait while making the repairs that are due."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(0.5)
            self.repair()

    def finish(self) -> str:
        """Run the sweep to its end without faults. Returns the driver's output."""
        while True:
            out, err = self.process.communicate(timeout=1200)
            if not self.is_expected(err):
                assert self.process.returncode in (0, 1), err  # 1: some trials timed out
                return out + err
            self.restart_driver()

    def close(self) -> None:
        for _, repair in self._repairs.values():  # no `repair`, since Ray ends a process that asks a lost head
            repair()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.remote_node.close()
        self.cluster.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    small = tmp_path / "disk"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield small
    subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.fixture
def injector(
    request: pytest.FixtureRequest,
    workspace: Workspace,
    short_ray_timeouts: None,
    external_storage: Path,
    cluster: Cluster,
    server: Server,
    disk: Path,
) -> Iterator[FaultInjector]:
    trials, seed = request.param
    injector = FaultInjector(workspace, cluster, server, disk, trials, seed)
    yield injector
    injector.close()


# The faults that `make test` injects: one each of a worker, the server, the driver and the head. The loss of a node has
# tests of its own (test_lost_nodes.py).
FEW_FAULTS = ("kill_worker", "suspend_server", "kill_driver", "restart_head")


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("seconds", "names", "cluster", "injector"),
    [
        # Fewer than 20 trials: plots of a search take as long as they do. A node less to start.
        pytest.param(0, FEW_FAULTS, 1, (18, 2), id="few_once", marks=pytest.mark.long(60)),
        pytest.param(0, (), 2, (60, 1), id="each_once", marks=pytest.mark.soak),
        # So many trials that the sweep outlasts its faults: four gangs may end four trials a second.
        pytest.param(100, (), 2, (350, 1), id="short", marks=pytest.mark.soak),
        pytest.param(600, (), 2, (2400, 0), id="ten_minutes", marks=pytest.mark.soak),
    ],
    indirect=["cluster", "injector"],
)
def test_a_sweep_with_faults_has_the_results_of_one_without(
    workspace: Workspace, tmp_path: Path, injector: FaultInjector, seconds: float, names: Sequence[str]
) -> None:
    """Every trial has one result, and only trials that were running or queued at a fault run again.

    The faults: workers killed and stopped, nodes lost, joining and cut off, the driver and the head killed, the head
    restarted, MLflow's server down or suspended, the disk full.
    """
    if seconds:
        injector.run(seconds)
    else:
        injector.run_each_once(names)
    output = injector.finish()
    states = sweep_directory(injector).states()
    print(f"{dict(injector.injected)}, driver ended {injector.driver_ended} times, {Counter(states)}")

    runs = workspace.runs("trial", injector.server.uri)
    searched = [run for run in runs if "remeasured_trial" not in run.data.tags]
    assert len({run.data.tags["sweeper.trial"] for run in runs}) == len(runs)
    assert len(searched) == injector.trials and not sweep_directory(injector).states()["RUNNING"], output
    outcomes = Counter(run.data.tags["outcome"] for run in searched)
    assert set(outcomes) <= {"complete", "timed_out"} and outcomes["timed_out"] < injector.trials / 10, outcomes
    repeated = sum(int(run.data.tags["attempts"]) - 1 for run in runs) + len(runs) - len(searched)
    in_flight = 2 * 5 * injector.driver_ended  # two trials of each gang
    completions = count_completions(workspace)
    # Twice for each repeated trial, because a gang that is cut off also runs its next trial.
    assert completions.total() <= 2 * (injector.trials + 2 * repeated + in_flight)
    assert len(completions) >= 2 * outcomes["complete"]

    for pid in injector.cluster.worker_pids():  # a stopped worker ends only after it continues
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not injector.cluster.worker_pids())
    wait_for(lambda: not injector.cluster.count_placement_groups())
    wait_for(lambda: not find_processes("SWEEPER_TEST", workspace.path.name))

    values, expected = searched_values(sweep_directory(injector)), compute_expected_values(tmp_path, injector.trials)
    assert values.keys() == expected.keys()
    assert all(values[point] in (expected[point], None) for point in values)
    assert sum(value is None for value in values.values()) == outcomes["timed_out"]


def compute_expected_values(folder: Path, trials: int) -> dict[Any, float | None]:
    """Return the objective of each point of the same search when one process runs its trials."""
    space = Space({"x": Interval(-10.0, 10.0), "y": Interval(-10.0, 10.0)})
    study = Study(folder / "expected.journal", {}, space, Search("random"), 3, SCORE)
    values: dict[Any, float | None] = {}
    for _ in range(trials):
        trial = ask_trial(study)
        values[trial.params["x"], trial.params["y"]] = run_trial("probe", trial.params, Rank()).metrics["score"]
        study.tell(finished(trial))
    return values


def sweep_directory(injector: FaultInjector) -> Workspace:
    """Return the directory with the sweep, which is on the small disk."""
    return Workspace(injector.disk)


def searched_values(workspace: Workspace) -> dict[Any, float | None]:
    """Return the objective of each searched point; None where it has none."""
    searched = [trial for trial in workspace.trials() if "remeasurement" not in trial.user_attrs]
    return {(trial.params["x"], trial.params["y"]): trial.value for trial in searched}
