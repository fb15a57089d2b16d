"""Helpers of all tests: run the command and read its stores."""

import gc
import io
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
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import settings

import tests.support.any_load.sitecustomize  # noqa: F401  sets limits of measurements
from tests.support.process_state import ModuleWatch, unchanged_process

# Several tests share few cores, on which OpenMP's threads would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Laws: the same examples in every run, and with HYPOTHESIS_PROFILE=soak (`make soak`) many random ones. Without a
# deadline, since the duration of an example depends on the machine.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("soak", deadline=None, max_examples=2000)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)

REPOSITORY = Path(__file__).resolve().parent.parent
# A sweep whose trials take no time.
PROBE = ("workload=probe", "progress=json")

# The folder in which Ray's head keeps its state with RAY_gcs_storage=rocksdb.
STORAGE_VARIABLE = "RAY_gcs_storage_path"

# This checkout comes before an installed one. The existing PYTHONPATH may hold the dependencies.
ANY_LOAD = REPOSITORY / "tests" / "support" / "any_load"
PYTHONPATH = os.pathsep.join(filter(None, [str(REPOSITORY), str(ANY_LOAD), os.environ.get("PYTHONPATH")]))


def examples(count: int) -> settings:
    """Return the settings of a law with its own number of examples; `make soak` tests 20 times as many."""
    return settings(max_examples=20 * count if PROFILE == "soak" else count)


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHONPATH, "COLUMNS": "100", **variables}


@dataclass
class CommandResult:
    code: int
    out: str
    err: str


def run_in_process(main: Callable[[list[str]], object], folder: Path, *arguments: str) -> CommandResult:
    """Run a subcommand's `main` in this process, in a folder: MLflow takes seconds to import."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return CommandResult(code, out.getvalue(), err.getvalue())


class Workspace:
    """A working directory, and the command in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "sweeper", *arguments]

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.path,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, timeout_s: float = 120, **variables: str) -> CommandResult:
        process = self.start(*arguments, **variables)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return CommandResult(process.returncode, out, err)

    @property
    def sweeps(self) -> list[Path]:
        return sorted(path for path in (self.path / "sweeps").iterdir() if path.is_dir() and path.name[0] != ".")

    def trials(self) -> list[Any]:
        """Return the trials of the only study, as Optuna reads them."""
        from sweeper.search.journal import Journal

        (sweep,) = self.sweeps
        with tempfile.TemporaryDirectory() as folder:  # opening a journal may repair it, so a copy is opened
            copy = Path(folder, "study.journal")
            copy.write_bytes((sweep / "study.journal").read_bytes())
            return Journal(copy, "maximize").trials

    def states(self) -> Counter[str]:
        return Counter(trial.state.name for trial in self.trials())

    def outcomes(self) -> Counter[str]:
        """Return how many trials ended with each outcome, as MLflow says."""
        return Counter(run.data.tags["outcome"] for run in self.runs("trial"))

    def runs(self, kind: str, uri: str | None = None) -> list[Any]:
        """Return the runs of a kind ("sweep" or "trial"), as MLflow reads them."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri or f"sqlite:///{self.path}/mlflow.db")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        return list(client.search_runs(experiments, f"tags.`sweeper.kind` = '{kind}'", max_results=5000))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that pytest-xdist's workers end at about the same time."""
    items.sort(key=expected_duration_s, reverse=True)


class ImportsFreezer:
    """Keeps the garbage collector off what was imported: a trial calls it, and would search a million objects.

    Objects are frozen again before the next test once a collection takes long: a trial with collections at set steps
    ends by unfreezing all objects, and tests import further modules.
    """

    LONG_S = 0.05  # CPU time of a collection

    def __init__(self) -> None:
        self._started_s, self._is_due = 0.0, True
        gc.callbacks.append(self._observe)

    def _observe(self, phase: str, info: dict[str, int]) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._started_s = now_s
        elif now_s - self._started_s > self.LONG_S:
            self._is_due = True

    def freeze_if_due(self) -> None:
        if self._is_due:
            gc.freeze()
            self._is_due = False


IMPORTS_FREEZER = ImportsFreezer()


def pytest_runtest_setup() -> None:
    IMPORTS_FREEZER.freeze_if_due()


def expected_duration_s(item: pytest.Item) -> float:
    """Return the seconds that `@pytest.mark.long(seconds)` gives a test; 0 without the mark."""
    mark = item.get_closest_marker("long")
    return float(mark.args[0]) if mark else 0.0


MODULE_WATCH = ModuleWatch()


# A function's fixture for the state that a test leaves, a module's for what the fixtures of the module leave. They are
# set up before the other fixtures of their scope, and torn down after them.
@pytest.fixture(autouse=True)
def unchanged_by_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    with unchanged_process(request.node.name, MODULE_WATCH):
        yield


@pytest.fixture(autouse=True, scope="module")
def unchanged_by_the_module(request: pytest.FixtureRequest) -> Iterator[None]:
    with unchanged_process(request.node.name):
        yield


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs. A copy takes less time than a new one."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("store")
    with chdir(folder):
        MlflowClient(tracking_uri="sqlite:///mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def workspace(tmp_path: Path, empty_store: Path) -> Workspace:
    shutil.copy(empty_store, tmp_path)
    return Workspace(tmp_path)


@pytest.fixture
def run_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., CommandResult]:
    """Run the command in this process, which has its imports, with arguments that start no sweep."""

    def run_cli(*arguments: str) -> CommandResult:
        from sweeper.__main__ import main

        monkeypatch.setattr(sys, "argv", ["sweeper", *arguments])
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE", "token"))  # as the command may set it
        monkeypatch.chdir(tmp_path)
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capfd.readouterr()
        return CommandResult(int(exit_info.value.code or 0), out, err)

    return run_cli


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A `tests.support.ray_cluster.Cluster` of two nodes, or of as many as the test's parameter."""
    from tests.support import lean_ray
    from tests.support.ray_cluster import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    for name, value in lean_ray.VARIABLES.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(getattr(request, "param", 2))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def amd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `tests.support.amd_head.TokenCluster`; tests that use it are of the xdist group amd_cluster."""
    from tests.support.amd_head import amd_head

    with amd_head(tmp_path_factory.mktemp("r")) as cluster:
        yield cluster


@pytest.fixture
def short_ray_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits more than a minute for a node that does not answer; here it waits seconds."""
    for name, value in {"period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))


@pytest.fixture
def external_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's head keeps its state in this folder, and a head that is started there again has it."""
    folder = tmp_path / "gcs"
    folder.mkdir()
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setenv(STORAGE_VARIABLE, str(folder))
    return folder


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Call `condition` until it returns a true value; return that value. Ever less often: some read a database."""
    started_s = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - started_s
        assert waited_s < timeout_s, f"not true within {timeout_s:g} s"
        time.sleep(min(max(0.05, 0.05 * waited_s), 0.2))
    return value


def find_processes(name: str, value: str) -> list[int]:
    """Return the processes that have this environment variable."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


class Server:
    """MLflow's tracking server, on a free port of this machine."""

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
        wait_for(self.answers, timeout_s=180)

    def answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=2).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    shutil.copy(empty_store, server.folder / "server.db")
    try:
        server.start()
        yield server
    finally:
        server.kill()
