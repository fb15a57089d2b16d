"""A finished sweep of 100,000 trials that is run again. `test_sweep.py` has the same for a small one."""

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, environment


@pytest.mark.soak
@pytest.mark.timeout(3600)  # the tables of its MLflow store alone take minutes to make on a busy machine
def test_a_finished_sweep_of_100_000_trials_says_so_within_a_minute_of_cpu_time() -> None:
    command = [sys.executable, "-m", "benchmarks.scale", "--part", "rerun", "--trials", "100000"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert not measured["close"]["says_finished"] and measured["rerun"]["says_finished"]
    assert measured["parent"] == "FINISHED"
    assert measured["rerun"]["cpu_s"] < 60 and measured["rerun"]["memory_mib"] < 2048
