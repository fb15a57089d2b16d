"""A cluster that asks for a token: who gets in, and what is said to whom does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PROBE, Place, environment, wait_for


@dataclass
class Cluster:
    address: str
    token: Path


@pytest.fixture
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    temp = tmp_path_factory.mktemp("r", numbered=True)
    token = temp / "token"
    token.write_text("of-this-cluster" * 3)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--port=0", "--num-cpus=1", "--block"]
    command += ["--include-dashboard=false", f"--temp-dir={temp}"]
    env = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    head = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        file = temp / "ray_current_cluster"
        yield Cluster(wait_for(lambda: file.exists() and file.read_text()), token)
    finally:
        os.killpg(head.pid, signal.SIGKILL)


def test_the_right_token_lets_in_and_another_does_not(place: Place, guarded: Cluster) -> None:
    words = [*PROBE, f"cluster.address={guarded.address}", "budget.trials=2"]
    other = place.path / "other"
    other.write_text("of-another-cluster" * 3)
    refused = place.run(*words, RAY_AUTH_TOKEN_PATH=str(other), timeout_s=20)
    assert refused.code == 2 and "asks for another token" in refused.err
    assert len(refused.err.splitlines()) == 1
    done = place.run(*words, RAY_AUTH_TOKEN_PATH=str(guarded.token))
    assert done.code == 0 and place.states() == {"COMPLETE": 2}, done.err


def test_no_cluster_is_started_without_a_token_unless_told(place: Place) -> None:
    refused = place.run(*PROBE, "budget.trials=1", RAY_AUTH_MODE="disabled")
    assert refused.code == 2 and "RAY_AUTH_MODE=disabled" in refused.err and "cluster.insecure=true" in refused.err
    done = place.run(*PROBE, "budget.trials=1", "cluster.insecure=true", RAY_AUTH_MODE="disabled")
    assert done.code == 0, done.err
