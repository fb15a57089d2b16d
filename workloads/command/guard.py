"""Terminate a program and everything that it started, on request or when its parent process is gone.

    python guard.py MARK SESSION FOLDER      waits for the end of its standard input, then terminates the marked
                                             processes and removes FOLDER, the program's output

A process is marked if its environment contains MARK. Children inherit it, also those in a session of their own whose
parent has ended. A process is also marked if it is in the program's session, whatever happened to its environment. The
file is run by an interpreter without site packages, so it imports only the standard library.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0  # between SIGTERM and SIGKILL


def terminate_marked(mark: str, session: int, reap: Callable[[], object] = lambda: None) -> None:
    """Terminate all marked processes: SIGTERM first, SIGKILL after GRACE_S. `reap` reaps a child of this process."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        signalled = set[int]()
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            reap()
            alive = find_marked(mark, session)
            if not alive:
                return
            for pid in alive - signalled:  # also processes that were started meanwhile
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)
            signalled |= alive
            time.sleep(0.05)


def find_marked(mark: str, session: int) -> set[int]:
    """Return the marked processes, except those that have ended and were not reaped."""
    pids = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                state, _, _, process_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                is_marked = int(process_session) == session or mark.encode() in (entry / "environ").read_bytes()
                if is_marked and state != "Z":
                    pids.add(int(entry.name))
    return pids


if __name__ == "__main__":
    if os.fork():  # a worker is killed with its children, and this process has to outlive it
        os._exit(0)
    os.setsid()
    sys.stdin.read()
    terminate_marked(sys.argv[1], int(sys.argv[2]))
    shutil.rmtree(sys.argv[3], ignore_errors=True)
