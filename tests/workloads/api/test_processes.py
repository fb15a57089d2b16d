"""Processes that a trial leaves behind are found whatever they do to get away, and ended."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import wait_for
from workloads.api.processes import Orphans

SLEEP = ["/bin/sleep", "600"]


def fork_twice() -> None:
    """Start a daemon as `daemon(3)` does, without any variable of this process."""
    program = f"import os; os.setsid(); os.fork() and os._exit(0); os.execve({SLEEP[0]!r}, {SLEEP!r}, {{}})"
    subprocess.run([sys.executable, "-S", "-c", program], check=True)


def test_daemons_are_ended_and_children_in_use_are_kept() -> None:
    orphans = Orphans()
    held = subprocess.Popen(SLEEP)
    pool = multiprocessing.get_context("fork").Process(target=time.sleep, args=[600])
    pool.start()
    assert orphans.end() == []
    fork_twice()
    os.system("setsid env -i /bin/sleep 601 &")
    subprocess.Popen(["/bin/sleep", "602"], start_new_session=True)  # nobody can end it any more
    wait_for(lambda: b"601" in children())
    assert sorted(orphans.end()) == [f"/bin/sleep {number}" for number in (600, 601, 602)]
    assert held.poll() is None and pool.is_alive()
    for process in (held, pool):
        process.kill()
    assert held.wait() == -9
    pool.join()
    assert orphans.end() == []


def children() -> bytes:
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
