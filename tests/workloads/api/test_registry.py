"""Workloads are found by name: those of the packages in workloads/ and those of other distributions."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment

SLEEPER = """
from dataclasses import dataclass
from workloads.api.contract import Measurement, Workload

@dataclass(frozen=True)
class SleeperParameters:
    seconds: float = 1.0

class Sleeper(Workload):
    name = "sleeper"
    Parameters = SleeperParameters
    benchmark_version = "sleeper/1"

    def run(self, parameters, rank):
        return Measurement({"seconds": parameters.seconds}, (parameters.seconds,))
"""


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose `workloads` package also has the packages in `folder`."""
    extend = f"import workloads; workloads.__path__.append({str(folder)!r})\nfrom workloads.api import registry"
    command = [sys.executable, "-c", f"{extend}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)


def write_package(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def write_distribution(folder: Path, name: str, entry_point: str) -> None:
    """Write the metadata of an installed distribution that registers a workload."""
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[sweeper.workloads]\n{entry_point}\n")


def test_a_new_package_is_found_by_the_name_of_its_workload(tmp_path: Path) -> None:
    write_package(tmp_path, "napping", SLEEPER)
    code = (
        "from workloads.api.contract import Rank\nfrom workloads.api.trial import run_trial\n"
        "print('sleeper' in registry.names(), 'matmul' in registry.names())\n"
        "print(run_trial('sleeper', {'seconds': 2.5}, Rank()).step_times_s)"
    )
    result = run_python(code, tmp_path)
    assert result.stdout.splitlines() == ["True True", "(2.5,)"], result.stderr


def test_a_package_may_import_the_workload_of_another_one(tmp_path: Path) -> None:
    write_package(tmp_path, "napping", SLEEPER)
    write_package(tmp_path, "resting", "from workloads.napping import Sleeper\n")
    result = run_python("print(registry.names().count('sleeper'))", tmp_path)
    assert result.stdout.strip() == "1", result.stderr


@pytest.mark.parametrize("call", ["registry.names()", "registry.load('sleeper')"])
def test_two_packages_with_the_same_name_are_an_error_that_names_both(tmp_path: Path, call: str) -> None:
    write_package(tmp_path, "napping", SLEEPER)
    write_package(tmp_path, "resting", SLEEPER)
    result = run_python(call, tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "ValueError: workload name 'sleeper' is defined twice, by workloads.napping:Sleeper and by "
        "workloads.resting:Sleeper: rename one of them"
    )


def test_another_distribution_registers_a_workload_and_may_not_replace_a_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "sleeping.py").write_text(SLEEPER)
    write_distribution(tmp_path, "mytool", "sleeper = sleeping:Sleeper")
    path = f"import sys; sys.path.append({str(tmp_path)!r})\n"
    result = run_python(f"{path}print(registry.load('sleeper').benchmark_version)", tmp_path)
    assert result.stdout.strip() == "sleeper/1", result.stderr
    write_distribution(tmp_path, "othertool", "probe = sleeping:Sleeper")
    result = run_python(f"{path}registry.names()", tmp_path)
    assert "'probe' is defined twice, by workloads.probe:Probe and by sleeping:Sleeper" in result.stderr
