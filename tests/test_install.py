"""The installed package: its command, its conf/, completion in a shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.long(14), pytest.mark.xdist_group("installed")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is installed, and the repository is not to be seen."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "launch").mkdir()
    for name in ("pyproject.toml", "README.md", "launch/packaging.py"):
        shutil.copy(REPOSITORY / name, source / name)
    for name in ("sweeper", "workloads", "conf"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(source)]
    subprocess.run(pip, check=True, capture_output=True)
    path = os.pathsep.join([str(site / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": str(site), "PATH": path}


def test_the_command_finds_its_configuration_from_any_directory(installed: dict[str, str], tmp_path: Path) -> None:
    program = "import sweeper.config.resolution as c; print(c.CONF)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=installed, capture_output=True, text=True
    )
    assert result.stdout.strip() == f"{installed['PYTHONPATH']}/sweeper/conf"
    command = ["sweeper", "workload=probe", "budget.trials=2", "hardware=cpu", "plan=true"]
    result = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=90)
    assert result.returncode == 0, result.stderr
    assert "until 2 trials" in result.stdout


@pytest.mark.soak
def test_the_installed_command_runs_a_sweep(installed: dict[str, str], tmp_path: Path) -> None:
    command = ["sweeper", "workload=probe", "budget.trials=2", "hardware=cpu"]
    result = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=90)
    assert result.returncode == 0, result.stderr
    assert "2 complete" in result.stdout
    assert "extend   sweeper workload=probe hardware=cpu budget.trials=4" in result.stdout


def test_every_package_is_installed(installed: dict[str, str]) -> None:
    packages = [
        p.parent.relative_to(REPOSITORY) for n in ("sweeper", "workloads") for p in (REPOSITORY / n).rglob("*.py")
    ]
    assert not {package for package in packages if not (Path(installed["PYTHONPATH"]) / package).is_dir()}


def test_a_shell_completes_groups_choices_and_keys(installed: dict[str, str], tmp_path: Path) -> None:
    script = """
        eval "$(sweeper -sc install=bash)"
        for COMP_LINE in "sweeper workload=" "sweeper hardware=mi3" "sweeper budget.t"; do
            COMP_POINT=${#COMP_LINE} COMP_CWORD=1 COMPREPLY=()
            hydra_bash_completion
            echo "${COMPREPLY[@]}"
        done
    """
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=installed, capture_output=True, text=True)
    names, gpus = (
        sorted(path.stem for path in (REPOSITORY / "conf").glob(files))
        for files in ("workload/*.yaml", "hardware/mi3*")
    )
    assert result.stdout.splitlines() == [
        " ".join(f"workload={name}" for name in names),
        " ".join(f"hardware={name}" for name in gpus),
        "budget.time_s= budget.trials=",
    ]
