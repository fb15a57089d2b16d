"""The processes of a local Ray."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment, wait_for

# Starts Ray as a sweep does, prints its processes and how a task with variables of its own ends, and waits.
PROGRAM = """
import os, ray, psutil  # psutil is a part of Ray
from sweeper.execution.cluster import init_ray
from sweeper.execution.ray_internals import without_unused_processes
with without_unused_processes():
    init_ray(address="local", num_cpus=1, object_store_memory=128 * 2**20)
task = ray.remote(lambda: os.environ["OF_THE_TASK"]).options(runtime_env={"env_vars": {"OF_THE_TASK": "set"}})
print(ray.get(task.remote()), *(f"{p.pid}:{p.name()}" for p in psutil.Process().children(recursive=True)), flush=True)
input()
"""


@pytest.mark.long(8)
def test_a_local_ray_has_no_dashboard_agent_and_ends_with_a_killed_driver() -> None:
    """Fails where a version of Ray needs other options against the agent: `NO_AGENT` in ray_internals.py."""
    command = [sys.executable, "-c", PROGRAM]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert driver.stdout is not None
        value, *processes = driver.stdout.readline().split()
        names = {int(pid): name for pid, _, name in (process.partition(":") for process in processes)}
        assert value == "set" and {"gcs_server", "raylet", "cat"} <= set(names.values())
        assert not any("Dashboard" in name for name in names.values())
    finally:
        driver.kill()
        driver.wait()
    # Ray's other agent first tries for a minute to tell the head, which has ended, of the raylet's end.
    wait_for(lambda: not any(is_running(pid) for pid, name in names.items() if "RuntimeEnvAgent" not in name))


def is_running(pid: int) -> bool:
    """Return whether a process runs. One that has ended and that nobody has waited for has no command line."""
    try:
        return bool(Path("/proc", str(pid), "cmdline").read_bytes())
    except OSError:
        return False
