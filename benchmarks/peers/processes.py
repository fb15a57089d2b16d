"""A Ray cluster of four CPUs for one tool, and the tool's driver on it: started, killed, waited for."""

import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.table import RECORDS, SEED

REPOSITORY = Path(__file__).resolve().parents[2]
WORKERS = 4
START_LIMIT_S = 120.0
RUN_LIMIT_S = 600.0


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = list(children.get(pid, []))
    for child in found:
        found.extend(children.get(child, []))
    return found


def kill_all(process: subprocess.Popen) -> float:
    """Kill a process and all that it has started with SIGKILL, and return the time of it."""
    pids = [process.pid, *descendants(process.pid)]
    killed_at_s = time.time()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    return killed_at_s


@contextmanager
def ray_cluster(python: Path, folder: Path, seed: int) -> Iterator[dict[str, str]]:
    """Start a Ray cluster of this environment and yield the variables of its drivers. Its workers inherit them too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"PYTHONPATH": str(REPOSITORY), "PATH": f"{python.parent}:{env['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env |= {SEED: str(seed), RECORDS: str(folder / "records.jsonl")}
    with tempfile.TemporaryDirectory(prefix="peers_ray_") as ray_folder, open(folder / "ray.log", "w") as log:
        words = ["start", "--head", "--block", f"--port={port}", f"--num-cpus={WORKERS}", "--include-dashboard=false"]
        command = [str(python.parent / "ray"), *words, f"--temp-dir={ray_folder}"]
        head = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder)
        try:
            _wait_for_start(folder / "ray.log", head)
            yield {**env, "RAY_ADDRESS": f"127.0.0.1:{port}"}
        finally:
            kill_all(head)


def _wait_for_start(log: Path, head: subprocess.Popen) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while "Ray runtime started" not in log.read_text():
        if head.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"Ray has not started: {log.read_text()[-2000:]}")
        time.sleep(0.2)


def start_driver(command: Sequence[str], env: dict[str, str], folder: Path) -> subprocess.Popen:
    """Start a tool in its folder. What it prints goes to a file there."""
    words = [env["PATH"].split(":")[0] + "/python" if word == "python" else word for word in command]
    with open(folder / "driver.log", "a") as log:
        return subprocess.Popen(words, env=env, stdout=log, stderr=log, cwd=folder)


def wait_for_driver(process: subprocess.Popen, folder: Path) -> None:
    """Wait until a tool has ended. Raises RuntimeError if it failed, or took too long."""
    try:
        status = process.wait(RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        kill_all(process)
        status = -1
    if status:
        raise RuntimeError(f"exit status {status}: {(folder / 'driver.log').read_text()[-3000:]}")
