"""What the tests share: running the real command, and reading the real stores afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import settings

# Several tests share few cores: threads that wait for one another there wait for a scheduler's time slices.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more of the machine than of the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

REPOSITORY = Path(__file__).resolve().parent.parent
# A sweep that costs nothing but its own machinery.
PROBE = ("workload=probe", "progress=json")


# This checkout before any that is installed, and whatever a machine without a registry has its packages in.
PYTHONPATH = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHONPATH, "COLUMNS": "100", **more}


@dataclass
class Done:
    code: int
    out: str
    err: str


class Place:
    """A working directory of its own, and the command in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "sweeper", *words]

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            cwd=self.path,
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, timeout_s: float = 120, **more: str) -> Done:
        process = self.start(*words, **more)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Done(process.returncode, out, err)

    @property
    def sweeps(self) -> list[Path]:
        return sorted(path for path in (self.path / "sweeps").iterdir() if path.is_dir() and path.name[0] != ".")

    def trials(self) -> list[Any]:
        """The trials of the only study, as Optuna reads them."""
        from sweeper.search.storage import open_journal

        (sweep,) = self.sweeps
        with tempfile.TemporaryDirectory() as folder:  # reading repairs: not under a driver that writes
            copy = Path(folder, "study.journal")
            copy.write_bytes((sweep / "study.journal").read_bytes())
            return open_journal(copy, "maximize").get_trials(deepcopy=False)

    def states(self) -> Counter[str]:
        return Counter(trial.state.name for trial in self.trials())

    def runs(self, kind: str, uri: str | None = None) -> list[Any]:
        """The runs of a kind ("sweep" or "trial"), as MLflow reads them."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri or f"sqlite:///{self.path}/mlflow.db")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        return list(client.search_runs(experiments, f"tags.`sweeper.kind` = '{kind}'", max_results=5000))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that pytest-xdist's workers end at about the same time."""
    items.sort(key=expected_duration_s, reverse=True)


def expected_duration_s(item: pytest.Item) -> float:
    """Return the seconds that `@pytest.mark.long(seconds)` gives a test; 0 without the mark."""
    mark = item.get_closest_marker("long")
    return float(mark.args[0]) if mark else 0.0


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables with nothing in them, to be copied: making them takes longer than filling them."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("store")
    with chdir(folder):
        MlflowClient(tracking_uri="sqlite:///mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def place(tmp_path: Path, empty_store: Path) -> Place:
    shutil.copy(empty_store, tmp_path)
    return Place(tmp_path)


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command with words that start nothing, in this process: its imports cost more than its answer."""

    def say(*words: str) -> Done:
        from sweeper.__main__ import main

        monkeypatch.setattr(sys, "argv", ["sweeper", *words])
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.chdir(tmp_path)
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return say


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A `tests.support.ray_cluster.Cluster` of two nodes."""
    from tests.support.ray_cluster import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    found = Cluster(2)
    yield found
    found.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own patience with a node that does not answer is more than a minute."""
    for name, value in {"period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))


def wait_for(what: Any, timeout_s: float = 60) -> Any:
    """Whatever `what` returns once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def processes_with(name: str, value: str) -> list[int]:
    """The processes that have this environment variable."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


class Server:
    """MLflow's own, on a free port of this machine."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination", f"{self.folder}/artifacts",
        ]  # fmt: skip
        env = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", MLFLOW_DISABLE_TELEMETRY="true")
        log = (self.folder / "server.log").open("a")
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
        wait_for(self.answers)

    def answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=2).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()
