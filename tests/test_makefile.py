"""`make` installs the torch that a machine's GPUs need. The commands are shown; PyTorch's indexes are not reached."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from workloads.api.gpu_setup import ROCM_WHEELS

CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text().splitlines()
(TORCH,) = [line for line in CONSTRAINTS if line.startswith("torch==")]


def shown_commands(folder: Path, *variables: str, **environment: str) -> list[str]:
    """Return the commands with which `make run` installs, on a machine whose device files are in `folder`/dev."""
    command = ["make", "--dry-run", "run", f"VENV={folder}/venv", f"DEV={folder}/dev", f"AMDSMI={folder}/amd_smi"]
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "TORCH_INDEX"},
        **environment,
    }
    run = subprocess.run([*command, *variables], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True)
    return [line for line in run.stdout.splitlines() if "pip install" in line or "constraints" in line]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_without_amd_gpus_torch_comes_with_the_other_packages(machine: Path) -> None:
    for devices in ([], ["nvidia0"], ["nvidia0", "kfd"]):  # with AMD's integrated graphics there is a kfd too
        for name in devices:
            (machine / "dev" / name).touch()
        (constraints, install) = shown_commands(machine)
        assert TORCH in constraints and install.endswith("-e '.[dev]'") and "index" not in install


def test_with_amd_gpus_torch_comes_from_the_index_of_rocm(machine: Path) -> None:
    (machine / "dev" / "kfd").touch()
    (_, torch, others) = shown_commands(machine)
    assert torch.endswith(f"--index-url {ROCM_WHEELS} '{TORCH}'")
    assert "index" not in others  # torch is there then; pip keeps it, because its version is the constraint's


def test_an_index_can_be_named(machine: Path) -> None:
    index = "https://download.pytorch.org/whl/cpu"
    assert f"--index-url {index} '{TORCH}'" in shown_commands(machine, f"TORCH_INDEX={index}")[1]
    (machine / "dev" / "kfd").touch()
    assert f"--index-url {index} '{TORCH}'" in shown_commands(machine, TORCH_INDEX=index)[1]


def test_the_torch_of_a_rocm_image_is_kept(machine: Path) -> None:
    (machine / "dev" / "kfd").touch()
    (machine / "site" / "torch").mkdir(parents=True)
    version = "__version__ = '2.12.0+rocm7.2.git1'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.2'\n"
    (machine / "site" / "torch" / "version.py").write_text(version)
    (machine / "site" / "torch" / "__init__.py").touch()
    (constraints, install) = shown_commands(machine, PYTHONPATH=str(machine / "site"))
    assert "echo 'torch==2.12.0+rocm7.2.git1'" in constraints and "index" not in install


def test_amds_own_amdsmi_is_installed_where_rocm_has_it(machine: Path) -> None:
    (machine / "dev" / "kfd").touch()
    (machine / "amd_smi").mkdir()
    assert shown_commands(machine)[-1].endswith("/venv/amd_smi")


def test_no_constraint_holds_for_one_kind_of_gpu_alone() -> None:
    """A version without a local part, such as 2.13.0, is also that of 2.13.0+rocm7.2 and of 2.13.0+cpu (PEP 440)."""
    assert "+" not in TORCH
    assert not [line for line in CONSTRAINTS if re.match(r"nvidia-(?!ml-py)|triton|pytorch-triton", line)]


@pytest.mark.xdist_group("one")
def test_tests_of_a_group_share_a_worker(request: pytest.FixtureRequest) -> None:
    """Else each worker makes what the tests of a group share: seconds, or processes, for each group."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@one"), (
            "pytest-xdist ignores xdist_group: it sets Node._nodeid, which pytest 9.2 does not read. Allow only "
            "releases of pytest in pyproject.toml and constraints.txt with which it works."
        )
