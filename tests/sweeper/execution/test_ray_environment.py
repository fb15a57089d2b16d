"""Before Ray is imported, the GPUs are named where Ray reads them, and a package that breaks Ray is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sweeper.execution import ray_environment
from sweeper.execution.cluster import discover_nodes
from tests.conftest import CommandResult
from tests.conftest import environment as variables
from workloads.api import gpu_setup
from workloads.api.errors import UserInputError


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /dev, without GPUs, and an environment that names none."""
    folder = tmp_path / "dev"
    folder.mkdir()
    monkeypatch.setattr(gpu_setup, "DEVICES", folder)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_slurms_variable_becomes_the_one_that_ray_reads(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert ray_environment.shell_commands().splitlines() == [
        "export HIP_VISIBLE_DEVICES=5",
        "unset ROCR_VISIBLE_DEVICES",
    ]
    ray_environment.prepare()
    assert os.environ["HIP_VISIBLE_DEVICES"] == "5" and "ROCR_VISIBLE_DEVICES" not in os.environ


def test_variables_of_nvidia_gpus_stay_as_they_are(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (devices / "nvidia0").touch()
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert ray_environment.shell_commands() == ""


@pytest.mark.parametrize(
    ("address", "insecure", "shell", "mode"),
    [
        (None, False, None, None),  # Ray uses a token on this machine by itself
        ("local", False, None, None),
        ("192.0.2.1:6379", False, None, "token"),
        ("192.0.2.1:6379", True, None, None),
        ("192.0.2.1:6379", False, "disabled", "disabled"),  # refused when the cluster is joined
    ],
)
def test_ray_uses_a_token_for_the_address_of_a_cluster(
    address: str | None,
    insecure: bool,
    shell: str | None,
    mode: str | None,
    devices: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", shell or "")
    if shell is None:
        monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_environment.prepare(address, insecure)
    assert os.environ.get("RAY_AUTH_MODE") == mode


@pytest.mark.parametrize("words", [(), ("doctor",)])
def test_an_amdsmi_with_which_ray_crashes_gives_a_message(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "amdsmi.py").write_text("raise KeyError('libamd_smi.so')")
    env = variables()
    env["PYTHONPATH"] += f":{tmp_path}"
    command = [sys.executable, "-m", "sweeper", *words]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    result = CommandResult(run.returncode, run.stdout, run.stderr)
    assert result.code == 2 and "amdsmi does not work (KeyError" in result.err and "pip uninstall amdsmi" in result.err
    assert len(result.err.splitlines()) == 1


def test_the_variable_that_misleads_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, reason in (("http://127.0.0.1:8265", "dashboard"), ("127.0.0.1:9", "no Ray cluster responds")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserInputError, match=rf"^RAY_ADDRESS={address}: .*{reason}.*cluster\.address=local"):
            discover_nodes(None)
    monkeypatch.setenv("TMPDIR", "/" + 90 * "t")
    monkeypatch.setenv("RAY_TMPDIR", "")
    ray_environment.prepare("local")
    assert os.environ["RAY_TMPDIR"] == "/tmp"
    monkeypatch.setenv("RAY_TMPDIR", "/" + 90 * "t")
    with pytest.raises(UserInputError, match=r"^RAY_TMPDIR=/t+: is too long .* at most"):
        ray_environment.prepare("local")


def test_a_local_cluster_has_a_token_wherever_the_home_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    ray_environment.provide_token(variables := {})
    token = file.read_text()
    ray_environment.provide_token(variables)
    assert len(token) == 64 and file.read_text() == token and file.stat().st_mode & 0o777 == 0o600
    file.write_text("")  # as a full disk leaves it
    ray_environment.provide_token(variables)
    assert len(file.read_text()) == 64 and not variables
    monkeypatch.setenv("HOME", str(file))  # which cannot have a folder
    ray_environment.provide_token(variables)
    assert len(Path(variables["RAY_AUTH_TOKEN_PATH"]).read_text()) == 64
    assert "HOME=" in (printed := capsys.readouterr().err) and variables["RAY_AUTH_TOKEN_PATH"] in printed


@pytest.mark.parametrize(
    ("options", "problem"), [("size=64k", "has 0 MiB free, Ray needs 8"), ("ro", "cannot be written")]
)
def test_a_folder_that_ray_cannot_use_is_refused(options: str, problem: str) -> None:
    mounted = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {options} none /mnt && exec "$@"', "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    program = "from sweeper.execution.ray_environment import prepare; prepare()"
    command = [*mounted, sys.executable, "-c", program]
    result = subprocess.run(command, env=variables(TMPDIR="/mnt/new"), capture_output=True, text=True)
    assert f"TMPDIR=/mnt/new: {problem}" in result.stderr
