"""Nodes without a sweep's code get it, and nodes with another version of ours are left out."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeper.execution import shipping
from sweeper.execution.code_probe import read_code
from sweeper.execution.shipping import SweepCode, check_size
from sweeper.execution.worker import SHIPPED_DIRECTORY, localize
from tests.conftest import REPOSITORY, CommandResult, Workspace, wait_for
from tests.support.ray_cluster import BareNode, Cluster
from workloads.api.errors import UserInputError

SWEEP = ["hardware=h200", "gpus=4", "finals.top=0", "search=grid", "progress=never", "cluster.insecure=true"]
WORKLOAD = """
from dataclasses import dataclass

from workloads.api.contract import Measurement, Workload


@dataclass(frozen=True)
class Parameters:
    x: int = 0


class Sleep(Workload):
    name = "sleep"
    Parameters = Parameters
    benchmark_version = "sleep/1"
    max_world_size = None

    def run(self, parameters, rank):
        return Measurement(executed={"x": parameters.x}, step_times_s=[0.5], machine_info={})
"""
SWEEPS = {
    "class": ["--config-dir", "user/conf", "workload=sleep", "space.env.NCCL_DEBUG=WARN,INFO"],
    "command": ["--config-dir", "user/conf", "workload=tuner", "command.directory=user"],
}
COMMAND = """# @package _global_
workload: {name: command, objective: step_time_ms, direction: minimize}
command:
  run: ["{python}", train.py, "{x}"]
  log: {step_time_s: 'took ([\\d.]+)'}
  warmup: 1
  steps: 5
space: {x: "range(0, 3)"}
"""
CONFIGURATION = """# @package _global_
workload: {name: sleep, objective: step_time_ms, direction: minimize}
space: {x: "range(0, 3)"}
"""


def write_workload(folder: Path) -> None:
    """Write a workload of a user's own, as it stands where it is installed."""
    files = {
        "mytool/__init__.py": "",
        "mytool/sleep.py": WORKLOAD,
        "mytool-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mytool\nVersion: 1.0\n",
        "mytool-1.0.dist-info/entry_points.txt": "[sweeper.workloads]\nsleep = mytool.sleep:Sleep\n",
        "conf/workload/sleep.yaml": CONFIGURATION,
        "conf/workload/tuner.yaml": COMMAND,
        "train.py": "import time\nfor _ in range(9): time.sleep(0.1); print('took 0.1', flush=True)\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# ── without Ray ──


def test_a_node_with_the_same_code_needs_nothing_and_one_with_another_gets_ours() -> None:
    needed = SweepCode()
    ours = read_code(*needed.question)
    other = {**ours, "sweeper": "0123"}
    assert ours["sweeper"] and not needed.find_missing(ours) and not needed.find_problem(ours)
    assert needed.find_missing(other) == {"sweeper"} and "lacks gpu-sweeper" in needed.find_problem(other)
    assert not SweepCode(sent=frozenset({"sweeper"})).find_problem(other)


def test_a_node_with_another_version_is_refused_even_where_ours_is_sent() -> None:
    ours = read_code(*SweepCode().question)
    needed = SweepCode(sent=frozenset({"sweeper"}))
    problem = needed.find_problem({**ours, "version": "0.1.0", "sweeper": "0123"})
    assert problem == f"has gpu-sweeper 0.1.0, this sweep runs {ours['version']}; install {ours['version']} there"


def test_a_node_reads_its_own_packages_and_not_those_that_ray_has_brought(tmp_path: Path) -> None:
    brought = tmp_path / "runtime_resources" / "py_modules_files" / "a"
    for folder, version in ((brought, "0.2.0"), (tmp_path / "own", "0.1.0")):
        (folder / "sweeper").mkdir(parents=True)
        (folder / "workloads").mkdir()
        (folder / "sweeper" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    probe = REPOSITORY / "sweeper" / "execution" / "code_probe.py"
    program = (
        f"import sys; sys.path[:0] = {[str(brought), str(tmp_path / 'own')]!r}; exec(open({str(probe)!r}).read());"
    )
    program += "code = read_code(None, '', ()); print(code['version'], len(code['sweeper']))"
    printed = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["0.1.0", "16"]


def test_a_command_whose_words_are_a_program_names_the_files_among_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    run = ["python", "-c", "print(1)\n" * 100, "train.py", str(tmp_path / "train.py")]
    section = SimpleNamespace(workload=SimpleNamespace(name="command"))
    resolved: Any = SimpleNamespace(config=section, settings={"directory": str(tmp_path), "run": run})
    assert SweepCode.of_sweep(resolved).files == ("train.py",)


def test_a_folder_above_rays_limit_is_refused_with_its_largest_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"data/a": 3, "weights/b": 2, "train.py": 0, "sweeps/c": 9}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size << 20))
    check_size(tmp_path, "command.directory")
    monkeypatch.setattr(shipping, "LIMIT_BYTES", 4 << 20)
    with pytest.raises(UserInputError, match=r"its 5 MiB are more than the 4 MiB .*: data \(3 MiB\), weights \(2"):
        check_size(tmp_path, "command.directory")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("data/\n")
    check_size(tmp_path, "command.directory")


def test_a_command_runs_in_the_folder_that_ray_has_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"directory": "/on/the/driver", "steps": 5}
    assert localize(settings) == settings
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SHIPPED_DIRECTORY, "/on/the/driver")
    assert localize(settings) == {"directory": str(tmp_path), "steps": 5} and localize(None) is None


# ── with Ray ──


@pytest.fixture(scope="module")
def installed() -> Path:
    """Where a process without PYTHONPATH imports sweeper from."""
    program = "import sweeper; print(sweeper.__file__)"
    command = [sys.executable, "-P", "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, cwd="/", env={}, check=True).stdout
    return Path(printed.strip()).parent.parent


@pytest.fixture
def other_version(tmp_path: Path) -> Path:
    """A folder with another version of ours, for the PYTHONPATH of a node."""
    for name in ("sweeper", "workloads"):
        (tmp_path / "other" / name).mkdir(parents=True)
        (tmp_path / "other" / name / "__init__.py").write_text('__version__ = "0.1.0"\n')
    return tmp_path / "other"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["class", "command"])
def test_a_workload_of_the_users_own_runs_on_a_node_without_any_of_the_code(
    kind: str, workspace: Workspace, other_version: Path, installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of three nodes one has everything, one has nothing, and one has another version. A trial takes two nodes."""
    user = workspace.path / "user"
    write_workload(user)
    hidden = {user, *(place / name for place in (installed, REPOSITORY) for name in ("sweeper", "workloads"))}
    with start_cluster(PYTHONPATH=f"{REPOSITORY}:{user}") as cluster:
        cluster.add(PYTHONPATH=f"{REPOSITORY}:{user}")
        cluster.add(PYTHONPATH=str(other_version))
        bare = BareNode(cluster, sorted(hidden), tmp_path_factory.mktemp("elsewhere"))
        try:
            wait_for(lambda: cluster.count_alive() == 4, timeout_s=60)
            result = run_sweep(workspace, cluster, user, *SWEEPS[kind])
        finally:
            bare.close()
    assert result.code == 0, result.err
    runs = workspace.runs("trial")
    assert len(runs) == (6 if kind == "class" else 3) and {run.info.status for run in runs} == {"FINISHED"}
    assert all(len(run.data.tags["node_ids"].split()) == 2 for run in runs)
    part = "the workload's package" if kind == "class" else "the command's files"
    assert re.search(rf"lack gpu-sweeper and {part}; Ray sends this machine's", result.err)
    assert re.search(r"node \S+ has gpu-sweeper 0\.1\.0, this sweep runs \S+; install \S+ there; the sweep", result.err)


@pytest.mark.soak
def test_a_sweep_without_a_node_of_its_version_ends_before_anything_starts(
    workspace: Workspace, other_version: Path
) -> None:
    with start_cluster(PYTHONPATH=str(other_version)) as cluster:
        cluster.add(PYTHONPATH=str(other_version))
        result = run_sweep(workspace, cluster, workspace.path, "workload=probe")
    assert result.code == 2 and len(result.err.splitlines()) == 1, result.err
    assert "has gpu-sweeper 0.1.0" in result.err and not (workspace.path / "sweeps").exists()


@contextmanager
def start_cluster(**environment: str) -> Iterator[Cluster]:
    """Start a head without devices, whose processes have these environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", **environment}.items():
            patch.setenv(name, value)
        cluster = Cluster(nodes=0)
    try:
        yield cluster
    finally:
        cluster.close()


def run_sweep(workspace: Workspace, cluster: Cluster, user: Path, *arguments: str) -> CommandResult:
    """Run a sweep whose driver has this checkout and the user's folder on its path."""
    words = [*arguments, *SWEEP, f"cluster.address={cluster.address}"]
    return workspace.run(*words, RAY_AUTH_MODE="disabled", PYTHONPATH=f"{REPOSITORY}:{user}")
