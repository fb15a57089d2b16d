"""The Dockerfiles pass hadolint, and the steps of the ROCm image that decide something run here with stand-ins.

No image is built. `python` is that of an empty environment, in which a stand-in for torch or for ROCm's SDK lies as in
AMD's images, and `pip` is a program that writes down how it was called.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

IMAGES = REPOSITORY / "launch" / "docker"
NAMES = ["Dockerfile.cuda", "Dockerfile.rocm", "Dockerfile.mlflow"]


def instructions(name: str) -> list[str]:
    """Return the instructions of a Dockerfile, each as one line."""
    lines = [line for line in (IMAGES / name).read_text().splitlines() if line and not line.startswith("#")]
    return "\n".join(lines).replace("\\\n", "").splitlines()


def step(containing: str) -> str:
    """Return the only RUN instruction of the ROCm image that contains this text, without RUN."""
    (command,) = [line for line in instructions("Dockerfile.rocm") if line.startswith("RUN ") and containing in line]
    return command.removeprefix("RUN ")


def test_the_dockerfiles_pass_hadolint() -> None:
    command = [Path(sys.executable).parent / "hadolint", "--no-color", *(IMAGES / name for name in NAMES)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_images_copy_only_the_build_context_and_do_not_run_as_root(name: str) -> None:
    lines = instructions(name)
    copied = [argument for line in lines if line.startswith("COPY ") for argument in line.split()[1:-1]]
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) <= sent and all((REPOSITORY / path).exists() for path in copied)
    # A number: Kubernetes cannot tell that a name is not root's.
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 1000"


@pytest.mark.parametrize("name", NAMES)
def test_images_name_no_package_index_and_pin_their_base(name: str) -> None:
    text = "\n".join(instructions(name))
    assert not re.search(r"index-url|find-links|https?:", text)
    base = re.search(r"ARG BASE=(\S+)", text) or re.search(r"FROM (\S+)", text)
    assert base and re.search(r":(?!latest)\S+", base[1])


@pytest.mark.parametrize("name", NAMES[:2])
def test_docker_knows_the_options_of_the_commands_in_the_comments(name: str) -> None:
    docker = shutil.which("docker")
    if not docker:
        pytest.skip("docker is not here")
    text = (IMAGES / name).read_text().replace("\\\n#", "")
    commands = [shlex.split(line) for line in re.findall(r"^#     (docker .+)", text, re.MULTILINE)]
    assert [command[1] for command in commands] == ["build", "run"]
    for command in commands:
        usage = subprocess.run([docker, command[1], "--help"], capture_output=True, text=True).stdout
        options = [word.split("=")[0] for word in command if word.startswith("-")]
        assert options and not [option for option in options if not re.search(rf"(^|[ ,]){option}\b", usage, re.M)]


# ── Dockerfile.rocm ──


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An empty Python environment: a base image without packages. Returns its folder of packages."""
    venv.create(tmp_path / "venv", symlinks=True)
    pip = tmp_path / "venv" / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/pip.log\n')
    pip.chmod(0o755)
    return next((tmp_path / "venv" / "lib").iterdir()) / "site-packages"


def run(command: str, base: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the base as the image's SHELL does."""
    (shell,) = [line for line in instructions("Dockerfile.rocm") if line.startswith("SHELL ")]
    binaries = base.parents[2] / "bin"
    env = {"PATH": f"{binaries}:{os.defpath}", "HOME": str(base)}
    return subprocess.run([*json.loads(shell.removeprefix("SHELL ")), command], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("version", "hip", "problem"),
    [
        ("2.12.0+rocm7.14.0", "7.14.60850", ""),
        ("2.10.0+rocm7.2.4", "7.2.26015", "the base image has torch 2.10.0+rocm7.2.4: sweeper needs 2.11 or later"),
        (
            "2.13.0+cu130",
            None,
            "the base image has torch 2.13.0+cu130: it is not built for ROCm; set --build-arg BASE=",
        ),
    ],
)
def test_a_base_whose_torch_cannot_work_ends_the_build(version: str, hip: str | None, problem: str, base: Path) -> None:
    (base / "torch").mkdir()
    (base / "torch" / "__init__.py").write_text(f"from . import version\n__version__ = {version!r}\n")
    (base / "torch" / "version.py").write_text(f"hip = {hip!r}\n")
    result = run(step("the base image has torch"), base)
    assert result.returncode == int(bool(problem)) and problem in result.stderr, result.stderr


def test_amdsmi_is_taken_from_the_sdk_wheel_where_it_lies(base: Path) -> None:
    package = base / "_rocm_sdk_core" / "share" / "amd_smi" / "amdsmi"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert run('python -c "import amdsmi"', base).returncode == 1
    assert run(step("sysconfig"), base).returncode == 0
    assert run(step("import amdsmi"), base).returncode == 0
    assert run("python -c 'import amdsmi; print(amdsmi.__file__)'", base).stdout.strip() == str(package / "__init__.py")
    assert not (base.parents[3] / "pip.log").exists()


def test_amdsmi_of_earlier_releases_is_installed_and_its_absence_ends_the_build(base: Path) -> None:
    assert run(step("sysconfig"), base).returncode == 0
    assert (base.parents[3] / "pip.log").read_text().split()[-1] == "/opt/rocm/share/amd_smi"
    assert run(step("import amdsmi"), base).returncode == 1
