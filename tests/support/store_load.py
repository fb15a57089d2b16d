"""Sweeps that write to one store at the same time, and what has to hold in the store after them."""

import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from tests.conftest import Workspace, environment, wait_for
from tests.support import lean_ray
from tests.support.shared_store import SharedStore

RUNS = """
select study.value, number.value, runs.status, outcome.value, score.value
from runs
join tags kind on kind.run_uuid = runs.run_uuid and kind.key = 'sweeper.kind' and kind.value = 'trial'
join tags study on study.run_uuid = runs.run_uuid and study.key = 'sweeper.study'
join tags number on number.run_uuid = runs.run_uuid and number.key = 'sweeper.trial'
left join tags outcome on outcome.run_uuid = runs.run_uuid and outcome.key = 'outcome'
left join latest_metrics score on score.run_uuid = runs.run_uuid and score.key = 'score'
where runs.lifecycle_stage = 'active'
"""
PARENTS = """
select runs.status, count(*) from runs
join tags kind on kind.run_uuid = runs.run_uuid and kind.key = 'sweeper.kind' and kind.value = 'sweep'
where runs.lifecycle_stage = 'active' group by runs.status
"""
FINISHED = "select count(*) from tags where key = 'outcome' and value = 'complete'"


class LocalRay:
    """Ray with a token on this machine, and devices that it only counts."""

    def __init__(self, folder: Path, devices: int) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="ray")  # a short path: those of sockets are limited
        temporary = Path(self._temporary.name)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        options = ["--head", "--port=0", "--include-dashboard=false", "--block", f"--num-gpus={devices}"]
        options += [f"--num-cpus={devices}", '--resources={"accelerator_type:H200": 1}']
        command = lean_ray.command(*options, "--object-store-memory=80000000", f"--temp-dir={temporary}/r")
        variables = environment(**self.variables, **lean_ray.VARIABLES)
        with (folder / "ray.log").open("w") as log:
            self._process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        address = temporary / "r" / "ray_current_cluster"
        try:
            self.address = wait_for(lambda: address.exists() and address.read_text().strip(), timeout_s=180)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def list_overrides(ray: LocalRay, trials: int, sleep_s: float) -> list[str]:
    """Return the overrides of a sweep on one of the devices."""
    sweep = ["workload=probe", "hardware=h200", "search=random", "progress=never", "cluster.max_concurrent_trials=1"]
    return [*sweep, f"cluster.address={ray.address}", f"budget.trials={trials}", f"space.sleep_s={sleep_s}"]


def count_ended_cpu_s() -> float:
    """Return the CPU time of the commands that have ended, with what they started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_alone(folder: Path, ray: LocalRay, trials: int, sleep_s: float) -> tuple[float, float]:
    """Run one sweep on a SQLite file of its own. Return how long the command takes, and its CPU time."""
    workspace = Workspace(folder / "alone")
    workspace.path.mkdir()
    started_s, cpu_s = time.monotonic(), count_ended_cpu_s()
    result = workspace.run(*list_overrides(ray, trials, sleep_s), timeout_s=3600, **ray.variables)
    duration_s, cpu_s = time.monotonic() - started_s, count_ended_cpu_s() - cpu_s
    assert result.code == 0 and workspace.outcomes() == {"complete": trials}, result.err
    return duration_s, cpu_s


def restart_by(store: SharedStore) -> dict[float, Callable[[], None]]:
    """Return interruptions of `SharedSweeps.run`: the server is stopped at a third of the trials, killed at two."""

    def restart(number: int) -> None:
        store.stop_server(number)
        time.sleep(2)
        store.start_server()

    return {1 / 3: partial(restart, signal.SIGTERM), 2 / 3: partial(restart, signal.SIGKILL)}


@dataclass
class SharedOutcome:
    """What sweeps at the same time left in the store."""

    starts: list[int]  # how often each command was started; more than once where results were missing at its end
    trials: int  # trials with a complete run in the store
    lost: int  # trials of the studies without one
    doubled: int  # trials with more than one run
    wrong: int  # runs whose metric differs from the study's
    repeated: int  # trials that ran to their end more than once
    running: int  # runs, of trials or sweeps, that are not finished
    deadlocks: int  # that PostgreSQL has ended
    duration_s: float  # from the first command's start to the last one's end
    store_cpu_s: float  # CPU time of the server and the database
    commands_cpu_s: float  # CPU time of the commands, with their recording processes and reports


class SharedSweeps:
    """Sweeps of the probe, each of one device of the same cluster and with a folder of its own.

    Args:
        trials: of each sweep.
        sleep_s: the duration of a trial.
        user: whose variables the commands get.
    """

    def __init__(
        self, folder: Path, ray: LocalRay, store: SharedStore, count: int, trials: int, sleep_s: float, user: str
    ) -> None:
        self.store, self.trials = store, trials
        self._variables = {**ray.variables, **store.add_user(user)}
        self.workspaces: list[Workspace] = []
        for number in range(count):
            path = folder / f"{user}{number}"
            path.mkdir()
            self.workspaces.append(Workspace(path))
        self._overrides = [*list_overrides(ray, trials, sleep_s), f"tracking.uri={store.uri}"]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def _start(self, number: int) -> None:
        workspace = self.workspaces[number]
        own = [f"seed={number}", f"name={workspace.path.name}", f"space.ledger={workspace.path}/ledger"]
        with self._log(number).open("ab") as log:
            self.processes[number] = subprocess.Popen(
                workspace.command(*self._overrides, *own),
                cwd=workspace.path,
                env=environment(**self._variables),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await_first_trial(self, number: int) -> None:
        """Wait until a sweep runs, since the starts of eight at once take all cores for minutes."""
        ledger, process = self.workspaces[number].path / "ledger", self.processes[number]
        wait_for(lambda: ledger.exists() or process.poll() is not None, timeout_s=300)

    def _log(self, number: int) -> Path:
        return self.workspaces[number].path / "driver.log"

    def count_recorded(self) -> int:
        """Return how many trials are complete in the store."""
        return int(self.store.query(FINISHED).stdout)

    def run(self, interruptions: dict[float, Callable[[], None]], limit_s: float) -> SharedOutcome:
        """Run all sweeps to their ends, and start a command again while results are missing.

        Args:
            interruptions: what is done once this share of all trials is in the store.
        """
        started_s, cpu_s = time.monotonic(), (self.store.cpu_s(), count_ended_cpu_s())
        waiting = sorted(interruptions.items())
        starts = [1] * len(self.workspaces)
        try:
            for number in range(len(self.workspaces)):
                self._start(number)
                self._await_first_trial(number)
            while self.processes:
                assert time.monotonic() - started_s < limit_s, f"the sweeps did not end within {limit_s:g} s"
                if waiting and self.count_recorded() >= waiting[0][0] * self.trials * len(self.workspaces):
                    waiting.pop(0)[1]()
                for number, process in list(self.processes.items()):
                    if process.poll() is not None:
                        del self.processes[number]
                        if process.returncode:
                            starts[number] += 1
                            assert starts[number] < 10, (self.workspaces[number].path / "driver.log").read_text()[
                                -3000:
                            ]
                            self._start(number)
                time.sleep(1)
        finally:
            for process in self.processes.values():
                os.killpg(process.pid, signal.SIGKILL)
        assert not waiting, "the sweeps ended before the server was interrupted"
        used_s = self.store.cpu_s() - cpu_s[0], count_ended_cpu_s() - cpu_s[1]
        return self._outcome(starts, time.monotonic() - started_s, *used_s)

    @property
    def folders(self) -> list[Path]:
        return [workspace.path for workspace in self.workspaces]

    def report(self, format: str) -> str:
        """Return the report on all sweeps of the store, in one of its formats."""
        folder = self.folders[0]
        command = [sys.executable, "-m", "sweeper", "report", f"tracking.uri={self.store.uri}", f"format={format}"]
        printed = subprocess.run(
            command, cwd=folder, env=environment(**self._variables), check=True, capture_output=True
        )
        return (folder / "sweeps" / "report.html").read_text() if format == "html" else printed.stdout.decode()

    def _outcome(
        self, starts: list[int], duration_s: float, store_cpu_s: float, commands_cpu_s: float
    ) -> SharedOutcome:
        rows = [line.split("|") for line in self.store.query(RUNS).stdout.decode().splitlines()]
        runs = Counter((study, int(number)) for study, number, *_ in rows)
        scores = {(study, int(number)): float(score or "nan") for study, number, *_, score in rows}
        studies = {self._study_id(workspace): workspace.trials() for workspace in self.workspaces}
        expected = {(study, trial.number): trial.value for study, trials in studies.items() for trial in trials}
        complete = {(study, int(number)) for study, number, status, outcome, _ in rows if outcome == "complete"}
        parents = dict(line.split("|") for line in self.store.query(PARENTS).stdout.decode().splitlines())
        unfinished = sum(status != "FINISHED" for _, _, status, *_ in rows)
        ledgers = [Counter((workspace.path / "ledger").read_text().splitlines()) for workspace in self.workspaces]
        deadlocks = self.store.query("select deadlocks from pg_stat_database where datname = 'mlflow'").stdout
        return SharedOutcome(
            starts,
            len(complete),
            len(self.workspaces) * self.trials - len(complete & expected.keys()),
            sum(count > 1 for count in runs.values()),
            sum(scores.get(key) != value for key, value in expected.items()),
            sum(ledger.total() - len(ledger) for ledger in ledgers),
            unfinished + sum(int(count) for status, count in parents.items() if status != "FINISHED"),
            int(deadlocks),
            duration_s,
            store_cpu_s,
            commands_cpu_s,
        )

    def _study_id(self, workspace: Workspace) -> str:
        """Return the id of the workspace's study, by which the store has its runs."""
        (sweep,) = workspace.sweeps
        return str(json.loads((sweep / "sweep.json").read_text())["study"])
