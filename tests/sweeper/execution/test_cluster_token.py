"""A cluster with a token: clients without the right token are refused, and a clear message says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PROBE, CommandResult, Workspace, environment, wait_for


@dataclass
class TokenCluster:
    address: str
    token: Path


@pytest.fixture
def token_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenCluster]:
    temp = tmp_path_factory.mktemp("r", numbered=True)
    token = temp / "token"
    token.write_text("of-this-cluster" * 3)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--port=0", "--num-cpus=1", "--block"]
    command += ["--include-dashboard=false", f"--temp-dir={temp}"]
    env = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    head = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        address_file = temp / "ray_current_cluster"
        yield TokenCluster(wait_for(lambda: address_file.exists() and address_file.read_text()), token)
    finally:
        os.killpg(head.pid, signal.SIGKILL)


@pytest.mark.long(12)
def test_another_token_than_the_clusters_is_refused(workspace: Workspace, token_cluster: TokenCluster) -> None:
    arguments = [*PROBE, f"cluster.address={token_cluster.address}", "budget.trials=2"]
    other_token = workspace.path / "other"
    other_token.write_text("of-another-cluster" * 3)
    refused = workspace.run(*arguments, RAY_AUTH_TOKEN_PATH=str(other_token), timeout_s=20)
    assert refused.code == 2 and "requires a different token" in refused.err
    assert len(refused.err.splitlines()) == 1


@pytest.mark.soak  # `make test` uses the right token in tests/launch/test_slurm.py
def test_the_clusters_token_is_accepted(workspace: Workspace, token_cluster: TokenCluster) -> None:
    arguments = [*PROBE, f"cluster.address={token_cluster.address}", "budget.trials=2"]
    result = workspace.run(*arguments, RAY_AUTH_TOKEN_PATH=str(token_cluster.token))
    assert result.code == 0 and workspace.states() == {"COMPLETE": 2}, result.err


def test_a_local_cluster_without_a_token_is_refused(
    run_cli: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    refused = run_cli(*PROBE, "budget.trials=1")
    assert refused.code == 2 and "RAY_AUTH_MODE=disabled" in refused.err and "cluster.insecure=true" in refused.err


@pytest.mark.soak
def test_a_local_cluster_without_a_token_starts_with_cluster_insecure(workspace: Workspace) -> None:
    result = workspace.run(*PROBE, "budget.trials=1", "cluster.insecure=true", RAY_AUTH_MODE="disabled")
    assert result.code == 0, result.err
