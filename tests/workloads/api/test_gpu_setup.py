"""A machine with GPUs that cannot be used is recognized, with the remedy."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.amd import forget_module
from workloads.api import gpu_setup
from workloads.api.gpu_setup import find_broken_amdsmi, find_problems, read_torch_build

ROCM = "hip: Optional[str] = '7.2.26015'\n"
CUDA = "cuda: Optional[str] = '13.0'\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, torch and amdsmi: folders that stand for /dev and for the installed packages."""
    for name in ("dev", "site"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(gpu_setup, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    for name in ("torch", "amdsmi"):
        forget_module(monkeypatch, name)
    return tmp_path


def install(machine: Path, package: str, text: str, file: str = "__init__.py") -> None:
    (machine / "site" / package).mkdir()
    (machine / "site" / package / file).write_text(text)


def install_torch(machine: Path, *fields: str) -> None:
    """Install a torch of which only version.py is there: it cannot be imported."""
    lines = ["from typing import Optional\n__version__ = '2.13.0+build'\n", *fields]
    lines += [f"{name}: Optional[str] = None\n" for name in ("cuda", "hip") if not any(name in f for f in fields)]
    install(machine, "torch", "".join(lines), "version.py")
    (machine / "site" / "torch" / "__init__.py").write_text("raise AssertionError('imported')")


def test_a_machine_without_gpus_has_no_problem(machine: Path) -> None:
    install_torch(machine)
    assert find_problems(0, {}) == []


def test_a_machine_whose_gpus_are_used_has_no_problem(machine: Path) -> None:
    (machine / "dev" / "kfd").touch()
    install_torch(machine, ROCM)
    assert find_problems(8, {}) == []


def test_without_amdsmi_ray_sees_no_amd_gpu(machine: Path) -> None:
    (machine / "dev" / "kfd").touch()
    (problem,) = find_problems(0, {})
    assert "kfd, but Ray sees no GPU, because AMD's amdsmi is not installed" in problem.problem
    assert problem.remedy == "pip install /opt/rocm/share/amd_smi"


def test_the_amdsmi_of_rocms_sdk_is_used_where_it_lies(machine: Path) -> None:
    (machine / "dev" / "kfd").touch()
    (machine / "site" / "_rocm_sdk_core" / "share" / "amd_smi").mkdir(parents=True)
    (problem,) = find_problems(0, {})
    site = machine / "site"
    assert problem.remedy == f"echo {site}/_rocm_sdk_core/share/amd_smi > {site}/amdsmi_of_rocm.pth"


def test_an_amdsmi_that_lists_no_gpu_is_no_missing_amdsmi(machine: Path) -> None:
    (machine / "dev" / "kfd").touch()
    install(machine, "amdsmi", "")
    (problem,) = find_problems(0, {})
    assert "not installed" not in problem.problem and "amd-smi list" in problem.remedy


def test_nvidia_gpus_that_ray_does_not_see_are_a_problem(machine: Path) -> None:
    (machine / "dev" / "nvidiactl").touch()
    assert find_problems(0, {}) == []
    (machine / "dev" / "nvidia3").touch()
    (problem,) = find_problems(0, {})
    assert "nvidia3, but Ray sees no GPU" in problem.problem and "nvidia-smi" in problem.remedy


def test_a_variable_that_hides_every_gpu_is_named(machine: Path) -> None:
    (machine / "dev" / "kfd").touch()
    (problem,) = find_problems(0, {"HIP_VISIBLE_DEVICES": ""})
    assert "because HIP_VISIBLE_DEVICES leaves none" in problem.problem


def test_a_device_file_that_this_user_may_not_open_is_named_with_its_group(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = machine / "dev" / "kfd"
    device.touch()
    monkeypatch.setattr("os.access", lambda path, mode: path != device)  # tests may run as root, who may open all
    (problem,) = find_problems(8, {})
    assert problem.problem.endswith("kfd") and f"group {device.stat().st_gid}" in problem.remedy


@pytest.mark.parametrize(
    ("device", "build", "platform", "remedy"),
    [
        ("kfd", CUDA, "ROCm", "--index-url https://download.pytorch.org/whl/rocm7.2 torch"),
        ("kfd", "", "ROCm", "--index-url https://download.pytorch.org/whl/rocm7.2 torch"),
        ("nvidia0", ROCM, "CUDA", "--force-reinstall torch"),
    ],
)
def test_a_torch_that_is_built_for_something_else_is_a_problem(
    machine: Path, device: str, build: str, platform: str, remedy: str
) -> None:
    (machine / "dev" / device).touch()
    install_torch(machine, build)
    (problem,) = find_problems(8, {})
    assert f"torch 2.13.0+build is built without {platform}" in problem.problem and problem.remedy.endswith(remedy)


def test_a_torch_that_supports_one_of_both_vendors_is_no_problem(machine: Path) -> None:
    """A workstation with an NVIDIA GPU may have AMD's integrated graphics, for which there is a /dev/kfd too."""
    for device in ("kfd", "nvidia0"):
        (machine / "dev" / device).touch()
    install_torch(machine, CUDA)
    assert find_problems(1, {}) == []


def test_the_build_of_the_installed_torch_is_read() -> None:
    build = read_torch_build()
    assert build is not None and build.version == version("torch")
    assert build.supports(gpu_setup.NVIDIA) + build.supports(gpu_setup.AMD) <= 1


@pytest.mark.parametrize(
    ("text", "is_broken"), [("", False), ("raise ImportError('x')", False), ("raise KeyError('libamd_smi.so')", True)]
)
def test_an_amdsmi_whose_import_makes_ray_crash_is_recognized(machine: Path, text: str, is_broken: bool) -> None:
    assert find_broken_amdsmi() is None
    install(machine, "amdsmi", text)
    problem = find_broken_amdsmi()
    assert (problem is not None) == is_broken
    if problem:
        assert "KeyError: 'libamd_smi.so'" in str(problem) and "pip uninstall amdsmi" in str(problem)
